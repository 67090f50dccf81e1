// Sessions, tenants, deadlines, cancelled calls, clients that go without a word, limits, and the
// end of the server.
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
#include "tests/service/hooked_store.h"
#include "tests/service/rpc_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;

class LifecycleTest : public RpcTest {
 protected:
  ~LifecycleTest() override { server_.reset(); }

  void StartHooked(const std::function<void(Config&)>& change = {}) {
    Start(change, [this](std::unique_ptr<kvstore::Store> store) {
      return std::make_unique<HookedStore>(std::move(store), hooks_);
    });
  }

  static v1::StatsResponse Stats(TestClient& client) {
    v1::StatsResponse stats;
    EXPECT_TRUE(client.admin().Stats(client.Context().get(), {}, &stats).ok());
    return stats;
  }

  // Asks until the answer is the wanted one: for what the server learns in its own time.
  static void AwaitSessions(TestClient& client, uint32_t count) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (Stats(client).session_count() != count || Stats(client).sequence_count() != count) {
      ASSERT_LT(std::chrono::steady_clock::now(), until)
          << "sessions: " << Stats(client).session_count();
    }
  }

  // Until no writer has the sequence: truncating to where it ends changes nothing.
  static void AwaitWriters(TestClient& client, uint64_t sequence_id, uint64_t token_count) {
    v1::TruncateSequenceRequest request;
    request.set_sequence_id(sequence_id);
    request.set_token_count(token_count);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (true) {
      v1::TruncateSequenceResponse response;
      const grpc::Status status =
          client.kv().TruncateSequence(client.Context().get(), request, &response);
      if (status.error_code() != StatusCode::ABORTED) {
        EXPECT_TRUE(status.ok()) << status.error_message();
        return;
      }
      ASSERT_LT(std::chrono::steady_clock::now(), until);
    }
  }

  static grpc::Status TopK(TestClient& client, uint64_t sequence_id,
                           std::chrono::milliseconds timeout) {
    v1::TopKRequest request;
    *request.add_items()->mutable_query() = QueryAt(sequence_id, 1, 9);
    *request.mutable_items(0)->mutable_selection() = TokenCountSelection(Flat(), 1, 1, 2);
    v1::TopKResponse response;
    const auto context = client.Context();
    context->set_deadline(std::chrono::system_clock::now() + timeout);
    return client.kv().TopK(context.get(), request, &response);
  }

  StoreHooks hooks_;
};

