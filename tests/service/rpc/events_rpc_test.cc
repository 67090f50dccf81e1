// WatchEvents: streams of the events of a cache, as a router follows them.
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

#include "service/session/event_seats.h"
#include "tests/service/rpc/rpc_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;

// One stream, and the keys that its client knows.
class Watcher {
 public:
  Watcher(TestClient& client, uint64_t cache_id, uint64_t epoch = 0, uint64_t number = 0,
          std::string tenant = "default")
      : context_(client.Context()), cache_id_(cache_id), tenant_(std::move(tenant)) {
    v1::WatchEventsRequest request;
    request.set_cache_id(cache_id);
    request.set_epoch(epoch);
    request.set_number(number);
    reader_ = client.kv().WatchEvents(context_.get(), request);
  }

  // Reads one message; false at the end of the stream.
  bool Read() {
    v1::CacheEvents events;
    if (!reader_->Read(&events)) return false;
    EXPECT_GT(events.events_size(), 0);
    EXPECT_LE(events.events_size(), 256);
    EXPECT_EQ(events.cache_id(), cache_id_);
    EXPECT_EQ(events.tenant(), tenant_);
    EXPECT_EQ(events.cache(), "cache");
    ++messages_;
    epoch_ = events.epoch();
    for (const v1::CacheEvent& event : events.events()) Apply(event);
    return true;
  }
  // Reads until `is_done`.
  void Await(const std::function<bool()>& is_done) {
    while (!is_done()) ASSERT_TRUE(Read()) << reader_->Finish().error_message();
  }
  grpc::Status Finish() { return reader_->Finish(); }
  void Cancel() { context_->TryCancel(); }

  // Returns the number of the prompt's tokens whose keys are known.
  uint64_t Match(const v1::MatchPrefixResponse& prompt) const {
    uint64_t tokens = 0;
    std::string parent = prompt.root();
    for (const std::string& key : prompt.keys()) {
      const auto known = parents_.find(key);
      if (known == parents_.end()) break;
      EXPECT_EQ(known->second, parent);
      parent = key;
      tokens += 128;
    }
    return tokens;
  }
  size_t size() const { return parents_.size(); }
  uint64_t epoch() const { return epoch_; }
  uint64_t number() const { return number_; }
  int clears() const { return clears_; }
  int messages() const { return messages_; }

 private:
  void Apply(const v1::CacheEvent& event) {
    EXPECT_TRUE(event.number() > number_ || event.number() == 0);
    number_ = event.number();
    if (event.kind() == v1::CACHE_EVENT_KIND_CLEARED) {
      parents_.clear();
      ++clears_;
    } else if (event.kind() == v1::CACHE_EVENT_KIND_REMOVED) {
      parents_.erase(event.key());
    } else {
      EXPECT_EQ(event.key().size(), 32u);
      EXPECT_EQ(event.token_end() % 128, 0u);
      parents_.emplace(event.key(), event.parent_key());
    }
  }

  std::unique_ptr<grpc::ClientContext> context_;
  uint64_t cache_id_ = 0;
  std::string tenant_;
  std::unique_ptr<grpc::ClientReader<v1::CacheEvents>> reader_;
  std::map<std::string, std::string> parents_;
  uint64_t epoch_ = 0;
  uint64_t number_ = 0;
  int clears_ = 0;
  int messages_ = 0;
};

class EventsRpcTest : public RpcTest {
 protected:
  void SetUp() override {
    Start([](Config& config) {
      config.retain = false;
      config.call_threads = 1;
    });
    client_ = Connect();
    cache_id_ = client_->OpenCache();
  }
  void TearDown() override { client_.reset(); }

  static std::vector<uint32_t> Ids(uint32_t count) {
    std::vector<uint32_t> ids(count);
    for (uint32_t i = 0; i < count; ++i) ids[i] = i * 7 + 1;
    return ids;
  }
  v1::MatchPrefixResponse Match(const std::vector<uint32_t>& ids) {
    v1::MatchPrefixRequest request;
    request.set_cache_id(cache_id_);
    request.mutable_token_ids()->Add(ids.begin(), ids.end());
    request.set_want_keys(true);
    v1::MatchPrefixResponse response;
    const auto status = client_->kv().MatchPrefix(client_->Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.root().size(), 32u);
    EXPECT_EQ(static_cast<size_t>(response.keys_size()), ids.size() / 128);
    return response;
  }
  // Stores the first `tokens` of Ids; returns the sequence.
  uint64_t Store(uint32_t tokens) {
    v1::CreateSequenceRequest request;
    request.set_cache_id(cache_id_);
    const std::vector<uint32_t> ids = Ids(tokens);
    request.mutable_token_ids()->Add(ids.begin(), ids.end());
    v1::CreateSequenceResponse made;
    EXPECT_TRUE(client_->kv().CreateSequence(client_->Context().get(), request, &made).ok());
    constexpr uint64_t kChunkTokens = 1000;  // rows of one message
    for (uint64_t done = made.token_count(); done < tokens; done += kChunkTokens) {
      client_->Ingest(made.sequence_id(), done, std::min(kChunkTokens, tokens - done));
    }
    return made.sequence_id();
  }
  void Drop(uint64_t sequence_id) {
    v1::DropSequenceRequest request;
    request.set_sequence_id(sequence_id);
    v1::DropSequenceResponse dropped;
    ASSERT_TRUE(client_->kv().DropSequence(client_->Context().get(), request, &dropped).ok());
  }

  std::unique_ptr<TestClient> client_;
  uint64_t cache_id_ = 0;
};

