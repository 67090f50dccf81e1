// What holds for all rpcs alike, asked of each method of both services: a call that is overdue is not
// begun, no deadline lies beyond max_timeout, and a call that is meant for another worker is refused.
#include <gmock/gmock.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "service/handlers/rpcs.h"
#include "tests/service/rpc/empty_call.h"
#include "tests/service/rpc/lifecycle_fixture.h"

namespace pqcached::service {
namespace {

using google::protobuf::MethodDescriptor;
using grpc::StatusCode;

// How a rpc is admitted. A new rpc needs a row here, and passes through the gate, unless it is a
// stream like Session, which lives as long as its client.
enum class Admission { kByGate, kSessionStream };

const std::map<std::string, Admission>& Admissions() {
  static const std::map<std::string, Admission> rows = {
      {"Session", Admission::kSessionStream},
      {"OpenCache", Admission::kByGate},
      {"CreateSequence", Admission::kByGate},
      {"DropSequence", Admission::kByGate},
      {"TruncateSequence", Admission::kByGate},
      {"ForkSequence", Admission::kByGate},
      {"ForkSequences", Admission::kByGate},
      {"SuspendSequence", Admission::kByGate},
      {"ResumeSequence", Admission::kByGate},
      {"MatchPrefix", Admission::kByGate},
      {"WatchEvents", Admission::kByGate},
      {"Ingest", Admission::kByGate},
      {"Commit", Admission::kByGate},
      {"Append", Admission::kByGate},
      {"ClosePrefill", Admission::kByGate},
      {"BuildIndex", Admission::kByGate},
      {"TopK", Admission::kByGate},
      {"Score", Admission::kByGate},
      {"FetchBlocks", Admission::kByGate},
      {"FetchTokens", Admission::kByGate},
      {"Attend", Admission::kByGate},
      {"AttendRange", Admission::kByGate},
      {"Attach", Admission::kByGate},
      {"Detach", Admission::kByGate},
      {"OpenPageCache", Admission::kByGate},
      {"PutPages", Admission::kByGate},
      {"GetPages", Admission::kByGate},
      {"FindPages", Admission::kByGate},
      {"Admit", Admission::kByGate},
      {"GetServerInfo", Admission::kByGate},
      {"ListCaches", Admission::kByGate},
      {"ListSequences", Admission::kByGate},
      {"DescribeSequence", Admission::kByGate},
      {"Stats", Admission::kByGate},
      {"SetLogLevel", Admission::kByGate},
      {"ListLeases", Admission::kByGate},
      {"Evict", Admission::kByGate},
      {"Pin", Admission::kByGate},
      {"Drain", Admission::kByGate},
      {"SelfTest", Admission::kByGate},
      {"EraseTenant", Admission::kByGate},
      {"DropCache", Admission::kByGate},
      {"ListSessions", Admission::kByGate},
      {"EndSession", Admission::kByGate},
      {"ListTenantLimits", Admission::kByGate},
      {"SetTenantLimits", Admission::kByGate},
      {"EndQuarantine", Admission::kByGate},
      {"ListIndexTypes", Admission::kByGate},
      {"ExportSequence", Admission::kByGate},
      {"ImportSequence", Admission::kByGate},
  };
  return rows;
}

std::vector<const MethodDescriptor*> GatedMethods() {
  std::vector<const MethodDescriptor*> methods;
  for (const MethodDescriptor* method : AllMethods()) {
    const auto row = Admissions().find(method->name());
    if (row == Admissions().end() || row->second == Admission::kByGate) methods.push_back(method);
  }
  return methods;
}

bool IsForClients(const MethodDescriptor& method) {
  for (size_t i = 0; i < kRpcCount; ++i) {
    const RpcRule& rule = RuleOf(static_cast<Rpc>(i));
    if (rule.name == method.name()) return rule.anyone || rule.tenant;
  }
  return false;
}

class EveryRpcTest : public LifecycleTest {
 protected:
  // Returns when calls that the server received before, and that have no deadline of their own, are
  // past max_timeout: the second of two streams that send nothing begins when the first has ended.
  static void AwaitMaxTimeout(TestClient& client) {
    for (int i = 0; i < 2; ++i) {
      v1::IngestResponse response;
      const auto context = client.Context();
      EXPECT_TRUE(Failed(client.kv().Ingest(context.get(), &response)->Finish(),
                         StatusCode::DEADLINE_EXCEEDED, "", "deadline"));
    }
  }
};

TEST_F(EveryRpcTest, HasARowAndCounters) {
  std::vector<std::string> methods, rows, counters;
  for (const MethodDescriptor* method : AllMethods()) methods.push_back(method->name());
  for (const auto& [name, admission] : Admissions()) rows.push_back(name);
  for (size_t i = 0; i < kRpcCount; ++i) counters.emplace_back(RpcName(static_cast<Rpc>(i)));
  EXPECT_THAT(rows, testing::UnorderedElementsAreArray(methods)) << "see Admission";
  EXPECT_THAT(counters, testing::UnorderedElementsAreArray(methods));
}

// Each call asks for a minute and waits for a thread until max_timeout is over. Had it begun, it
// would fail otherwise, or succeed: its request is empty.
TEST_F(EveryRpcTest, IsNotBegunWhenItIsOverdueAndNoDeadlineLiesBeyondMaxTimeout) {
  absl::Notification at_query, at_build, keep_going;
  hooks_.before_top_k = [&] {
    at_query.Notify();
    keep_going.WaitForNotification();
  };
  hooks_.before_build = [&](const auto&) {
    at_build.Notify();
    keep_going.WaitForNotification();
  };
  StartHooked([](Config& config) {
    config.call_threads = 1;
    config.max_builds = 1;
    config.default_timeout = config.max_timeout = absl::Milliseconds(500);
  });
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(10);
  std::thread query([&] { (void)TopK(*client, sequence_id, kLong); });
  std::thread build([&] {
    v1::BuildIndexRequest request;
    request.set_sequence_id(sequence_id);
    *request.mutable_index() = Pq(2, 4);
    (void)client->kv().BuildIndex(client->Context().get(), request)->Finish();
  });
  at_query.WaitForNotification();
  at_build.WaitForNotification();
  const auto channel = ChannelTo(endpoint());
  std::map<std::string, std::unique_ptr<EmptyCall>> calls;
  for (const MethodDescriptor* method : GatedMethods()) {
    if (!IsForClients(*method)) continue;  // it has threads of its own
    calls[method->name()] = std::make_unique<EmptyCall>(channel, *method, client->Context());
  }
  AwaitMaxTimeout(*client);
  keep_going.Notify();
  for (const auto& [name, call] : calls) {
    const grpc::Status status = call->Finish();
    EXPECT_TRUE(Failed(status, StatusCode::DEADLINE_EXCEEDED, "", "deadline")) << name;
    EXPECT_FALSE(status.error_details().empty()) << name << ": not the server's answer";
  }
  query.join();
  build.join();
}

TEST_F(EveryRpcTest, IsRefusedWhenItIsMeantForAnotherWorker) {
  Start();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(10);
  const std::string before = Dump(*client, sequence_id);
  const auto clients = ChannelTo(endpoint());
  const auto operators = ChannelTo(endpoint() + ".admin");
  for (const MethodDescriptor* method : GatedMethods()) {
    const auto& channel = IsForClients(*method) ? clients : operators;
    auto context = client->Context();
    context->AddMetadata("pqcached-boot", "0123456789abcdef");
    EXPECT_TRUE(Failed(EmptyCall(channel, *method, std::move(context)).Finish(),
                       StatusCode::ABORTED, "pqcached-boot"))
        << method->name();
  }
  EXPECT_EQ(Dump(*client, sequence_id), before);
}

// Ingest streams whose clients send nothing, not even a header.
class IdleIngestTest : public EveryRpcTest {
 protected:
  static constexpr uint32_t kStreams = 8;

