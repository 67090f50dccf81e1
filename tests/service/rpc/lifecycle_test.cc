// Deadlines, cancelled calls, limits, and the end of the server.
#include <gmock/gmock.h>
#include <grpcpp/create_channel_posix.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <new>
#include <stdexcept>
#include <thread>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "kvstore/clock.h"
#include "tests/service/rpc/lifecycle_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;

// Repeats the progress until the call does not want any more, slowly enough for the stream.
bool RepeatUntilRefused(const kvstore::BuildProgress& progress,
                        const std::function<bool(const kvstore::BuildProgress&)>& pass_on) {
  while (pass_on(progress)) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return false;
}

TEST_F(LifecycleTest, ACancelledBuildLeavesNoIndex) {
  hooks_.on_progress = RepeatUntilRefused;
  StartHooked();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(300);
  const std::string before = DumpButTail(*client, sequence_id);
  v1::BuildIndexRequest request;
  request.set_sequence_id(sequence_id);
  *request.mutable_index() = Pq(2, 4);
  const auto context = client->Context();
  const auto reader = client->kv().BuildIndex(context.get(), request);
  v1::BuildProgress progress;
  ASSERT_TRUE(reader->Read(&progress));
  context->TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), StatusCode::CANCELLED);
  ExpectDumpAfterBuild(*client, sequence_id, before);
  client->Ingest(sequence_id, 300, 10);
}

TEST_F(LifecycleTest, ABuildEndsAtItsDeadlineWithoutAnIndex) {
  hooks_.on_progress = RepeatUntilRefused;
  StartHooked([](Config& config) {
    config.default_timeout = absl::Seconds(1);
    config.max_timeout = absl::Seconds(3);
  });
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(300);
  const std::string before = DumpButTail(*client, sequence_id);
  v1::BuildIndexRequest request;
  request.set_sequence_id(sequence_id);
  *request.mutable_index() = Pq(2, 4);
  const kvstore::SteadyTime begun = kvstore::SteadyTime::Now();
  grpc::ClientContext context;  // without a deadline: max_timeout holds, not default_timeout
  context.AddMetadata("pqcached-session", client->token());
  const auto reader = client->kv().BuildIndex(&context, request);
  v1::BuildProgress progress;
  while (reader->Read(&progress)) {
  }
  EXPECT_TRUE(Failed(reader->Finish(), StatusCode::DEADLINE_EXCEEDED, "", "deadline"));
  EXPECT_GE(kvstore::SteadyTime::Now() - begun, absl::Seconds(2));
  ExpectDumpAfterBuild(*client, sequence_id, before);
}

TEST_F(LifecycleTest, ABuildWhoseProgressNobodyReadsGoesOn) {
  constexpr uint32_t kReports = 20'000;
  absl::Notification begun;
  hooks_.on_progress = [&](kvstore::BuildProgress progress, const auto& pass_on) {
    if (!begun.HasBeenNotified()) begun.Notify();
    for (uint32_t i = 1; i <= kReports; ++i) {
      progress.iterations = i;
      if (!pass_on(progress)) return false;
    }
    return true;
  };
  StartHooked();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(100);
  v1::BuildIndexRequest request;
  request.set_sequence_id(sequence_id);
  *request.mutable_index() = Pq(2, 4);
  const auto context = client->Context();
  const auto reader = client->kv().BuildIndex(context.get(), request);
  begun.WaitForNotification();  // else what waits for the build's end could be in its way
  AwaitWriters(*client, sequence_id, 100);
  v1::BuildProgress progress;
  while (reader->Read(&progress)) {
  }
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(progress.iterations(), kReports) << "the newest is never left out";
}

TEST_F(LifecycleTest, ACallerThatDoesNotReadWhatIsLeftOfTheProgressIsCutOff) {
  hooks_.on_progress = [](kvstore::BuildProgress progress, const auto& pass_on) {
    for (uint32_t i = 1; i <= 20'000; ++i) {
      progress.iterations = i;
      if (!pass_on(progress)) return false;
    }
    return true;
  };
  const std::string log = directory_ / "log";
  StartHooked([&](Config& config) {
    config.stream_timeout = absl::Milliseconds(200);
    config.log_level = "warning";
    config.log_file = log;
  });
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(100);
  grpc::ChannelArguments arguments;  // a channel of its own, on which little may be under way
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1);
  const auto kv = v1::KvCache::NewStub(
      grpc::CreateCustomChannel(endpoint(), grpc::InsecureChannelCredentials(), arguments));
  v1::BuildIndexRequest request;
  request.set_sequence_id(sequence_id);
  *request.mutable_index() = Pq(2, 4);
  const auto context = client->Context();
  const auto reader = kv->BuildIndex(context.get(), request);
  AwaitText(log, "event=progress_not_read");
  v1::BuildProgress progress;
  while (reader->Read(&progress)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), StatusCode::CANCELLED);
  EXPECT_EQ(Stats(*client).builds_in_flight(), 0u);
  client->Ingest(sequence_id, 100, 10);
}