TEST_F(EventsRpcTest, AClientKnowsWhatMatchPrefixFinds) {
  const v1::MatchPrefixResponse prompt = Match(Ids(1000));
  Watcher watcher(*client_, cache_id_);
  ASSERT_TRUE(watcher.Read());
  EXPECT_EQ(watcher.size(), 0u);
  const uint64_t id = Store(600);
  watcher.Await([&] { return watcher.Match(prompt) == 512; });
  EXPECT_EQ(watcher.size(), 4u);
  EXPECT_EQ(Match(Ids(1000)).token_count(), 512u);
  Watcher late(*client_, cache_id_);
  ASSERT_TRUE(late.Read());
  EXPECT_EQ(late.Match(prompt), 512u);
  Drop(id);
  watcher.Await([&] { return watcher.size() == 0; });
  late.Await([&] { return late.size() == 0; });
  EXPECT_EQ(watcher.clears(), 1);
  EXPECT_EQ(watcher.number(), 8u);
}

TEST_F(EventsRpcTest, AStreamContinuesAfterItsPosition) {
  Watcher first(*client_, cache_id_);
  ASSERT_TRUE(first.Read());
  Store(300);
  first.Await([&] { return first.size() == 2; });
  first.Cancel();
  EXPECT_EQ(first.Finish().error_code(), StatusCode::CANCELLED);
  Store(500);
  Watcher next(*client_, cache_id_, first.epoch(), first.number());
  next.Await([&] { return next.size() == 1; });
  EXPECT_EQ(next.clears(), 0);
  EXPECT_EQ(next.epoch(), first.epoch());
  EXPECT_EQ(next.number(), first.number() + 1);
  Watcher other_epoch(*client_, cache_id_, first.epoch() + 1, first.number());
  other_epoch.Await([&] { return other_epoch.size() == 3; });
  EXPECT_EQ(other_epoch.clears(), 1);
}

TEST_F(EventsRpcTest, MoreEventsThanOneMessageHasArriveInOrder) {
  Watcher first(*client_, cache_id_);
  ASSERT_TRUE(first.Read());
  first.Cancel();
  for (int round = 0; round < 3; ++round) Drop(Store(128 * 100));
  Store(256);
  Watcher watcher(*client_, cache_id_, first.epoch(), 0);
  watcher.Await([&] { return watcher.number() == 602; });
  EXPECT_EQ(watcher.size(), 2u);
  EXPECT_EQ(watcher.clears(), 0);
  EXPECT_GE(watcher.messages(), 3);
}

TEST_F(EventsRpcTest, ADroppedCacheIsClearedAndEndsTheStream) {
  Store(300);
  Watcher watcher(*client_, cache_id_);
  watcher.Await([&] { return watcher.size() == 2; });
  v1::DropCacheRequest request;
  request.set_cache_id(cache_id_);
  request.set_force(true);
  v1::DropCacheResponse dropped;
  ASSERT_TRUE(client_->admin().DropCache(client_->Context().get(), request, &dropped).ok());
  while (watcher.Read()) {
  }
  EXPECT_EQ(watcher.size(), 0u);
  EXPECT_EQ(watcher.clears(), 2);
  EXPECT_TRUE(Failed(watcher.Finish(), StatusCode::NOT_FOUND, "cache_id"));
}

TEST_F(EventsRpcTest, AStreamEndsWithItsSession) {
  const auto router = Connect("", "router");
  Watcher watcher(*router, cache_id_);
  ASSERT_TRUE(watcher.Read());
  router->EndSession();
  EXPECT_FALSE(watcher.Read());
  EXPECT_TRUE(Failed(watcher.Finish(), StatusCode::UNAUTHENTICATED, "pqcached-session"));
}

TEST_F(EventsRpcTest, AnotherTenantSeesNoEvents) {
  const auto other = Connect("other");
  Watcher watcher(*other, cache_id_);
  EXPECT_FALSE(watcher.Read());
  EXPECT_TRUE(Failed(watcher.Finish(), StatusCode::NOT_FOUND, "cache_id"));
}

// The server has one serving thread. A stream that pins it would stop the next call.
TEST_F(EventsRpcTest, StreamsOfATenantAreLimitedAndOccupyNoThread) {
  std::vector<std::unique_ptr<Watcher>> watchers;
  for (uint32_t i = 0; i < kMaxEventStreamsOfTenant; ++i) {
    watchers.push_back(std::make_unique<Watcher>(*client_, cache_id_));
    ASSERT_TRUE(watchers.back()->Read());
  }
  Watcher refused(*client_, cache_id_);
  EXPECT_FALSE(refused.Read());
  EXPECT_TRUE(Failed(refused.Finish(), StatusCode::RESOURCE_EXHAUSTED,
                     "max_event_streams_of_tenant", "16"));
  const auto other = Connect("other");
  Watcher of_other(*other, other->OpenCache(), 0, 0, "other");
  EXPECT_TRUE(of_other.Read());

  watchers.front()->Cancel();
  EXPECT_EQ(watchers.front()->Finish().error_code(), StatusCode::CANCELLED);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!Watcher(*client_, cache_id_).Read()) {
    ASSERT_LT(std::chrono::steady_clock::now(), until) << "the seat was not released";
    std::this_thread::yield();
  }
}

TEST_F(EventsRpcTest, AShutdownEndsStreams) {
  Watcher watcher(*client_, cache_id_);
  ASSERT_TRUE(watcher.Read());
  std::thread stopping([&] { Stop(); });
  EXPECT_FALSE(watcher.Read());
  EXPECT_EQ(watcher.Finish().error_code(), StatusCode::UNAVAILABLE);
  stopping.join();
}

}  // namespace
}  // namespace pqcached::service
