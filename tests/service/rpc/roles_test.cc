// Which roles may make which calls, and what a call reaches: asked of every rpc in the descriptors,
// on every socket.
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "tests/service/rpc/empty_call.h"
#include "tests/service/rpc/lifecycle_fixture.h"
#include "tests/service/tls/tls_fixture.h"
#include "tests/skip.h"

namespace pqcached::service {
namespace {

using google::protobuf::MethodDescriptor;
using grpc::StatusCode;
using testing::HasSubstr;

// The answer to a caller, one letter per kind: a = admitted, s = a session is missing
// (UNAUTHENTICATED), d = denied (PERMISSION_DENIED).
struct Answers {
  char anyone;      // without a session
  char tenant;      // with a session
  char anyone_tcp;  // the same over TCP
  char tenant_tcp;
  char operator_;     // on the admin socket, without a session
  char tenant_admin;  // on the admin socket, with a session
};

constexpr Answers kData = {'s', 'a', 's', 'a', 'd', 'd'};    // engines
constexpr Answers kOwn = {'s', 'a', 'd', 'd', 'a', 'a'};     // a tenant's own, an operator's all
constexpr Answers kOwnTcp = {'s', 'a', 's', 'a', 'a', 'a'};  // and an engine's over TCP
constexpr Answers kOperators = {'d', 'd', 'd', 'd', 'a', 'a'};

// A new rpc needs a row here.
const std::map<std::string, Answers>& Rows() {
  static const std::map<std::string, Answers> rows = {
      {"Session", {'a', 'a', 'a', 'a', 'd', 'd'}},
      {"GetServerInfo", {'a', 'a', 'a', 'a', 'a', 'a'}},
      {"OpenCache", kData},
      {"CreateSequence", kData},
      {"DropSequence", kData},
      {"TruncateSequence", kData},
      {"ForkSequence", kData},
      {"ForkSequences", kData},
      {"SuspendSequence", kData},
      {"ResumeSequence", kData},
      {"MatchPrefix", kData},
      {"WatchEvents", kData},
      {"Ingest", kData},
      {"Commit", kData},
      {"Append", kData},
      {"ClosePrefill", kData},
      {"BuildIndex", kData},
      {"TopK", kData},
      {"Score", kData},
      {"FetchBlocks", kData},
      {"FetchTokens", kData},
      {"Attend", kData},
      {"AttendRange", kData},
      {"Attach", kData},
      {"Detach", kData},
      {"OpenPageCache", kData},
      {"PutPages", kData},
      {"GetPages", kData},
      {"FindPages", kData},
      {"Admit", kOwnTcp},
      {"ListCaches", kOwn},
      {"ListSequences", kOwn},
      {"ListLeases", kOwn},
      {"Stats", kOwn},
      {"Evict", kOwn},
      {"DescribeSequence", kOwnTcp},
      {"Pin", kOwnTcp},
      {"SetLogLevel", kOperators},
      {"Drain", kOperators},
      {"SelfTest", kOperators},
      {"EraseTenant", kOperators},
      {"DropCache", kOwn},
      {"ListSessions", kOwn},
      {"EndSession", kOwn},
      {"ListTenantLimits", kOwn},
      {"SetTenantLimits", kOperators},
      {"EndQuarantine", kOperators},
      {"ListIndexTypes", kOwnTcp},
      {"ExportSequence", kOperators},
      {"ImportSequence", kOperators},
  };
  return rows;
}

char LetterOf(const grpc::Status& status) {
  switch (status.error_code()) {
    case StatusCode::PERMISSION_DENIED:
      return 'd';
    case StatusCode::UNAUTHENTICATED:
      return 's';
    default:
      return 'a';
  }
}

class RolesTest : public LifecycleTest {
 protected:
  std::string admin_path() const { return AdminPath(config_); }
  std::string admin_endpoint() const { return "unix://" + admin_path(); }
  std::string LogText() const {
    std::ifstream file(config_.log_file);
    return {std::istreambuf_iterator<char>(file), {}};
  }
};

TEST_F(RolesTest, EveryRpcAnswersEveryRole) {
  Start([](Config& config) {
    config.tcp_listen = "127.0.0.1:0";
    config.plain_tcp = true;
  });
  const auto client = Connect();
  const auto unix_channel = ChannelTo(endpoint());
  const auto tcp = ChannelTo(server_->endpoints().at(1));
  const auto admin = ChannelTo(admin_endpoint());
  uint64_t pairs = 0;
  for (const MethodDescriptor* method : AllMethods()) {
    SCOPED_TRACE(method->name());
    const auto row = Rows().find(method->name());
    ASSERT_NE(row, Rows().end()) << "a new rpc needs a row";
    const auto expect = [&](const auto& channel, bool session, char letter, const char* caller) {
      auto context = session ? client->Context() : std::make_unique<grpc::ClientContext>();
      const grpc::Status status = EmptyCall(channel, *method, std::move(context)).Finish();
      EXPECT_EQ(LetterOf(status), letter) << caller << ": " << status.error_message();
      EXPECT_TRUE(status.ok() || !status.error_details().empty()) << "not the server's answer";
      ++pairs;
    };
    expect(unix_channel, false, row->second.anyone, "anyone");
    expect(unix_channel, true, row->second.tenant, "a tenant");
    expect(tcp, false, row->second.anyone_tcp, "anyone over TCP");
    expect(tcp, true, row->second.tenant_tcp, "a tenant over TCP");
    expect(admin, false, row->second.operator_, "an operator");
    expect(admin, true, row->second.tenant_admin, "an operator with a session");
    v1::DrainResponse resumed;  // what an operator's Drain began
    v1::DrainRequest resume;
    resume.set_resume(true);
    ASSERT_TRUE(client->admin().Drain(client->Context().get(), resume, &resumed).ok());
  }
  EXPECT_EQ(Rows().size(), AllMethods().size()) << "a row of an rpc that does not exist";
  RecordProperty("rpc_role_pairs_tested", HasFailure() ? "0" : std::to_string(pairs));
}

TEST_F(TlsTest, EveryRpcAnswersEveryIdentity) {
  StartTls();
  const auto tenant = TlsChannel(tenant_a_);
  const auto operator_channel = TlsChannel(ca_.Issue("operator", "URI:pqcached://operator"));
  const auto peer = TlsChannel(ca_.Issue("peer", "URI:pqcached://peer/node-7"));
  TlsSession session = OpenTlsSession(tenant);
  ASSERT_TRUE(session.is_open());
  for (const MethodDescriptor* method : AllMethods()) {
    SCOPED_TRACE(method->name());
    const Answers& row = Rows().at(method->name());
    const auto expect = [&](const auto& channel, const std::string& token, char letter,
                            const char* caller) {
      const grpc::Status status = EmptyCall(channel, *method, ContextOf(token)).Finish();
      EXPECT_EQ(LetterOf(status), letter) << caller << ": " << status.error_message();
    };
    expect(tenant, "", row.anyone, "a tenant without a session");
    expect(tenant, session.opened.session_token(), row.tenant, "a tenant");
    expect(operator_channel, "", row.operator_, "an operator");
    expect(peer, "", method->name() == "GetServerInfo" ? 'a' : 'd', "another sidecar");
    v1::DrainResponse resumed;  // what an operator's Drain began
    v1::DrainRequest resume;
    resume.set_resume(true);
    const auto admin = v1::Admin::NewStub(operator_channel);
    ASSERT_TRUE(admin->Drain(ContextOf("").get(), resume, &resumed).ok());
  }
  session.context->TryCancel();
  session.End();
}

TEST_F(RolesTest, ATenantSeesAndCountsOnlyItsOwn) {
  Start();
  const auto a = Connect("a", "engine-a");
  const auto b = Connect("b", "engine-b");
  const uint64_t of_a = a->Filled(200);
  v1::ListCachesResponse caches;
  ASSERT_TRUE(b->tenant_admin().ListCaches(b->Context().get(), {}, &caches).ok());
  EXPECT_EQ(caches.caches_size(), 0);
  v1::ListCachesRequest asks_for_a;
  asks_for_a.set_tenant("a");
  ASSERT_TRUE(b->tenant_admin().ListCaches(b->Context().get(), asks_for_a, &caches).ok());
  EXPECT_EQ(caches.caches_size(), 0);
  v1::ListSequencesResponse sequences;
  ASSERT_TRUE(b->tenant_admin().ListSequences(b->Context().get(), {}, &sequences).ok());
  EXPECT_EQ(sequences.sequences_size(), 0);
  v1::StatsResponse stats;
  ASSERT_TRUE(b->tenant_admin().Stats(b->Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.session_count(), 1u);
  EXPECT_EQ(stats.cache_count() + stats.sequence_count() + stats.pool_used_bytes(), 0u);
  EXPECT_EQ(stats.rpcs_size() + stats.memory_size(), 0) << stats.ShortDebugString();
  EXPECT_EQ(stats.memory_available_bytes() + stats.prompt_tokens() + stats.evicted_bytes(), 0u);
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(b->tenant_admin().GetServerInfo(b->Context().get(), {}, &info).ok());
  EXPECT_EQ(info.config_size(), 0);

  ASSERT_TRUE(a->tenant_admin().ListSequences(a->Context().get(), {}, &sequences).ok());
  ASSERT_EQ(sequences.sequences_size(), 1);
  EXPECT_EQ(sequences.sequences(0).sequence_id(), of_a);
  ASSERT_TRUE(a->admin().Stats(a->Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.session_count(), 2u);
  EXPECT_GT(stats.rpcs_size(), 0);
  EXPECT_GT(stats.memory_available_bytes(), 0u);
  ASSERT_TRUE(a->admin().GetServerInfo(a->Context().get(), {}, &info).ok());
  EXPECT_GT(info.config_size(), 0);
}

// The same answer, whether the sequence is another tenant's, was evicted there, or never existed.
TEST_F(RolesTest, AForeignSequenceIsLikeNone) {
  Start();
  const auto a = Connect("a");
  const auto b = Connect("b");
  const uint64_t live = a->Filled(200);
  const uint64_t evicted = a->Filled(200);
  v1::EvictRequest evict;
  evict.set_sequence_id(evicted);
  v1::EvictResponse ignored;
  ASSERT_TRUE(a->tenant_admin().Evict(a->Context().get(), evict, &ignored).ok());
  for (const uint64_t id : {live, evicted, evicted + 1000}) {
    const std::string words = "no sequence " + std::to_string(id);
    v1::EvictRequest foreign;
    foreign.set_sequence_id(id);
    EXPECT_TRUE(Failed(b->tenant_admin().Evict(b->Context().get(), foreign, &ignored),
                       StatusCode::NOT_FOUND, "sequence_id", words));
    v1::PinRequest pin;
    pin.set_sequence_id(id);
    pin.set_ttl_ms(1000);
    v1::PinResponse pinned;
    EXPECT_TRUE(Failed(b->tenant_admin().Pin(b->Context().get(), pin, &pinned),
                       StatusCode::NOT_FOUND, "sequence_id", words));
    v1::DescribeSequenceRequest describe;
    describe.set_sequence_id(id);
    v1::DescribeSequenceResponse described;
    EXPECT_TRUE(Failed(b->tenant_admin().DescribeSequence(b->Context().get(), describe, &described),
                       StatusCode::NOT_FOUND, "sequence_id", words));
    v1::DropSequenceRequest drop;
    drop.set_sequence_id(id);
    v1::DropSequenceResponse dropped;
    EXPECT_TRUE(Failed(b->kv().DropSequence(b->Context().get(), drop, &dropped),
                       StatusCode::NOT_FOUND, "sequence_id", words));
  }
  v1::DescribeSequenceRequest describe;
  describe.set_sequence_id(evicted);
  v1::DescribeSequenceResponse described;
  EXPECT_TRUE(Failed(a->tenant_admin().DescribeSequence(a->Context().get(), describe, &described),
                     StatusCode::NOT_FOUND, "sequence_id", "was evicted"));
  describe.set_sequence_id(live);
  EXPECT_TRUE(b->admin().DescribeSequence(b->Context().get(), describe, &described).ok());
}

TEST_F(RolesTest, AuditLinesNameTheOperatorWhateverTheLevelOfTheLog) {
  Start([this](Config& config) { config.log_file = directory_ / "log"; });
  const auto client = Connect("a");
  v1::SetLogLevelRequest level;
  level.set_level("off");
  v1::SetLogLevelResponse previous;
  ASSERT_TRUE(client->admin().SetLogLevel(client->Context().get(), level, &previous).ok());
  v1::DrainResponse drained;
  ASSERT_TRUE(client->admin().Drain(client->Context().get(), {}, &drained).ok());
  v1::EvictRequest evict;
  evict.set_sequence_id(999);
  v1::EvictResponse ignored;
  EXPECT_FALSE(client->tenant_admin().Evict(client->Context().get(), evict, &ignored).ok());
  const std::string text = LogText();
  EXPECT_THAT(text, HasSubstr("level=audit event=SetLogLevel role=operator peer=\"uid=" +
                              std::to_string(geteuid()) + " pid=" + std::to_string(getpid())));
  EXPECT_THAT(text, HasSubstr("request=\"level: \\\"off\\\"\" status=OK"));
  EXPECT_THAT(text, HasSubstr("level=audit event=Drain"));
  EXPECT_THAT(text, HasSubstr("level=audit event=Evict role=tenant"));
  EXPECT_THAT(text,
              HasSubstr("tenant=a session=test#1 request=\"sequence_id: 999\" status=NOT_FOUND"));
  EXPECT_EQ(text.find("event=draining"), std::string::npos) << "the log is off";
}

TEST_F(RolesTest, OperatorsAreServedWhenClientsUseAllSessionsAndThreads) {
  absl::Notification at_query, keep_going;
  hooks_.before_top_k = [&] {
    at_query.Notify();
    keep_going.WaitForNotification();
  };
  StartHooked([](Config& config) {
    config.max_sessions = 1;
    config.call_threads = 1;
  });
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(10);
  std::thread query([&] { (void)TopK(*client, sequence_id, kLong); });
  at_query.WaitForNotification();
  v1::StatsResponse stats;
  EXPECT_TRUE(client->admin().Stats(client->Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.session_count(), 1u);
  keep_going.Notify();
  query.join();
}

TEST_F(RolesTest, OneSelfTestRunsAtATime) {
  Start();
  const auto client = Connect();
  grpc::Status first, second;
  v1::SelfTestResponse first_answer, second_answer;
  std::thread other(
      [&] { first = client->admin().SelfTest(client->Context().get(), {}, &first_answer); });
  second = client->admin().SelfTest(client->Context().get(), {}, &second_answer);
  other.join();
  EXPECT_TRUE(first.ok() || second.ok());
  for (const grpc::Status& status : {first, second}) {
    if (status.ok()) continue;
    EXPECT_TRUE(Failed(status, StatusCode::RESOURCE_EXHAUSTED, "", "another"));
  }
}

// Returns whether a process of another uid receives an answer on a unix socket.
bool AnswersForeignUser(const std::string& path) {
  const pid_t child = fork();
  if (child == 0) {
    if (setgid(12345) != 0 || setuid(12345) != 0) _exit(2);
    const int opened = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    if (connect(opened, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      _exit(1);
    }
    char byte = 0;
    _exit(recv(opened, &byte, 1, 0) > 0 ? 0 : 1);  // HTTP/2 begins with the server's settings
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_NE(WEXITSTATUS(status), 2);
  return WEXITSTATUS(status) == 0;
}

TEST_F(RolesTest, OnlyOperatorsConnectToTheAdminSocket) {
  Start([](Config& config) { config.socket_mode = 0666; });
  struct stat info = {};
  ASSERT_EQ(stat(admin_path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  if (geteuid() != 0) PQC_SKIP("root");
  chmod(directory_.c_str(), 0755);
  EXPECT_TRUE(AnswersForeignUser(SocketPath(config_)));
  EXPECT_FALSE(AnswersForeignUser(admin_path()));
  chmod(admin_path().c_str(), 0666);  // somebody has opened it up
  EXPECT_FALSE(AnswersForeignUser(admin_path()));
}

TEST_F(RolesTest, ATenantDropsItsUnusedCacheAndAnOperatorAnyOne) {
  Start();
  const auto a = Connect("a");
  const auto b = Connect("b");
  const uint64_t cache_id = a->OpenCache();
  const uint64_t sequence_id = a->CreateSequence(cache_id);
  v1::DropCacheRequest request;
  request.set_cache_id(cache_id);
  v1::DropCacheResponse dropped;
  const auto drop = [&](v1::Admin::Stub& stub, TestClient& client) {
    return stub.DropCache(client.Context().get(), request, &dropped);
  };
  EXPECT_TRUE(Failed(drop(b->tenant_admin(), *b), StatusCode::NOT_FOUND, "cache_id", "no cache"));
  EXPECT_TRUE(Failed(drop(a->tenant_admin(), *a), StatusCode::FAILED_PRECONDITION, "cache_id",
                     "has sequence " + std::to_string(sequence_id)));
  request.set_force(true);
  EXPECT_TRUE(Failed(drop(a->tenant_admin(), *a), StatusCode::PERMISSION_DENIED, "force"));
  const grpc::Status forced = drop(b->admin(), *b);
  EXPECT_TRUE(forced.ok()) << forced.error_message();
  EXPECT_EQ(dropped.dropped_sequences(), 1u);
  request.set_force(false);
  const uint64_t again = a->OpenCache();
  EXPECT_NE(again, cache_id);
  request.set_cache_id(again);
  EXPECT_TRUE(drop(a->tenant_admin(), *a).ok());
}

TEST_F(RolesTest, ErasesOneTenantAndLeavesTheOthers) {
  Start([](Config& config) { config.retain = true; });
  const auto a = Connect("a");
  const auto other_of_a = Connect("a");
  const auto b = Connect("b");
  const uint64_t pinned = a->Filled(300);
  other_of_a->Filled(300);
  const uint64_t of_b = b->Filled(300);
  const std::string before = Dump(*b, of_b);
  v1::PinRequest pin;
  pin.set_sequence_id(pinned);
  pin.set_ttl_ms(1'000'000);
  v1::PinResponse pin_answer;
  ASSERT_TRUE(a->tenant_admin().Pin(a->Context().get(), pin, &pin_answer).ok());
  v1::EraseTenantRequest request;
  request.set_tenant("a");
  v1::EraseTenantResponse erased;
  const grpc::Status status = b->admin().EraseTenant(b->Context().get(), request, &erased);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(erased.ended_sessions(), 2u);
  EXPECT_EQ(erased.remaining_bytes(), 0u);
  v1::ListSequencesResponse sequences;
  ASSERT_TRUE(b->admin().ListSequences(b->Context().get(), {}, &sequences).ok());
  ASSERT_EQ(sequences.sequences_size(), 1) << sequences.ShortDebugString();
  EXPECT_EQ(sequences.sequences(0).sequence_id(), of_b);
  EXPECT_TRUE(Dump(*b, of_b) == before);
  v1::StatsResponse stats;
  EXPECT_EQ(a->tenant_admin().Stats(a->Context().get(), {}, &stats).error_code(),
            StatusCode::UNAUTHENTICATED);
  EXPECT_TRUE(Failed(a->EndSession(), StatusCode::UNAVAILABLE, "", "the session was ended"));
  EXPECT_GT(Connect("a")->Filled(10), 0u);  // the tenant may begin again
  for (const char* wrong : {"", "A", "no such tenant"}) {
    request.set_tenant(wrong);
    EXPECT_TRUE(Failed(b->admin().EraseTenant(b->Context().get(), request, &erased),
                       StatusCode::INVALID_ARGUMENT, "tenant"));
  }
}

}  // namespace
}  // namespace pqcached::service
