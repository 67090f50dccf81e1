// The broker: who gets a session, what it hands out, how it ends, and what strangers may send it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <thread>

#include "kvstore/refusal.h"
#include "tests/service/session/broker_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;
using kvstore::BrokerCall;
using kvstore::BrokerReply;
using kvstore::BrokerRequest;
using testing::HasSubstr;

class BrokerTest : public RpcTest {
 protected:
  std::string path() const {
    return endpoint().substr(std::string("unix://").size()) + kvstore::kBrokerSuffix;
  }
  v1::StatsResponse Stats(TestClient& admin) {
    v1::StatsResponse response;
    EXPECT_TRUE(admin.admin().Stats(admin.Context().get(), {}, &response).ok());
    return response;
  }
  // Until the end of a session has been worked off.
  template <typename Condition>
  void Await(TestClient& admin, const Condition& condition) {
    while (!condition(Stats(admin))) std::this_thread::yield();
  }
  std::string Fetch(LocalClient& client, uint64_t sequence_id, uint32_t layer, uint64_t tokens) {
    v1::FetchBlocksRequest request;
    request.set_sequence_id(sequence_id);
    request.set_layer(layer);
    request.add_ranges()->set_end(tokens);
    v1::FetchBlocksResponse response;
    const grpc::Status status = client.Rpc(&v1::KvCache::Stub::FetchBlocks, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.blocks_size() == 1 ? response.blocks(0).inline_data() : "";
  }
};

TEST_F(BrokerTest, HelloOpensASessionThatRpcsKnow) {
  Start();
  LocalClient client(endpoint(), "team-a", "engine");
  ASSERT_EQ(client.hello().status, 0u) << client.hello().message;
  EXPECT_STREQ(client.hello().tenant, "team-a");
  EXPECT_NE(client.hello().boot_word, 0u);
  EXPECT_EQ(client.page().boot_word.load(), client.hello().boot_word);
  EXPECT_EQ(client.hello().max_message_bytes, config_.max_message_bytes);
  const auto admin = Connect();
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(admin->admin().GetServerInfo(admin->Context().get(), {}, &info).ok());
  EXPECT_EQ(info.boot_id(), client.hello().boot_id);
  EXPECT_THAT(info.capabilities(), testing::IsSupersetOf({"local.broker", "staging"}));
  EXPECT_GT(client.OpenCache(), 0u);
  EXPECT_EQ(Stats(*admin).session_count(), 2u);
}

TEST_F(BrokerTest, AMappedSequenceReadsAsAFetchedOne) {
  Start();
  LocalClient client(endpoint());
  const uint64_t cache_id = client.OpenCache();
  const uint64_t sequence_id = client.CreateSequence(cache_id);
  ASSERT_TRUE(Append(client, sequence_id, 0, 200).ok());
  const SharedMapping pool = client.connection().OpenPool(cache_id);
  ASSERT_NE(pool.data(), nullptr);
  BrokerRequest hold = BrokerConnection::Request(BrokerCall::kHoldPool);
  hold.cache_id = cache_id;
  for (int i = 0; i < 2; ++i) {
    kvstore::FileDescriptor none;
    EXPECT_EQ(client.connection().Call(hold, &none).status, 0u);
    EXPECT_FALSE(none.valid());
  }
  v1::AttachResponse attached;
  const grpc::Status status = client.Attach(sequence_id, &attached);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(client.words(attached.word_index()).token_count.load(), 200u);
  for (const uint32_t layer : kLayers) {
    EXPECT_EQ(MappedRows(attached.attachment().image(), pool, layer, 200),
              Fetch(client, sequence_id, layer, 200));
  }
  const auto admin = Connect();
  v1::ListLeasesResponse leases;
  ASSERT_TRUE(admin->admin().ListLeases(admin->Context().get(), {}, &leases).ok());
  ASSERT_EQ(leases.leases_size(), 1);
  EXPECT_EQ(leases.leases(0).client_name(), "local");
  EXPECT_EQ(leases.leases(0).peer_pid(), static_cast<uint32_t>(getpid()));
  EXPECT_GT(leases.leases(0).bytes(), 0u);
  EXPECT_TRUE(client.Detach(attached.lease_id()).ok());
  EXPECT_TRUE(Failed(client.Detach(attached.lease_id()), StatusCode::NOT_FOUND, "lease_id"));
}

TEST_F(BrokerTest, TheEndOfTheConnectionEndsTheSession) {
  Start();
  const auto admin = Connect();
  auto client = std::make_unique<LocalClient>(endpoint());
  const uint64_t cache_id = client->OpenCache();
  const uint64_t sequence_id = client->CreateSequence(cache_id);
  ASSERT_TRUE(Append(*client, sequence_id, 0, 200).ok());
  v1::AttachResponse attached;
  ASSERT_TRUE(client->Attach(sequence_id, &attached).ok());
  ASSERT_NE(client->connection().OpenStaging(1 << 20, 2).data(), nullptr);
  const std::string token = client->hello().session_token;
  EXPECT_EQ(Stats(*admin).lease_count(), 1u);
  EXPECT_EQ(Stats(*admin).staging_bytes(), uint64_t{2} << 20);
  shutdown(client->connection().socket_descriptor(), SHUT_WR);
  Await(*admin, [](const v1::StatsResponse& stats) { return stats.sequence_count() == 0; });
  EXPECT_EQ(client->page().boot_word.load(), 0u);
  const v1::StatsResponse stats = Stats(*admin);
  EXPECT_EQ(stats.session_count(), 1u);
  EXPECT_EQ(stats.lease_count(), 0u);
  EXPECT_EQ(stats.staging_bytes(), 0u);
  EXPECT_EQ(stats.pool_used_bytes(), 0u);
  EXPECT_TRUE(Failed(client->Attach(sequence_id, &attached), StatusCode::UNAUTHENTICATED,
                     "pqcached-session"));
}

TEST_F(BrokerTest, AMappingOutlivesTheSessionThatMadeItsSequence) {
  Start();
  const auto admin = Connect();
  auto owner = std::make_unique<LocalClient>(endpoint(), "", "owner");
  LocalClient reader(endpoint(), "", "reader");
  const uint64_t cache_id = owner->OpenCache();
  const uint64_t sequence_id = owner->CreateSequence(cache_id);
  ASSERT_TRUE(Append(*owner, sequence_id, 0, 200).ok());
  const SharedMapping pool = reader.connection().OpenPool(cache_id);
  v1::AttachResponse attached;
  ASSERT_TRUE(reader.Attach(sequence_id, &attached).ok());
  const std::string before = MappedRows(attached.attachment().image(), pool, 4, 200);
  const uint64_t used_bytes = Stats(*admin).pool_used_bytes();
  owner.reset();
  Await(*admin, [](const v1::StatsResponse& stats) { return stats.sequence_count() == 0; });
  EXPECT_TRUE(reader.words(attached.word_index()).flags.load() & kvstore::LeaseWords::kRevoked);
  EXPECT_EQ(Stats(*admin).pool_used_bytes(), used_bytes);
  EXPECT_EQ(Stats(*admin).revoked_lease_count(), 1u);
  // Others fill what is left.
  LocalClient greedy(endpoint(), "", "greedy");
  const uint64_t greedy_id = greedy.CreateSequence(greedy.OpenCache());
  grpc::Status status;
  for (uint64_t first = 0; status.ok(); first += 1024) {
    status = Append(greedy, greedy_id, first, 1024);
  }
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_TRUE(MappedRows(attached.attachment().image(), pool, 4, 200) == before);
  EXPECT_TRUE(reader.Detach(attached.lease_id()).ok());
}

TEST_F(BrokerTest, ShutdownTellsClientsByTheirControlMemory) {
  Start();
  LocalClient client(endpoint());
  const uint32_t wake = client.page().wake_word.load();
  Stop();
  EXPECT_EQ(client.page().boot_word.load(), 0u);
  EXPECT_GT(client.page().wake_word.load(), wake);
  BrokerReply reply;
  EXPECT_FALSE(client.connection().Receive(reply));
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(BrokerTest, TheSocketHasTheModeAndIsClaimed) {
  Start([](Config& config) { config.socket_mode = 0660; });
  struct stat status = {};
  ASSERT_EQ(stat(path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0660u);
  EXPECT_FALSE(Server::Start(config_, *store_, *log_).ok());
  EXPECT_TRUE(BrokerConnection(path()).connected());
}

TEST_F(BrokerTest, CanBeOff) {
  Start([](Config& config) { config.broker = false; });
  EXPECT_FALSE(std::filesystem::exists(path()));
  EXPECT_FALSE(BrokerConnection(path()).connected());
}

TEST_F(BrokerTest, WrongRequestsAreAnsweredOrEndTheConnection) {
  Start();
  const auto status_of = [&](const std::function<void(BrokerRequest&)>& change) {
    BrokerConnection connection(path());
    BrokerRequest request = BrokerConnection::Hello();
    change(request);
    return connection.Call(request).status;
  };
  EXPECT_EQ(status_of([](BrokerRequest& r) { r.magic = 1; }), StatusCode::UNAVAILABLE);
  EXPECT_EQ(status_of([](BrokerRequest& r) { ++r.version; }), StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(status_of([](BrokerRequest& r) { r.reserved = 2; }), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status_of([](BrokerRequest& r) { r.call = BrokerCall::kOpenPool; }),
            StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(status_of([](BrokerRequest& r) { r.call = static_cast<BrokerCall>(99); }),
            StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(status_of([](BrokerRequest& r) { std::memset(r.tenant, 'a', sizeof(r.tenant)); }),
            StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(
      status_of([](BrokerRequest& r) { std::memset(r.client_name, 'a', sizeof(r.client_name)); }),
      StatusCode::INVALID_ARGUMENT);
  for (const char* name :
       {"\xff", "a\nb", "\xe2\x80\xae"}) {  // they would reach every ListSequences
    EXPECT_EQ(status_of([&](BrokerRequest& r) {
                std::memset(r.client_name, 0, sizeof(r.client_name));
                std::strcpy(r.client_name, name);
              }),
              StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_EQ(status_of([](BrokerRequest& r) { std::strcpy(r.tenant, "Not A Tenant"); }),
            StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status_of([](BrokerRequest&) {}), 0u);

  BrokerConnection open(path());
  ASSERT_EQ(open.Call(BrokerConnection::Hello()).status, 0u);
  EXPECT_EQ(open.Call(BrokerConnection::Hello()).status, StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(open.Call(BrokerConnection::Request(static_cast<BrokerCall>(99))).status,
            StatusCode::UNIMPLEMENTED);
  BrokerReply reply;
  open.OpenPool(12345, &reply);
  EXPECT_EQ(reply.status, StatusCode::NOT_FOUND);
  BrokerRequest hold = BrokerConnection::Request(BrokerCall::kHoldPool);
  hold.cache_id = 12345;
  EXPECT_EQ(open.Call(hold).status, StatusCode::NOT_FOUND);
  open.OpenStaging(12345, 1, &reply);
  EXPECT_EQ(reply.status, StatusCode::INVALID_ARGUMENT);
  EXPECT_STREQ(reply.field, "slot_bytes");
  open.OpenStaging(size_t{1} << 30, 1024, &reply);
  EXPECT_EQ(reply.status, StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_NE(open.OpenStaging(1 << 20, 1).data(), nullptr);
  open.OpenStaging(1 << 20, 1, &reply);
  EXPECT_EQ(reply.status, StatusCode::ALREADY_EXISTS);
}

TEST_F(BrokerTest, RandomBytesEndOnlyTheirConnection) {
  Start();
  BrokerConnection good(path());
  ASSERT_EQ(good.Call(BrokerConnection::Hello()).status, 0u);
  uint32_t state = 1;
  for (int round = 0; round < 200; ++round) {
    BrokerConnection connection(path());
    BrokerRequest request = BrokerConnection::Hello();
    auto* bytes = reinterpret_cast<unsigned char*>(&request);
    for (int flips = 0; flips < 1 + round % 20; ++flips) {
      state = state * 1664525 + 1013904223;
      bytes[8 + state % (sizeof(request) - 8)] = static_cast<unsigned char>(state >> 24);
    }
    const size_t size_bytes = round % 3 == 0 ? state % sizeof(request) : sizeof(request);
    connection.Send(&request, size_bytes);
    BrokerReply reply;
    EXPECT_TRUE(size_bytes < sizeof(request) || connection.Receive(reply)) << round;
  }
  EXPECT_EQ(good.Call(BrokerConnection::Hello()).status, StatusCode::FAILED_PRECONDITION);
}

TEST_F(BrokerTest, SilentPeersAreClosedAndOpenSessionsStay) {
  Start([](Config& config) { config.default_timeout = absl::Milliseconds(300); });
  BrokerConnection open(path());
  ASSERT_EQ(open.Call(BrokerConnection::Hello()).status, 0u);
  BrokerConnection silent(path());
  BrokerConnection half(path());
  const BrokerRequest hello = BrokerConnection::Hello();
  ASSERT_TRUE(half.Send(&hello, 100));
  BrokerReply reply;
  EXPECT_FALSE(silent.Receive(reply));
  EXPECT_FALSE(half.Receive(reply));
  EXPECT_EQ(open.Call(hello).status, StatusCode::FAILED_PRECONDITION);
  ASSERT_TRUE(open.Send(&hello, 100));  // also of an open session, a request has to end
  EXPECT_FALSE(open.Receive(reply));
}

// A client of version 1 reads the first bytes of the reply, which are the same in both versions.
TEST_F(BrokerTest, RequestsOfVersion1AreRefusedWithBothVersions) {
  Start();
  BrokerConnection connection(path());
  BrokerRequest request = BrokerConnection::Hello();
  request.version = 1;
  const BrokerReply reply = connection.Call(request);
  EXPECT_EQ(reply.magic, BrokerReply::kMagic);
  EXPECT_EQ(reply.version, kvstore::kBrokerVersion);
  EXPECT_EQ(reply.status, StatusCode::UNIMPLEMENTED);
  EXPECT_STREQ(reply.field, "version");
  EXPECT_STREQ(reply.message, "1, must be 3");
  EXPECT_EQ(reply.retry_ms, 0u);
  BrokerReply none;
  EXPECT_FALSE(connection.Receive(none)) << "the broker ends the connection";
}

TEST_F(BrokerTest, SessionsAndConnectionsHaveLimits) {
  Start([](Config& config) { config.max_sessions = 2; });
  auto first = std::make_unique<BrokerConnection>(path());
  BrokerConnection second(path());
  ASSERT_EQ(first->Call(BrokerConnection::Hello()).status, 0u);
  ASSERT_EQ(second.Call(BrokerConnection::Hello()).status, 0u);
  BrokerConnection third(path());
  const BrokerReply refused = third.Call(BrokerConnection::Hello());
  EXPECT_EQ(refused.status, StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_STREQ(refused.field, "max_sessions");
  EXPECT_EQ(refused.retry_ms, kvstore::kRetryMemory);
  std::vector<std::unique_ptr<BrokerConnection>> idle;
  for (int i = 0; i < 15; ++i) idle.push_back(std::make_unique<BrokerConnection>(path()));
  BrokerConnection beyond(path());
  BrokerReply reply;
  ASSERT_TRUE(beyond.Receive(reply)) << "one user may have 16 connections without a session";
  EXPECT_EQ(reply.status, StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_STREQ(reply.field, "connections");
  EXPECT_FALSE(beyond.Receive(reply));
  first.reset();
  while (third.Call(BrokerConnection::Hello()).status != 0) std::this_thread::yield();
}

// The other end of a pipe that was sent away sees its end when nobody holds it any more.
TEST_F(BrokerTest, DescriptorsThatAreSentAreClosed) {
  Start();
  int ends[2] = {};
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  BrokerConnection connection(path());
  BrokerRequest request = BrokerConnection::Hello();
  iovec part = {&request, sizeof(request)};
  constexpr size_t kCount = 200;
  std::vector<int> sent(kCount, ends[1]);
  std::vector<char> control(CMSG_SPACE(kCount * sizeof(int)));
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(kCount * sizeof(int));
  std::memcpy(CMSG_DATA(header), sent.data(), kCount * sizeof(int));
  ASSERT_EQ(sendmsg(connection.socket_descriptor(), &message, MSG_NOSIGNAL),
            static_cast<ssize_t>(sizeof(request)));
  BrokerReply reply;
  ASSERT_TRUE(connection.Receive(reply));
  EXPECT_EQ(reply.status, 0u) << reply.message;
  close(ends[1]);
  char byte = 0;
  EXPECT_EQ(read(ends[0], &byte, 1), 0);
  close(ends[0]);
}

TEST_F(BrokerTest, OneSessionHasNoHandInAnother) {
  Start();
  LocalClient owner(endpoint(), "team-a", "owner");
  LocalClient stranger(endpoint(), "team-b", "stranger");
  LocalClient colleague(endpoint(), "team-a", "colleague");
  const uint64_t cache_id = owner.OpenCache();
  const uint64_t sequence_id = owner.CreateSequence(cache_id);
  ASSERT_TRUE(Append(owner, sequence_id, 0, 10).ok());
  v1::AttachResponse attached;
  ASSERT_TRUE(owner.Attach(sequence_id, &attached).ok());
  BrokerReply reply;
  stranger.connection().OpenPool(cache_id, &reply);
  EXPECT_EQ(reply.status, StatusCode::NOT_FOUND);
  v1::AttachResponse other;
  EXPECT_TRUE(Failed(stranger.Attach(sequence_id, &other), StatusCode::NOT_FOUND, "sequence_id"));
  EXPECT_TRUE(Failed(colleague.Detach(attached.lease_id()), StatusCode::NOT_FOUND, "lease_id"));

  // Only its holder's own lease is spared by a roll back.
  v1::TruncateSequenceRequest truncate;
  truncate.set_sequence_id(sequence_id);
  truncate.set_token_count(5);
  truncate.mutable_lease()->set_lease_id(attached.lease_id());
  v1::TruncateSequenceResponse truncated;
  EXPECT_TRUE(Failed(colleague.Rpc(&v1::KvCache::Stub::TruncateSequence, truncate, &truncated),
                     StatusCode::NOT_FOUND, "lease.lease_id"));
  EXPECT_EQ(owner.words(attached.word_index()).token_count.load(), 10u);
  ASSERT_TRUE(owner.Rpc(&v1::KvCache::Stub::TruncateSequence, truncate, &truncated).ok());
  EXPECT_EQ(owner.words(attached.word_index()).flags.load(), 0u);
  EXPECT_EQ(owner.words(attached.word_index()).token_count.load(), 5u);

  // A session of a stream has no memory to share.
  const auto remote = Connect("team-a");
  v1::AttachRequest request;
  request.set_sequence_id(sequence_id);
  EXPECT_TRUE(Failed(remote->kv().Attach(remote->Context().get(), request, &other),
                     StatusCode::FAILED_PRECONDITION, "pqcached-session", "local"));
}

TEST_F(BrokerTest, TheUidDecidesTheTenantWhereItIsBound) {
  const std::string uid = std::to_string(getuid());
  Start([&](Config& config) {
    config.tenant_uids = *TenantUids::Parse(uid + "=team-a, " + uid + "=team-b, 4000000=team-c");
  });
  const auto status = [&](const std::string& tenant) {
    return BrokerConnection(path()).Call(BrokerConnection::Hello(tenant));
  };
  EXPECT_STREQ(status("").tenant, "team-a");
  EXPECT_STREQ(status("team-b").tenant, "team-b");
  EXPECT_EQ(status("team-c").status, StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(status("team-d").status, StatusCode::PERMISSION_DENIED);

  const auto stream = [&](const std::string& tenant) {
    grpc::ClientContext context;
    const auto kv =
        v1::KvCache::NewStub(grpc::CreateChannel(endpoint(), grpc::InsecureChannelCredentials()));
    const auto session = kv->Session(&context);
    v1::SessionRequest request;
    request.mutable_open()->set_protocol_version(1);
    request.mutable_open()->set_tenant(tenant);
    session->Write(request);
    v1::SessionEvent event;
    if (session->Read(&event)) context.TryCancel();
    return session->Finish();
  };
  EXPECT_TRUE(Failed(stream("team-a"), StatusCode::PERMISSION_DENIED, "open.tenant"));
  EXPECT_TRUE(Failed(stream("team-c"), StatusCode::PERMISSION_DENIED, "open.tenant"));
  EXPECT_TRUE(Failed(stream("team-z"), StatusCode::CANCELLED, ""));
}

TEST(TenantUids, RangesAndListsAreRead) {
  const auto uids = TenantUids::Parse("1000=team-a,2000-2010=team-b , 2005=team-c");
  ASSERT_TRUE(uids.ok()) << uids.status();
  EXPECT_EQ(*uids->TenantOf(1000, ""), "team-a");
  EXPECT_EQ(*uids->TenantOf(2010, ""), "team-b");
  EXPECT_EQ(*uids->TenantOf(2005, ""), "team-b");
  EXPECT_EQ(*uids->TenantOf(2005, "team-c"), "team-c");
  EXPECT_FALSE(uids->TenantOf(2006, "team-c").ok());
  EXPECT_FALSE(uids->TenantOf(1001, "").ok());
  EXPECT_TRUE(uids->Binds("team-c"));
  EXPECT_FALSE(uids->Binds("default"));
  EXPECT_EQ(*TenantUids::Parse("")->TenantOf(5, "anyone"), "anyone");
  for (const char* wrong : {"1000", "=a", "x=a", "5-4=a", "1=A", "1-=", "1=a;2=b", "-1=a"}) {
    EXPECT_FALSE(TenantUids::Parse(wrong).ok()) << wrong;
  }
}

}  // namespace
}  // namespace pqcached::service