  void StartWithOneThreadAndOnePlace(const std::function<void(Config&)>& change) {
    Start([&](Config& config) {
      config.call_threads = 1;
      config.max_pending_calls = 1;
      change(config);
    });
    client_ = Connect();
  }

  void OpenStreams(const std::function<void(grpc::ClientContext&)>& set) {
    for (v1::IngestResponse& response : responses_) {
      contexts_.push_back(std::make_unique<grpc::ClientContext>());
      contexts_.back()->AddMetadata("pqcached-session", client_->token());
      set(*contexts_.back());
      streams_.push_back(client_->kv().Ingest(contexts_.back().get(), &response));
    }
  }

  // The number of calls that have begun, without this one.
  uint32_t CallsInFlight() {
    v1::DrainRequest request;
    request.set_resume(true);  // so that nothing is drained
    v1::DrainResponse response;
    const grpc::Status status =
        client_->admin().Drain(client_->Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return status.ok() ? response.calls_in_flight() : ~0u;
  }
  void AwaitCallsInFlight(uint32_t count) {
    const auto until = std::chrono::steady_clock::now() + kLong;
    for (uint32_t now = CallsInFlight(); now != count; now = CallsInFlight()) {
      ASSERT_NE(now, ~0u);
      ASSERT_LT(std::chrono::steady_clock::now(), until) << now;
    }
  }

  std::unique_ptr<TestClient> client_;
  std::vector<v1::IngestResponse> responses_ = std::vector<v1::IngestResponse>(kStreams);
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts_;
  std::vector<std::unique_ptr<grpc::ClientWriter<v1::IngestRequest>>> streams_;
};

TEST_F(IdleIngestTest, HoldsNoThreadAndNoWaitingPlace) {
  StartWithOneThreadAndOnePlace([](Config&) {});
  OpenStreams([](grpc::ClientContext&) {});
  AwaitCallsInFlight(kStreams);
  v1::OpenCacheResponse response;
  EXPECT_EQ(client_->kv().OpenCache(client_->Context().get(), {}, &response).error_code(),
            StatusCode::INVALID_ARGUMENT)
      << "which the thread for calls of tenants answers";
  for (const auto& context : contexts_) context->TryCancel();
  for (const auto& stream : streams_) {
    EXPECT_EQ(stream->Finish().error_code(), StatusCode::CANCELLED);
  }
  AwaitCallsInFlight(0);
}

TEST_F(IdleIngestTest, EndsAfterStreamTimeout) {
  StartWithOneThreadAndOnePlace(
      [](Config& config) { config.stream_timeout = absl::Milliseconds(300); });
  const auto later = std::chrono::system_clock::now() + kLong;
  OpenStreams([&](grpc::ClientContext& context) { context.set_deadline(later); });
  for (const auto& stream : streams_) {
    EXPECT_TRUE(Failed(stream->Finish(), StatusCode::DEADLINE_EXCEEDED, "stream_timeout"));
  }
  EXPECT_EQ(CallsInFlight(), 0u);
}

TEST_F(IdleIngestTest, EndsAtTheDefaultDeadline) {
  StartWithOneThreadAndOnePlace(
      [](Config& config) { config.default_timeout = absl::Milliseconds(300); });
  OpenStreams([](grpc::ClientContext&) {});
  for (const auto& stream : streams_) {
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(Failed(status, StatusCode::DEADLINE_EXCEEDED, "", "deadline"));
    EXPECT_FALSE(status.error_details().empty()) << "not the server's answer";
  }
  EXPECT_EQ(CallsInFlight(), 0u);
}

}  // namespace
}  // namespace pqcached::service
