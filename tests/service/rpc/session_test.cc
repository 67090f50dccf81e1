// Sessions: their end, their tenants, clients that go without a word, streams that never open one.
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
#include "tests/service/rpc/lifecycle_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;

class SessionTest : public LifecycleTest {};

TEST_F(SessionTest, EndOfASessionDropsItsSequencesOnly) {
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

TEST_F(SessionTest, CallsNeedASessionAndAdminDoesNot) {
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

TEST_F(SessionTest, OtherTenantsSeeNothing) {
  Start();
  const auto owner = Connect("tenant-a");
  const auto other = Connect("tenant-b");
  const uint64_t cache_id = owner->OpenCache();
  const uint64_t sequence_id = owner->CreateSequence(cache_id);
  owner->Ingest(sequence_id, 0, 10);
  const std::string before = Dump(*owner, sequence_id);
  EXPECT_TRUE(Failed(TopK(*other, sequence_id, kLong), StatusCode::NOT_FOUND,
                     "items[0].query.sequence_id"));
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

// The owner's reads make the sidecar remember the shape of the cache. A stranger's wrong requests,
// which the shape alone would tell from right ones, are answered as if there were no sequence.
TEST_F(SessionTest, OtherTenantsDoNotLearnTheShapeOfACache) {
  Start();
  const auto owner = Connect("tenant-a");
  const auto other = Connect("tenant-b");
  const uint64_t sequence_id = owner->Filled(10);
  const auto ask = [&](TestClient& client, uint32_t layer, int positions) {
    v1::FetchBlocksRequest blocks;
    blocks.set_sequence_id(sequence_id);
    blocks.set_layer(layer);
    blocks.add_ranges()->set_end(1);
    v1::FetchBlocksResponse some_blocks;
    v1::FetchTokensRequest tokens;
    tokens.set_sequence_id(sequence_id);
    tokens.set_layer(layer);
    tokens.set_count(1);
    for (int i = 0; i < positions; ++i) tokens.add_positions(0);
    v1::FetchTokensResponse some_tokens;
    return std::pair(client.kv().FetchBlocks(client.Context().get(), blocks, &some_blocks),
                     client.kv().FetchTokens(client.Context().get(), tokens, &some_tokens));
  };
  const auto right = ask(*owner, kLayers[0], kKvHeads);
  EXPECT_TRUE(right.first.ok() && right.second.ok()) << right.first.error_message();
  const auto wrong = ask(*owner, 77, kKvHeads);
  EXPECT_TRUE(Failed(wrong.first, StatusCode::INVALID_ARGUMENT, "layer"));
  EXPECT_TRUE(Failed(ask(*owner, kLayers[0], kKvHeads + 1).second, StatusCode::INVALID_ARGUMENT,
                     "positions"));
  for (const uint32_t layer : {kLayers[0], 77u}) {
    for (const uint32_t positions : {kKvHeads, kKvHeads + 1}) {
      const auto foreign = ask(*other, layer, static_cast<int>(positions));
      EXPECT_TRUE(Failed(foreign.first, StatusCode::NOT_FOUND, "sequence_id")) << layer;
      EXPECT_TRUE(Failed(foreign.second, StatusCode::NOT_FOUND, "sequence_id")) << positions;
    }
  }
}

grpc::Status OpenSession(const std::string& endpoint,
                         const std::vector<v1::SessionRequest>& requests) {
  const auto stub =
      v1::KvCache::NewStub(grpc::CreateChannel(endpoint, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kLong);
  const auto stream = stub->Session(&context);
  for (const v1::SessionRequest& request : requests) stream->Write(request);
  v1::SessionEvent event;
  while (stream->Read(&event)) {
  }
  return stream->Finish();
}

TEST_F(SessionTest, SessionsThatCannotBe) {
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
  EXPECT_TRUE(Failed(OpenSession(endpoint(), {heartbeat}), invalid, "open"));
  EXPECT_TRUE(Failed(OpenSession(endpoint(), {future}), invalid, "open.protocol_version"));
  EXPECT_TRUE(Failed(OpenSession(endpoint(), {tenant}), invalid, "open.tenant"));
  EXPECT_TRUE(Failed(OpenSession(endpoint(), {name}), invalid, "open.client_name"));
  name.mutable_open()->set_client_name("a\nb");
  EXPECT_TRUE(Failed(OpenSession(endpoint(), {name}), invalid, "open.client_name", "U+000A"));
  EXPECT_TRUE(Failed(OpenSession(endpoint(), {open, heartbeat, open}), invalid, "open"));
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

TEST_F(SessionTest, AClientThatIsGoneLosesItsSession) {
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

// Waits until the server has begun so many ingests: a message that was sent may not have arrived.
void AwaitIngests(const std::atomic<int>& begun, int count) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (; begun < count; std::this_thread::yield()) {
    ASSERT_LT(std::chrono::steady_clock::now(), until) << begun;
  }
}

// The ingest has begun and its rows were sent, only the end of the stream was not: a commit would
// leave rows behind.
TEST_F(SessionTest, AClientThatIsGoneInMidIngestLeavesNothing) {
  std::atomic<int> begun = 0;
  hooks_.after_begin_ingest = [&] { ++begun; };
  StartHooked();
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
    AwaitIngests(begun, round + 2);  // one filled the sequence
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

TEST_F(SessionTest, AnIngestOfAnEndedSessionIsNotCommitted) {
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

TEST_F(SessionTest, ASequenceMadeWhileItsSessionEndsIsDropped) {
  absl::Notification begun;
  absl::Notification keep_going;
  hooks_.before_create_sequence = [&] {
    begun.Notify();
    keep_going.WaitForNotification();
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
  keep_going.Notify();
  maker.join();
  EXPECT_TRUE(
      Failed(status, StatusCode::UNAUTHENTICATED, "pqcached-session", "the session has ended"));
  EXPECT_EQ(Stats(*watcher).sequence_count(), 0u);
}

TEST_F(SessionTest, AStreamThatNeverOpensItsSessionIsEnded) {
  Start([](Config& config) { config.default_timeout = absl::Milliseconds(50); });
  const auto stub =
      v1::KvCache::NewStub(grpc::CreateChannel(endpoint(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kLong);
  const auto stream = stub->Session(&context);
  v1::SessionEvent event;
  EXPECT_FALSE(stream->Read(&event));
  EXPECT_TRUE(Failed(stream->Finish(), StatusCode::DEADLINE_EXCEEDED, "open"));
}

TEST_F(SessionTest, StreamsThatAreNoSessionsYetAreLimited) {
  Start([](Config& config) { config.max_sessions = 1; });
  grpc::ChannelArguments own_connection;
  own_connection.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  constexpr size_t kMore = 130;          // twice as many as may wait: connections have no order
  constexpr size_t kOfAConnection = 10;  // fewer than one connection may have
  std::vector<std::unique_ptr<v1::KvCache::Stub>> stubs;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionEvent>>>
      streams;
  for (size_t i = 0; i < kMore; ++i) {
    if (i % kOfAConnection == 0) {
      stubs.push_back(v1::KvCache::NewStub(grpc::CreateCustomChannel(
          endpoint(), grpc::InsecureChannelCredentials(), own_connection)));
    }
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(stubs.back()->Session(contexts.back().get()));
  }
  EXPECT_TRUE(Failed(streams.back()->Finish(), StatusCode::RESOURCE_EXHAUSTED, "max_sessions"));
  for (size_t i = 0; i + 1 < kMore; ++i) contexts[i]->TryCancel();
  for (size_t i = 0; i + 1 < kMore; ++i) streams[i]->Finish();
}

}  // namespace
}  // namespace pqcached::service