TEST_F(LifecycleTest, ABuildHearsBetweenReportsThatItsCallerHasGone) {
  absl::Notification begun;
  absl::Notification heard;
  hooks_.before_build = [&](const kvstore::BuildSpec& spec) {
    begun.Notify();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (spec.is_cancelled && !spec.is_cancelled() && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    if (spec.is_cancelled && spec.is_cancelled()) heard.Notify();
  };
  StartHooked();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(300);
  const std::string before = DumpButTail(*client, sequence_id);
  v1::BuildIndexRequest request;
  request.set_sequence_id(sequence_id);
  *request.mutable_index() = Pq(2, 4);
  const auto context = client->Context();
  const auto reader = client->kv().BuildIndex(context.get(), request);
  begun.WaitForNotification();
  context->TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), StatusCode::CANCELLED);
  EXPECT_TRUE(heard.WaitForNotificationWithTimeout(absl::Seconds(60)));
  ExpectDumpAfterBuild(*client, sequence_id, before);
}

TEST_F(LifecycleTest, AnExceptionEndsItsCallAlone) {
  std::atomic<int> calls = 0;
  hooks_.before_top_k = [&] {
    const int call = calls++;
    if (call == 0) throw std::bad_alloc();
    if (call == 1) throw std::length_error("vector");
    if (call == 2) throw std::runtime_error("surprise");
  };
  hooks_.before_build = [](const auto&) { throw std::bad_alloc(); };
  StartHooked();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(10);
  EXPECT_TRUE(Failed(TopK(*client, sequence_id, kLong), StatusCode::RESOURCE_EXHAUSTED, "memory"));
  EXPECT_TRUE(Failed(TopK(*client, sequence_id, kLong), StatusCode::RESOURCE_EXHAUSTED, "memory"));
  EXPECT_TRUE(Failed(TopK(*client, sequence_id, kLong), StatusCode::INTERNAL, "", "surprise"));
  EXPECT_TRUE(TopK(*client, sequence_id, kLong).ok());
  v1::BuildIndexRequest request;
  request.set_sequence_id(sequence_id);
  *request.mutable_index() = Pq(2, 4);
  const auto context = client->Context();
  EXPECT_TRUE(Failed(client->kv().BuildIndex(context.get(), request)->Finish(),
                     StatusCode::RESOURCE_EXHAUSTED, "memory"));
}

TEST_F(LifecycleTest, ASequenceThatNobodyHearsOfIsDropped) {
  absl::Notification begun;
  absl::Notification keep_going;
  hooks_.before_create_sequence = [&] {
    begun.Notify();
    keep_going.WaitForNotification();
  };
  StartHooked([](Config& config) { config.default_timeout = absl::Seconds(1); });
  const auto client = Connect();
  v1::CreateSequenceRequest request;
  request.set_cache_id(client->OpenCache());
  const auto context = client->Context();
  grpc::Status status;
  std::thread maker([&] {
    v1::CreateSequenceResponse response;
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(500));
    status = client->kv().CreateSequence(context.get(), request, &response);
  });
  begun.WaitForNotification();
  maker.join();
  EXPECT_EQ(status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  // The server counts from when it heard of the call: an idle stream that came later, with more time,
  // ends later.
  grpc::ClientContext idle;
  idle.AddMetadata("pqcached-session", client->token());
  v1::IngestResponse response;
  EXPECT_EQ(client->kv().Ingest(&idle, &response)->Finish().error_code(),
            StatusCode::DEADLINE_EXCEEDED);
  keep_going.Notify();
  v1::StatsResponse stats;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const auto ended = [&] {
    stats = Stats(*client);
    for (const v1::RpcStats& rpc : stats.rpcs()) {
      if (absl::StrContains(rpc.method(), "CreateSequence")) return true;
    }
    return false;
  };
  while (!ended()) ASSERT_LT(std::chrono::steady_clock::now(), until);
  EXPECT_EQ(Stats(*client).sequence_count(), 0u);
}

TEST_F(LifecycleTest, WhatIsOverdueIsNotBegun) {
  absl::Notification begun;
  absl::Notification keep_going;
  std::atomic<int> calls = 0;
  hooks_.before_top_k = [&] {
    if (calls++ > 0) return;
    begun.Notify();
    keep_going.WaitForNotification();
  };
  StartHooked([](Config& config) {
    config.call_threads = 1;
    config.default_timeout = config.max_timeout = absl::Seconds(2);
  });
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(10);
  std::thread first([&] { EXPECT_TRUE(TopK(*client, sequence_id, kLong).ok()); });
  begun.WaitForNotification();
  EXPECT_EQ(TopK(*client, sequence_id, std::chrono::milliseconds(100)).error_code(),
            StatusCode::DEADLINE_EXCEEDED);
  // The server counts from when it heard of the call. An idle stream that came later, with more
  // time, ends later.
  grpc::ClientContext context;
  context.AddMetadata("pqcached-session", client->token());
  v1::IngestResponse response;
  EXPECT_EQ(client->kv().Ingest(&context, &response)->Finish().error_code(),
            StatusCode::DEADLINE_EXCEEDED);
  keep_going.Notify();
  first.join();
  EXPECT_EQ(Stats(*client).sequence_count(), 1u);  // behind the overdue call in the queue
  EXPECT_EQ(calls, 1);
}

