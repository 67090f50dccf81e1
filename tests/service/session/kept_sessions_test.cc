// Sessions that go on at the next server over what the store of the first one left with a keeper: in one
// process, one server after another.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/stat.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "service/supervise/kept_sessions.h"
#include "tests/kvstore/memory_keeper.h"
#include "tests/service/rpc/rpc_fixture.h"
#include "tests/service/session/broker_fixture.h"

namespace pqcached::service {
namespace {

using kvstore::BrokerCall;
using kvstore::BrokerReply;
using kvstore::BrokerRequest;
using testing::Contains;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

constexpr std::chrono::seconds kPatience(60);

class KeptSessionsTest : public RpcTest {
 protected:
  // Ends the worker that is, and begins the next one.
  void Restart() {
    server_.reset();
    store_.reset();
    log_ = *Log::Open(config_.log_level, config_.log_file);
    kvstore::StoreOptions options = StoreOptionsOf(config_);
    options.keeper = &keeper_;
    auto store = kvstore::Store::Create(options);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    auto server =
        Server::Start(config_, *store_, *log_,
                      {.claimed = false, .keepers = {.memory = &keeper_, .connections = &keeper_}});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  ~KeptSessionsTest() override {
    server_.reset();
    store_.reset();
  }

  std::string broker_path() const { return endpoint().substr(7) + kvstore::kBrokerSuffix; }
  static BrokerRequest Resume(const std::string& token) {
    BrokerRequest request = BrokerConnection::Request(BrokerCall::kResume);
    token.copy(request.resume_token, sizeof(request.resume_token) - 1);
    return request;
  }
  // Until the broker answers something else than `status`.
  BrokerReply ResumeWhile(uint32_t status, const std::string& token) const {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (true) {
      BrokerConnection connection(broker_path());
      const BrokerReply reply = connection.Call(Resume(token));
      if (reply.status != status || std::chrono::steady_clock::now() > until) return reply;
      poll(nullptr, 0, 1);
    }
  }

  // Resumes a session by a stream whose client ends its side at once, and returns how it ended.
  grpc::Status ResumeAndEnd(const std::string& token, v1::SessionEvent* opened = nullptr) const {
    const auto kv =
        v1::KvCache::NewStub(grpc::CreateChannel(endpoint(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    const auto stream = kv->Session(&context);
    v1::SessionRequest request;
    request.mutable_open()->set_protocol_version(1);
    request.mutable_open()->set_resume_token(token);
    stream->WriteLast(request, grpc::WriteOptions());
    v1::SessionEvent event;
    while (stream->Read(&event)) {
      if (opened != nullptr && event.has_opened()) *opened = event;
    }
    return stream->Finish();
  }

  // Waits until nothing is kept under names with this prefix: the end of a connection may reach the first server while
  // it ends, and only the next one observes it then.
  void ExpectReleased(const std::string& prefix) const {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    const auto is_kept = Contains(StartsWith(prefix));
    while (testing::Matches(is_kept)(keeper_.Names()) && std::chrono::steady_clock::now() < until) {
      poll(nullptr, 0, 1);
    }
    EXPECT_THAT(keeper_.Names(), Not(is_kept));
  }

  kvstore::testing::MemoryKeeper keeper_;
};

TEST_F(KeptSessionsTest, AConnectionAndItsControlMemoryAreKeptWhileItIsOpen) {
  Restart();
  {
    LocalClient client(endpoint());
    ASSERT_EQ(client.hello().status, 0u) << client.hello().message;
    EXPECT_THAT(keeper_.Names(), Contains(ControlName(client.hello().boot_id, 1)));
    EXPECT_THAT(keeper_.Names(), Contains(SocketName(client.hello().boot_id, 1)));
  }
  Restart();
  ExpectReleased("control.");
}

size_t AllocatedBytes(const kvstore::FileDescriptor& memory) {
  struct stat info = {};
  EXPECT_EQ(fstat(memory.get(), &info), 0);
  return static_cast<size_t>(info.st_blocks) * 512;
}

TEST_F(KeptSessionsTest, ARingOfAnEndedServerIsFreedWithItsConnectionWhoeverHoldsIt) {
  constexpr size_t kRingBytes = size_t{2} << 20;
  const auto staging_bytes = [this] {
    size_t bytes = 0;
    for (const kvstore::MemoryAccount& account : store_->Stats(kvstore::kAllTenants).memory) {
      if (account.use != kvstore::MemoryUse::kStaging) continue;
      EXPECT_EQ(account.tenant, "default");
      bytes += account.allocated_bytes;
    }
    return bytes;
  };
  Restart();
  auto client = std::make_unique<LocalClient>(endpoint());
  BrokerRequest request = BrokerConnection::Request(BrokerCall::kOpenStaging);
  request.slot_bytes = 1 << 20;
  request.slot_count = 2;
  kvstore::FileDescriptor held;
  const BrokerReply reply = client->connection().Call(request, &held);
  ASSERT_EQ(reply.status, 0u) << reply.message;
  EXPECT_THAT(keeper_.Names(), Contains(StagingName(client->hello().boot_id, 1)));
  EXPECT_EQ(AllocatedBytes(held), kRingBytes);

  Restart();
  EXPECT_EQ(AllocatedBytes(held), kRingBytes) << "its client may send the rows in it again";
  EXPECT_EQ(staging_bytes(), kRingBytes) << "in the ledger of the next worker";
  client.reset();
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (AllocatedBytes(held) != 0 && std::chrono::steady_clock::now() < until) poll(nullptr, 0, 1);
  EXPECT_EQ(AllocatedBytes(held), 0u);
  Restart();
  EXPECT_EQ(staging_bytes(), 0u);
  EXPECT_THAT(keeper_.Names(), Not(Contains(StartsWith("staging."))));
}

TEST_F(KeptSessionsTest, ARingWithoutAConnectionIsFreedAtOnce) {
  Restart();
  const auto ring = kvstore::CreateMemfd("ring", 1 << 20);
  ASSERT_TRUE(ring.ok()) << ring.status();
  ASSERT_EQ(posix_fallocate(ring->get(), 0, 1 << 20), 0);
  ASSERT_TRUE(keeper_.Keep(StagingName("boot", 7), ring->get()).ok());
  Restart();
  EXPECT_EQ(AllocatedBytes(*ring), 0u);
  EXPECT_THAT(keeper_.Names(), Not(Contains(StartsWith("staging."))));
}

// A cache with memory in quarantine: of a sequence that was dropped after a restart.
TEST_F(KeptSessionsTest, OnlyClientsThatReceivedAPoolHoldItsQuarantine) {
  Restart();
  auto reader = std::make_unique<LocalClient>(endpoint(), "a", "reader");
  LocalClient silent(endpoint(), "b", "silent");
  const uint64_t cache_id = reader->OpenCache();
  ASSERT_TRUE(Append(*reader, reader->CreateSequence(cache_id), 0, 200).ok());
  const SharedMapping pool = reader->connection().OpenPool(cache_id);
  ASSERT_NE(pool.data(), nullptr);
  Restart();
  store_->DropSession("reader#1");
  const auto quarantined = [this] { return store_->Stats(kvstore::kAllTenants).quarantined_bytes; };
  EXPECT_GT(quarantined(), 0u) << "the reader may read it";
  Restart();
  EXPECT_GT(quarantined(), 0u) << "so it may after another restart";
  reader.reset();
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (quarantined() != 0 && std::chrono::steady_clock::now() < until) poll(nullptr, 0, 1);
  EXPECT_EQ(quarantined(), 0u) << "the silent client has never received that pool";
  EXPECT_THAT(keeper_.Names(), Contains(SocketName(silent.hello().boot_id, 2)));
}

TEST_F(KeptSessionsTest, ASessionThatEndsReleasesItsRing) {
  Restart();
  {
    LocalClient client(endpoint());
    BrokerRequest request = BrokerConnection::Request(BrokerCall::kOpenStaging);
    request.slot_bytes = 1 << 20;
    request.slot_count = 1;
    ASSERT_EQ(client.connection().Call(request).status, 0u);
  }
  Restart();
  ExpectReleased("staging.");
}

TEST_F(KeptSessionsTest, AnEndedServerLeavesItsSessionsAndTheirSequences) {
  Restart();
  LocalClient client(endpoint());
  const uint64_t sequence_id = client.CreateSequence(client.OpenCache());
  Restart();
  EXPECT_EQ(client.page().boot_word, 0u);
  BrokerConnection next(broker_path());
  const BrokerReply resumed = next.Call(Resume(client.hello().session_token));
  ASSERT_EQ(resumed.status, 0u) << resumed.message;
  const auto described = store_->DescribeSequence("default", sequence_id);
  ASSERT_TRUE(described.ok()) << described.status();
  EXPECT_EQ(described->session, "local#1");
}

TEST_F(KeptSessionsTest, AKeeperThatIsFullRefusesTheSessionAndNothingIsLeftOfIt) {
  Restart();
  const size_t without = keeper_.Names().size();
  keeper_.max_kept = without + 1;  // the control memory, not the connection
  {
    LocalClient refused(endpoint());
    EXPECT_EQ(refused.hello().status, grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(keeper_.Names().size(), without);
    EXPECT_THAT(store_->KeptSessions(), IsEmpty());
  }
  keeper_.max_kept = without + 2;
  LocalClient client(endpoint());
  EXPECT_EQ(client.hello().status, 0u) << client.hello().message;
}

TEST_F(KeptSessionsTest, AResumptionThatItsClientDidNotHearOfIsNoEnd) {
  Restart();
  LocalClient client(endpoint());
  const std::string token = client.hello().session_token;
  const uint64_t sequence_id = client.CreateSequence(client.OpenCache());
  Restart();
  for (int attempt = 0; attempt < 3; ++attempt) {
    BrokerConnection hasty(broker_path());
    const BrokerRequest request = Resume(token);
    ASSERT_TRUE(hasty.Send(&request, sizeof(request)));
    pollfd answer = {.fd = hasty.socket_descriptor(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(poll(&answer, 1, std::chrono::milliseconds(kPatience).count()), 1);
    const bool resumed = (answer.revents & POLLIN) != 0;
    ASSERT_TRUE(resumed);
    // Closes without having read the answer.
  }
  // The connection stays open: its end would be the end of the session.
  std::unique_ptr<BrokerConnection> resumed;
  BrokerReply reply;
  const auto until = std::chrono::steady_clock::now() + kPatience;
  do {
    resumed = std::make_unique<BrokerConnection>(broker_path());
    reply = resumed->Call(Resume(token));
  } while (reply.status == grpc::StatusCode::FAILED_PRECONDITION &&
           std::chrono::steady_clock::now() < until);
  EXPECT_EQ(reply.status, 0u) << reply.message;
  EXPECT_TRUE(store_->DescribeSequence("default", sequence_id).ok());
}

TEST_F(KeptSessionsTest, TheEndOfAResumedConnectionIsThatOfTheSession) {
  Restart();
  LocalClient client(endpoint());
  const std::string token = client.hello().session_token;
  Restart();
  {
    BrokerConnection next(broker_path());
    ASSERT_EQ(next.Call(Resume(token)).status, 0u);
  }
  const BrokerReply reply = ResumeWhile(grpc::StatusCode::FAILED_PRECONDITION, token);
  EXPECT_EQ(reply.status, grpc::StatusCode::NOT_FOUND);
}

// The end may reach the server before gRPC has reported that the reply is written.
TEST_F(KeptSessionsTest, AStreamThatEndsInOrderBehindItsResumptionEndsTheSession) {
  constexpr int kSessions = 24;
  Restart();
  std::vector<std::unique_ptr<TestClient>> clients;
  for (int i = 0; i < kSessions; ++i) clients.push_back(Connect());
  Restart();
  for (const auto& client : clients) {
    v1::SessionEvent opened;
    const grpc::Status ended = ResumeAndEnd(client->token(), &opened);
    EXPECT_TRUE(ended.ok()) << ended.error_message();
    EXPECT_EQ(opened.opened().session_token(), client->token());
    EXPECT_TRUE(
        Failed(ResumeAndEnd(client->token()), grpc::StatusCode::NOT_FOUND, "open.resume_token"));
  }
  EXPECT_THAT(store_->KeptSessions(), IsEmpty());
}

TEST_F(KeptSessionsTest, AMalformedTokenIsRefused) {
  Restart();
  BrokerConnection connection(broker_path());
  BrokerRequest request = BrokerConnection::Request(BrokerCall::kResume);
  std::fill(std::begin(request.resume_token), std::end(request.resume_token), 'x');
  EXPECT_EQ(connection.Call(request).status, grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(connection.Call(BrokerConnection::Request(BrokerCall::kResume)).status,
            grpc::StatusCode::NOT_FOUND);
}

TEST_F(KeptSessionsTest, AnotherUserCannotResumeASessionOfABoundTenant) {
  Restart();
  LocalClient client(endpoint(), "team-a");
  ASSERT_EQ(client.hello().status, 0u);
  config_.tenant_uids = *TenantUids::Parse("4242=team-a");
  Restart();
  BrokerConnection next(broker_path());
  EXPECT_EQ(next.Call(Resume(client.hello().session_token)).status,
            grpc::StatusCode::PERMISSION_DENIED);
}

// A token does not replace the uid, which gRPC does not show.
TEST_F(KeptSessionsTest, AStreamCannotResumeASessionOfABoundTenantAndTheRefusalChangesNothing) {
  Restart();
  const auto client = Connect("team-a");
  const std::string own_uid = std::to_string(getuid());
  config_.tenant_uids = *TenantUids::Parse(own_uid + "=team-a");
  Restart();
  EXPECT_TRUE(
      Failed(ResumeAndEnd(client->token()), grpc::StatusCode::PERMISSION_DENIED, "open.tenant"));
  BrokerConnection of_the_uid(broker_path());
  const BrokerReply reply = of_the_uid.Call(Resume(client->token()));
  EXPECT_EQ(reply.status, 0u) << reply.message;
  EXPECT_STREQ(reply.tenant, "team-a");
}

TEST_F(KeptSessionsTest, AStreamResumesASessionOfAnotherTenantThanTheBoundOnes) {
  Restart();
  const auto client = Connect("team-b");
  config_.tenant_uids = *TenantUids::Parse("4242=team-a");
  Restart();
  const grpc::Status ended = ResumeAndEnd(client->token());
  EXPECT_TRUE(ended.ok()) << ended.error_message();
}

TEST_F(KeptSessionsTest, SequencesOfSessionsThatNobodyKeptAreDropped) {
  Restart();
  LocalClient client(endpoint());
  const uint64_t cache_id = client.OpenCache();
  const uint64_t kept = client.CreateSequence(cache_id);
  const auto orphan = store_->CreateSequence("default", cache_id, {.session = "ghost#9"});
  ASSERT_TRUE(orphan.ok()) << orphan.status();
  Restart();
  EXPECT_TRUE(store_->DescribeSequence("default", kept).ok());
  EXPECT_EQ(store_->DescribeSequence("default", orphan->sequence_id).status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace pqcached::service