constexpr auto kLong = std::chrono::milliseconds(60'000);

TEST_F(LifecycleTest, EndOfASessionDropsItsSequencesOnly) {
  Start();
  const auto keeper = Connect("", "keeper");
  const auto leaver = Connect("", "leaver");
  const uint64_t kept_id = keeper->Filled(20);
  const uint64_t left_id = leaver->Filled(200);
  EXPECT_TRUE(leaver->EndSession().ok());
  v1::ListSequencesResponse sequences;
  ASSERT_TRUE(keeper->admin().ListSequences(keeper->Context().get(), {}, &sequences).ok());
  ASSERT_EQ(sequences.sequences_size(), 1) << "dropped before the client hears of the end";
  EXPECT_EQ(sequences.sequences(0).sequence_id(), kept_id);
  EXPECT_TRUE(
      Failed(TopK(*keeper, left_id, kLong), StatusCode::NOT_FOUND, "items[0].query.sequence_id"));
  EXPECT_TRUE(
      Failed(TopK(*leaver, kept_id, kLong), StatusCode::UNAUTHENTICATED, "pqcached-session"));
}

TEST_F(LifecycleTest, CallsNeedASessionAndAdminDoesNot) {
  Start();
  const auto client = Connect();
  grpc::ClientContext bare;
  v1::OpenCacheResponse response;
  EXPECT_TRUE(Failed(client->kv().OpenCache(&bare, CacheRequest(), &response),
                     StatusCode::UNAUTHENTICATED, "pqcached-session"));
  grpc::ClientContext wrong;
  wrong.AddMetadata("pqcached-session", std::string(32, '0'));
  EXPECT_TRUE(Failed(client->kv().OpenCache(&wrong, CacheRequest(), &response),
                     StatusCode::UNAUTHENTICATED, "pqcached-session"));
  grpc::ClientContext admin;
  v1::StatsResponse stats;
  EXPECT_TRUE(client->admin().Stats(&admin, {}, &stats).ok());
  EXPECT_EQ(stats.cache_count(), 0u);
}

TEST_F(LifecycleTest, OtherTenantsSeeNothing) {
  Start();
  const auto owner = Connect("tenant-a");
  const auto other = Connect("tenant-b");
  const uint64_t cache_id = owner->OpenCache();
  const uint64_t sequence_id = owner->CreateSequence(cache_id);
  owner->Ingest(sequence_id, 0, 10);
  const std::string before = Dump(*owner, sequence_id);
  EXPECT_TRUE(Failed(TopK(*other, sequence_id, kLong), StatusCode::NOT_FOUND, "sequence_id"));
  v1::CreateSequenceRequest create;
  create.set_cache_id(cache_id);
  v1::CreateSequenceResponse created;
  EXPECT_TRUE(Failed(other->kv().CreateSequence(other->Context().get(), create, &created),
                     StatusCode::NOT_FOUND, "cache_id"));
  v1::DropSequenceRequest drop;
  drop.set_sequence_id(sequence_id);
  v1::DropSequenceResponse dropped;
  EXPECT_TRUE(Failed(other->kv().DropSequence(other->Context().get(), drop, &dropped),
                     StatusCode::NOT_FOUND, "sequence_id"));
  v1::FetchBlocksRequest fetch;
  fetch.set_sequence_id(sequence_id);
  fetch.set_layer(1);
  fetch.add_ranges()->set_end(1);
  v1::FetchBlocksResponse rows;
  EXPECT_TRUE(Failed(other->kv().FetchBlocks(other->Context().get(), fetch, &rows),
                     StatusCode::NOT_FOUND, "sequence_id"));
  EXPECT_TRUE(Dump(*owner, sequence_id) == before);
  EXPECT_NE(other->OpenCache(), cache_id) << "a cache of the same name is another tenant's own";
}

grpc::Status OpenSession(const std::string& endpoint,
                         const std::vector<v1::SessionRequest>& requests) {
  const auto stub =
      v1::KvCache::NewStub(grpc::CreateChannel(endpoint, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->Session(&context);
  for (const v1::SessionRequest& request : requests) stream->Write(request);
  v1::SessionEvent event;
  while (stream->Read(&event)) {
  }
  return stream->Finish();
}

TEST_F(LifecycleTest, SessionsThatCannotBe) {
  Start([](Config& config) { config.max_sessions = 1; });
  v1::SessionRequest open;
  open.mutable_open()->set_protocol_version(1);
  v1::SessionRequest heartbeat;
  heartbeat.mutable_heartbeat();
  v1::SessionRequest future = open;
  future.mutable_open()->set_protocol_version(2);
  v1::SessionRequest tenant = open;
  tenant.mutable_open()->set_tenant("UPPER");
  v1::SessionRequest name = open;
  name.mutable_open()->set_client_name(std::string(129, 'a'));
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  EXPECT_TRUE(Failed(OpenSession(endpoint(), {v1::SessionRequest()}), invalid, "request"));
  EXPECT_TRUE(Failed(OpenSession(endpoint(), {heartbeat}), invalid, "open: must come first"));
  EXPECT_TRUE(Failed(OpenSession(endpoint(), {future}), invalid, "open.protocol_version: 2"));
  EXPECT_TRUE(Failed(OpenSession(endpoint(), {tenant}), invalid, "open.tenant"));
  EXPECT_TRUE(Failed(OpenSession(endpoint(), {name}), invalid, "open.client_name"));
  EXPECT_TRUE(Failed(OpenSession(endpoint(), {open, heartbeat, open}), invalid,
                     "open: the session is open already"));
  grpc::ClientContext context;
  const auto client = Connect();  // the failed ones left no session behind
  EXPECT_EQ(client->token().size(), 32u);
  EXPECT_TRUE(
      Failed(OpenSession(endpoint(), {open}), StatusCode::RESOURCE_EXHAUSTED, "max_sessions"));
}

// A connection that the test can cut.
class Cable {
 public:
  explicit Cable(const std::string& path)
      : descriptor_(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(descriptor_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
              0);
    channel_ = grpc::CreateInsecureChannelFromFd("cable", dup(descriptor_));
  }
  ~Cable() { close(descriptor_); }

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  void Cut() { shutdown(descriptor_, SHUT_RDWR); }

 private:
  const int descriptor_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(LifecycleTest, AClientThatIsGoneLosesItsSession) {
  Start();
  const auto watcher = Connect();
  watcher->Filled(10);
  Cable cable(endpoint().substr(7));
  const auto stub = v1::KvCache::NewStub(cable.channel());
  grpc::ClientContext context;
  const auto stream = stub->Session(&context);
  v1::SessionRequest open;
  open.mutable_open()->set_protocol_version(1);
  stream->Write(open);
  v1::SessionEvent event;
  ASSERT_TRUE(stream->Read(&event));
  v1::CreateSequenceRequest create;
  create.set_cache_id(watcher->OpenCache());
  v1::CreateSequenceResponse created;
  grpc::ClientContext with_token;
  with_token.AddMetadata("pqcached-session", event.opened().session_token());
  ASSERT_TRUE(stub->CreateSequence(&with_token, create, &created).ok());
  EXPECT_EQ(Stats(*watcher).sequence_count(), 2u);
  cable.Cut();
  EXPECT_FALSE(stream->Finish().ok());
  AwaitSessions(*watcher, 1);
}

// All rows have arrived, only the end of the stream has not: a commit would leave them behind.
TEST_F(LifecycleTest, AClientThatIsGoneInMidIngestLeavesNothing) {
  Start();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(200);
  const std::string before = Dump(*client, sequence_id);
  for (int round = 0; round < 40; ++round) {
    Cable cable(endpoint().substr(7));
    const auto stub = v1::KvCache::NewStub(cable.channel());
    const auto context = client->Context();
    v1::IngestResponse response;
    const auto writer = stub->Ingest(context.get(), &response);
    v1::IngestRequest request;
    request.mutable_header()->set_sequence_id(sequence_id);
    ASSERT_TRUE(writer->Write(request));
    for (const uint32_t layer : kLayers) {
      request.mutable_chunk()->set_first_position(200);
      *request.mutable_chunk()->mutable_rows() = RowsOf(layer, 200, 100);
      ASSERT_TRUE(writer->Write(request));
    }
    if (round % 2 == 0) {
      cable.Cut();
    } else {
      context->TryCancel();
    }
    EXPECT_FALSE(writer->Finish().ok());
    AwaitWriters(*client, sequence_id, 200);
    ASSERT_TRUE(Dump(*client, sequence_id) == before) << "round " << round;
  }
  client->Ingest(sequence_id, 200, 100);
}

TEST_F(LifecycleTest, AnIngestOfAnEndedSessionIsNotCommitted) {
  Start();
  const auto client = Connect();
  const auto watcher = Connect();
  const uint64_t sequence_id = client->NewSequence();
  const auto context = client->Context();
  v1::IngestResponse response;
  const auto writer = client->kv().Ingest(context.get(), &response);
  v1::IngestRequest request;
  request.mutable_header()->set_sequence_id(sequence_id);
  ASSERT_TRUE(writer->Write(request));
  request.mutable_chunk()->set_first_position(0);
  *request.mutable_chunk()->mutable_rows() = RowsOf(1, 0, 10);
  ASSERT_TRUE(writer->Write(request));
  EXPECT_TRUE(client->EndSession().ok());
  writer->WritesDone();
  const StatusCode code = writer->Finish().error_code();
  EXPECT_TRUE(code == StatusCode::NOT_FOUND || code == StatusCode::UNAUTHENTICATED) << code;
  EXPECT_EQ(Stats(*watcher).sequence_count(), 0u);
  EXPECT_EQ(Stats(*watcher).pool_used_bytes(), 0u);
}

TEST_F(LifecycleTest, ASequenceMadeWhileItsSessionEndsIsDropped) {
  absl::Notification begun;
  absl::Notification go_on;
  hooks_.before_create_sequence = [&] {
    begun.Notify();
    go_on.WaitForNotification();
  };
  StartHooked();
  const auto client = Connect();
  const auto watcher = Connect();
  v1::CreateSequenceRequest request;
  request.set_cache_id(client->OpenCache());
  grpc::Status status;
  std::thread maker([&] {
    v1::CreateSequenceResponse response;
    status = client->kv().CreateSequence(client->Context().get(), request, &response);
  });
  begun.WaitForNotification();
  EXPECT_TRUE(client->EndSession().ok());
  go_on.Notify();
  maker.join();
  EXPECT_TRUE(Failed(status, StatusCode::UNAUTHENTICATED, "the session has ended"));
  EXPECT_EQ(Stats(*watcher).sequence_count(), 0u);
}

// Repeats the progress until the call does not want any more, slowly enough for the stream.
bool RepeatUntilRefused(const kvstore::BuildProgress& progress,
                        const std::function<bool(const kvstore::BuildProgress&)>& pass_on) {
  while (pass_on(progress)) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return false;
}

TEST_F(LifecycleTest, ACancelledBuildLeavesNoTrace) {
  hooks_.on_progress = RepeatUntilRefused;
  StartHooked();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(300);
  const std::string before = Dump(*client, sequence_id);
  v1::BuildIndexRequest request;
  request.set_sequence_id(sequence_id);
  *request.mutable_index() = Pq(2, 4);
  const auto context = client->Context();
  const auto reader = client->kv().BuildIndex(context.get(), request);
  v1::BuildProgress progress;
  ASSERT_TRUE(reader->Read(&progress));
  context->TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), StatusCode::CANCELLED);
  AwaitWriters(*client, sequence_id, 300);
  EXPECT_TRUE(Dump(*client, sequence_id) == before);
  client->Ingest(sequence_id, 300, 10);  // the prefill is open as it was
}

TEST_F(LifecycleTest, ABuildEndsAtItsDeadlineWithoutATrace) {
  hooks_.on_progress = RepeatUntilRefused;
  StartHooked([](Config& config) {
    config.default_timeout = absl::Seconds(1);
    config.max_timeout = absl::Seconds(3);
  });
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(300);
  const std::string before = Dump(*client, sequence_id);
  v1::BuildIndexRequest request;
  request.set_sequence_id(sequence_id);
  *request.mutable_index() = Pq(2, 4);
  const absl::Time begun = absl::Now();
  grpc::ClientContext context;  // without a deadline: max_timeout holds, not default_timeout
  context.AddMetadata("pqcached-session", client->token());
  const auto reader = client->kv().BuildIndex(&context, request);
  v1::BuildProgress progress;
  while (reader->Read(&progress)) {
  }
  EXPECT_TRUE(Failed(reader->Finish(), StatusCode::DEADLINE_EXCEEDED, "deadline"));
  EXPECT_GE(absl::Now() - begun, absl::Seconds(2));
  EXPECT_TRUE(Dump(*client, sequence_id) == before);
}

TEST_F(LifecycleTest, ABuildWhoseProgressNobodyReadsGoesOn) {
  constexpr uint32_t kReports = 20'000;
  hooks_.on_progress = [&](kvstore::BuildProgress progress, const auto& pass_on) {
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
  AwaitWriters(*client, sequence_id, 100);
  v1::BuildProgress progress;
  while (reader->Read(&progress)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(progress.iterations(), kReports) << "the newest is never left out";
}

TEST_F(LifecycleTest, ABuildHearsBetweenReportsThatItsCallerHasGone) {
  absl::Notification begun;
  absl::Notification heard;
  hooks_.before_build = [&](const kvstore::BuildSpec& spec) {
    begun.Notify();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (spec.cancelled && !spec.cancelled() && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    if (spec.cancelled && spec.cancelled()) heard.Notify();
  };
  StartHooked();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(300);
  const std::string before = Dump(*client, sequence_id);
  v1::BuildIndexRequest request;
  request.set_sequence_id(sequence_id);
  *request.mutable_index() = Pq(2, 4);
  const auto context = client->Context();
  const auto reader = client->kv().BuildIndex(context.get(), request);
  begun.WaitForNotification();
  context->TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), StatusCode::CANCELLED);
  EXPECT_TRUE(heard.WaitForNotificationWithTimeout(absl::Seconds(60)));
  AwaitWriters(*client, sequence_id, 300);
  EXPECT_TRUE(Dump(*client, sequence_id) == before);
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
  EXPECT_TRUE(Failed(TopK(*client, sequence_id, kLong), StatusCode::INTERNAL, "surprise"));
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
  absl::Notification go_on;
  hooks_.before_create_sequence = [&] {
    begun.Notify();
    go_on.WaitForNotification();
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
  go_on.Notify();
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

TEST_F(LifecycleTest, AStreamThatNeverOpensItsSessionIsEnded) {
  Start([](Config& config) { config.default_timeout = absl::Milliseconds(50); });
  const auto stub =
      v1::KvCache::NewStub(grpc::CreateChannel(endpoint(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kLong);
  const auto stream = stub->Session(&context);
  v1::SessionEvent event;
  EXPECT_FALSE(stream->Read(&event));
  EXPECT_TRUE(Failed(stream->Finish(), StatusCode::DEADLINE_EXCEEDED, "open: did not come"));
}

TEST_F(LifecycleTest, StreamsThatAreNoSessionsYetAreLimited) {
  Start([](Config& config) { config.max_sessions = 1; });
  const auto stub =
      v1::KvCache::NewStub(grpc::CreateChannel(endpoint(), grpc::InsecureChannelCredentials()));
  constexpr size_t kMore = 70;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionEvent>>>
      streams;
  for (size_t i = 0; i < kMore; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(stub->Session(contexts.back().get()));
  }
  EXPECT_TRUE(Failed(streams.back()->Finish(), StatusCode::RESOURCE_EXHAUSTED, "max_sessions"));
  for (size_t i = 0; i + 1 < kMore; ++i) contexts[i]->TryCancel();
  for (size_t i = 0; i + 1 < kMore; ++i) streams[i]->Finish();
}

TEST_F(LifecycleTest, WhatIsOverdueIsNotBegun) {
  absl::Notification begun;
  absl::Notification go_on;
  std::atomic<int> calls = 0;
  hooks_.before_top_k = [&] {
    if (calls++ > 0) return;
    begun.Notify();
    go_on.WaitForNotification();
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
  go_on.Notify();
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
  EXPECT_TRUE(Failed(writer->Finish(), StatusCode::DEADLINE_EXCEEDED, "deadline"));
  AwaitWriters(*client, sequence_id, 0);
}

TEST_F(LifecycleTest, TooManyWaitingCallsAreRefused) {
  absl::Notification begun;
  absl::Notification go_on;
  std::atomic<int> calls = 0;
  hooks_.before_top_k = [&] {
    if (calls++ == 0) begun.Notify();
    go_on.WaitForNotification();
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
      if (refused++ == 0) go_on.Notify();
    });
  }
  first.join();
  for (std::thread& other : others) other.join();
  EXPECT_EQ(refused, 1);
}

TEST_F(LifecycleTest, ShutdownLetsCallsAtWorkEndAndRefusesNewOnes) {
  absl::Notification begun;
  absl::Notification go_on;
  hooks_.before_top_k = [&] {
    begun.Notify();
    go_on.WaitForNotification();
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
    EXPECT_TRUE(Failed(status, StatusCode::UNAVAILABLE, "shutting down"));
    break;
  }
  go_on.Notify();
  at_work.join();
  stopper.join();
  EXPECT_TRUE(Failed(client->EndSession(), StatusCode::UNAVAILABLE, "shutting down"));
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