TEST_F(LifecycleTest, AnIdleIngestEndsAtTheDefaultDeadline) {
  Start([](Config& config) { config.default_timeout = absl::Milliseconds(500); });
  const auto client = Connect();
  const uint64_t sequence_id = client->NewSequence();
  grpc::ClientContext context;
  context.AddMetadata("pqcached-session", client->token());
  v1::IngestResponse response;
  const auto writer = client->kv().Ingest(&context, &response);
  v1::IngestRequest request;
  request.mutable_header()->set_sequence_id(sequence_id);
  writer->Write(request);
  EXPECT_TRUE(Failed(writer->Finish(), StatusCode::DEADLINE_EXCEEDED, "", "deadline"));
  AwaitWriters(*client, sequence_id, 0);
}

TEST_F(LifecycleTest, TooManyWaitingCallsAreRefused) {
  absl::Notification begun;
  absl::Notification keep_going;
  std::atomic<int> calls = 0;
  hooks_.before_top_k = [&] {
    if (calls++ == 0) begun.Notify();
    keep_going.WaitForNotification();
  };
  StartHooked([](Config& config) {
    config.call_threads = 1;
    config.max_pending_calls = 1;
  });
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(10);
  std::thread first([&] { EXPECT_TRUE(TopK(*client, sequence_id, kLong).ok()); });
  begun.WaitForNotification();
  // One of two finds the only waiting place taken; it lets the others go on.
  std::atomic<int> refused = 0;
  std::vector<std::thread> others;
  for (int i = 0; i < 2; ++i) {
    others.emplace_back([&] {
      const grpc::Status status = TopK(*client, sequence_id, kLong);
      if (status.ok()) return;
      EXPECT_TRUE(Failed(status, StatusCode::RESOURCE_EXHAUSTED, "max_pending_calls"));
      if (refused++ == 0) keep_going.Notify();
    });
  }
  first.join();
  for (std::thread& other : others) other.join();
  EXPECT_EQ(refused, 1);
}

TEST_F(LifecycleTest, ShutdownLetsCallsAtWorkEndAndRefusesNewOnes) {
  absl::Notification begun;
  absl::Notification keep_going;
  hooks_.before_top_k = [&] {
    begun.Notify();
    keep_going.WaitForNotification();
  };
  StartHooked([](Config& config) { config.shutdown_timeout = absl::Seconds(60); });
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(10);
  std::thread at_work([&] { EXPECT_TRUE(TopK(*client, sequence_id, kLong).ok()); });
  begun.WaitForNotification();
  std::thread stopper([&] { server_->Shutdown(); });
  // The server refuses as soon as it drains; until then it answers.
  while (true) {
    v1::StatsResponse stats;
    const grpc::Status status = client->admin().Stats(client->Context().get(), {}, &stats);
    if (status.ok()) continue;
    EXPECT_TRUE(Failed(status, StatusCode::UNAVAILABLE, "", "shutting down"));
    break;
  }
  keep_going.Notify();
  at_work.join();
  stopper.join();
  EXPECT_TRUE(Failed(client->EndSession(), StatusCode::UNAVAILABLE, "", "shutting down"));
  EXPECT_FALSE(std::filesystem::exists(endpoint().substr(7)));
}

TEST_F(LifecycleTest, ShutdownCancelsWhatDoesNotEnd) {
  absl::Notification begun;
  hooks_.on_progress = [&](const auto& progress, const auto& pass_on) {
    if (!begun.HasBeenNotified()) begun.Notify();
    return RepeatUntilRefused(progress, pass_on);
  };
  StartHooked([](Config& config) { config.shutdown_timeout = absl::Milliseconds(20); });
  const auto client = Connect();
  v1::BuildIndexRequest request;
  request.set_sequence_id(client->Filled(300));
  *request.mutable_index() = Pq(2, 4);
  const auto context = client->Context();
  const auto reader = client->kv().BuildIndex(context.get(), request);
  begun.WaitForNotification();
  server_->Shutdown();
  v1::BuildProgress progress;
  while (reader->Read(&progress)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_F(LifecycleTest, ASecondServerOnTheSocketIsRefused) {
  Start();
  const auto second = Server::Start(config_, *store_, *log_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  const auto client = Connect();
  EXPECT_EQ(client->token().size(), 32u) << "the first one still serves";
}

}  // namespace
}  // namespace pqcached::service
