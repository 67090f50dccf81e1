// Events of a cache: a reader's picture equals what MatchPrefix finds, through evictions, full logs,
// erased tenants and restarts.
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "tests/kvstore/content.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::Content;
using testing::ContentOf;
using testing::IngestContent;
using testing::kTenant;
using testing::MemoryKeeper;
using testing::RandomIds;
using testing::SharingStore;
using testing::SmallOptions;
using testing::SmallSpec;

// Keys that a reader of a cache's events knows.
class Picture {
 public:
  void ReadAll(Store& store, uint64_t cache_id, size_t most = 7) {
    while (true) {
      const auto news = store.HasEvents(kTenant, cache_id, position_);
      ASSERT_TRUE(news.ok()) << news.status();
      const auto events = store.ReadEvents(kTenant, cache_id, position_, most);
      ASSERT_TRUE(events.ok()) << events.status();
      ASSERT_EQ(*news, !events->empty());
      if (events->empty()) return;
      for (const CacheEvent& event : *events) Apply(event);
    }
  }
  // Continues at the position of its newest event, as after a new connection.
  void Reconnect() { position_.present_until = 0; }

  // Returns the number of tokens that the picture has of a chain that PrefixKeys returned.
  size_t Match(std::span<const PrefixKey> chain) const {
    size_t steps = 0;
    while (steps + 1 < chain.size() && parents_.contains(chain[steps + 1])) {
      EXPECT_EQ(parents_.at(chain[steps + 1]), chain[steps]);
      ++steps;
    }
    return steps * kBlockTokens;
  }
  size_t size() const { return parents_.size(); }
  int clears() const { return clears_; }
  const EventPosition& position() const { return position_; }

 private:
  void Apply(const CacheEvent& event) {
    switch (event.kind) {
      case CacheEventKind::kCleared:
        parents_.clear();
        ++clears_;
        return;
      case CacheEventKind::kRemoved:
        parents_.erase(event.step.key);
        return;
      case CacheEventKind::kStored:
        EXPECT_TRUE(event.step.token_end == kBlockTokens || parents_.contains(event.step.parent));
        EXPECT_TRUE(parents_.emplace(event.step.key, event.step.parent).second);
        return;
    }
  }

  EventPosition position_;
  std::map<PrefixKey, PrefixKey> parents_;
  int clears_ = 0;
};

std::vector<PrefixKey> Chain(Store& store, uint64_t cache_id, const TokenNames& names,
                             const std::string& extra_key = "") {
  const auto keys = store.PrefixKeys(kTenant, cache_id, names, extra_key);
  EXPECT_TRUE(keys.ok()) << keys.status();
  return *keys;
}

TEST(CacheEvents, ConcernTheStepsThatMatchPrefixFinds) {
  SharingStore shared;
  std::mt19937_64 random(5);
  const std::vector<uint32_t> ids = RandomIds(random, 300);
  const std::vector<PrefixKey> chain = Chain(*shared.store, shared.cache_id, ids);
  ASSERT_EQ(chain.size(), 3u);
  Picture picture;
  picture.ReadAll(*shared.store, shared.cache_id);
  const uint64_t id = shared.Create(ids).sequence_id;  // named, and not stored
  picture.ReadAll(*shared.store, shared.cache_id);
  EXPECT_EQ(picture.size(), 0u);
  ASSERT_TRUE(IngestContent(*shared.store, id, shared.group, 0, ContentOf(ids)).ok());
  picture.ReadAll(*shared.store, shared.cache_id);
  EXPECT_EQ(picture.size(), 2u);
  EXPECT_EQ(picture.Match(chain), 256u);
  EXPECT_EQ(picture.Match(Chain(*shared.store, shared.cache_id, ids, "other")), 0u);

  const uint64_t fork = shared.Fork(id).sequence_id;  // a second holder is no event
  const uint64_t before = picture.position().number;
  picture.ReadAll(*shared.store, shared.cache_id);
  ASSERT_TRUE(shared.store->DropSequence(kTenant, id).ok());
  picture.ReadAll(*shared.store, shared.cache_id);
  EXPECT_EQ(picture.position().number, before);
  ASSERT_TRUE(shared.store->TruncateSequence(kTenant, fork, 130).ok());
  picture.ReadAll(*shared.store, shared.cache_id);
  EXPECT_EQ(picture.Match(chain), 128u);
  ASSERT_TRUE(shared.store->DropSequence(kTenant, fork).ok());
  picture.ReadAll(*shared.store, shared.cache_id);
  EXPECT_EQ(picture.size(), 0u);
  EXPECT_EQ(picture.clears(), 1);
}

TEST(CacheEvents, BelongToTheTenantOfTheCache) {
  SharingStore shared;
  EventPosition position;
  EXPECT_EQ(shared.store->ReadEvents("other", shared.cache_id, position, 1).status().code(),
            StatusCode::kNotFound);
  EXPECT_EQ(shared.store->HasEvents("other", shared.cache_id, position).status().code(),
            StatusCode::kNotFound);
  EXPECT_EQ(shared.store->PrefixKeys("other", shared.cache_id, {}, "").status().code(),
            StatusCode::kNotFound);
  ASSERT_TRUE(shared.store->DropCache(kTenant, shared.cache_id, /*force=*/true).ok());
  EXPECT_EQ(shared.store->ReadEvents(kTenant, shared.cache_id, position, 1).status().code(),
            StatusCode::kNotFound);
}

// Random operations on a store whose pool is too small for its prompts.
class EventsModel {
 public:
  EventsModel(uint64_t seed, size_t log_events) : random_(seed) {
    options_ = SmallOptions();
    options_.retain = true;
    options_.evict_idle_after = absl::ZeroDuration();
    options_.event_log_events = log_events;
    options_.keeper = &keeper_;
    spec_ = SmallSpec();
    spec_.capacity_bytes = size_t{4} << 20;
    for (int i = 0; i < 6; ++i) {
      // Prompts with beginnings in common.
      std::mt19937_64 family(seed + static_cast<uint64_t>(i) / 3);
      prompts_.push_back(RandomIds(family, 1000));
      std::fill(prompts_.back().begin() + 150 * i, prompts_.back().end(), 60'000 + i);
    }
    Restart();
  }

  void Run(int steps) {
    for (int step = 0; step < steps && !::testing::Test::HasFatalFailure(); ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      Step();
      if (Random(3) == 0) pictures_[Random(2)].Reconnect();
      if (Random(3) == 0) Compare(pictures_[Random(2)]);
    }
  }
  int clears() const { return pictures_[0].clears() + pictures_[1].clears(); }
  uint64_t evicted() const { return evicted_ + store_->Stats(kAllTenants).evicted_sequences; }

 private:
  uint32_t Random(size_t below) { return static_cast<uint32_t>(random_() % below); }

  void Restart() {
    if (store_ != nullptr) evicted_ = evicted();
    store_.reset();
    auto store = Store::Create(options_);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    Open();
  }
  void Open() {
    const auto cache = store_->OpenCache(kTenant, spec_);
    ASSERT_TRUE(cache.ok()) << cache.status();
    cache_id_ = cache->cache_id;
  }

  void Step() {
    const uint32_t dice = Random(200);
    if (dice == 0) return Restart();
    if (dice == 1) {
      ASSERT_TRUE(store_->EraseTenant(kTenant, absl::ZeroDuration()).ok());
      ids_.clear();
      return;
    }
    if (dice == 2) {
      ASSERT_TRUE(store_->DropCache(kTenant, cache_id_, /*force=*/true).ok());
      ids_.clear();
      return Open();
    }
    if (ids_.empty() || dice < 70) return Create();
    const size_t at = Random(ids_.size());
    if (dice < 110) {
      (void)store_->TruncateSequence(kTenant, ids_[at], Random(500));
    } else if (dice < 140) {
      const auto fork = store_->ForkSequence(kTenant, ids_[at], 0, "session");
      if (fork.ok()) ids_.push_back(fork->sequence_id);
    } else {
      (void)store_->DropSequence(kTenant, ids_[at]);
      ids_.erase(ids_.begin() + static_cast<ptrdiff_t>(at));
    }
  }

  void Create() {
    const std::vector<uint32_t>& prompt = prompts_[Random(prompts_.size())];
    const auto made = store_->CreateSequence(
        kTenant, cache_id_, {.session = "session", .token_ids = prompt, .live_index = {}});
    ASSERT_TRUE(made.ok()) << made.status();
    const size_t end = std::max<size_t>(made->token_count, Random(prompt.size()));
    const Content content = ContentOf(std::span(prompt).first(end));
    const auto stored =
        IngestContent(*store_, made->sequence_id, spec_.groups[0], made->token_count,
                      std::span(content).subspan(made->token_count));
    if (stored.ok() && ids_.size() < 3) {
      ids_.push_back(made->sequence_id);
    } else {
      ASSERT_TRUE(store_->DropSequence(kTenant, made->sequence_id).ok());
    }
  }

  void Compare(Picture& picture) {
    picture.ReadAll(*store_, cache_id_, 1 + Random(9));
    std::set<PrefixKey> present;
    for (const std::vector<uint32_t>& prompt : prompts_) {
      const std::vector<PrefixKey> chain = Chain(*store_, cache_id_, prompt);
      const auto matched = store_->MatchPrefix(kTenant, cache_id_, prompt, "");
      ASSERT_TRUE(matched.ok()) << matched.status();
      ASSERT_EQ(picture.Match(chain), *matched);
      const size_t steps = *matched / kBlockTokens;
      present.insert(chain.begin() + 1, chain.begin() + 1 + static_cast<ptrdiff_t>(steps));
    }
    ASSERT_EQ(picture.size(), present.size());
  }

  std::mt19937_64 random_;
  MemoryKeeper keeper_;
  StoreOptions options_;
  CacheSpec spec_;
  std::vector<std::vector<uint32_t>> prompts_;
  std::unique_ptr<Store> store_;
  uint64_t cache_id_ = 0;
  std::vector<uint64_t> ids_;
  Picture pictures_[2];
  uint64_t evicted_ = 0;  // by earlier stores
};

TEST(CacheEvents, PicturesEqualMatchPrefixUnderRandomOperations) {
  EventsModel model(/*seed=*/3, /*log_events=*/10'000);
  model.Run(1500);
  EXPECT_GT(model.evicted(), 0u);
}

TEST(CacheEvents, PicturesEqualMatchPrefixWhenTheLogIsOftenFull) {
  EventsModel model(/*seed=*/4, /*log_events=*/3);
  model.Run(1500);
  EXPECT_GT(model.clears(), 50);
}

TEST(CacheEvents, AreCompleteWhileOtherThreadsStoreAndDrop) {
  StoreOptions options = SmallOptions();
  options.event_log_events = 5;
  CacheSpec spec = SmallSpec();
  spec.capacity_bytes = size_t{64} << 20;
  SharingStore shared(spec, options);
  std::mt19937_64 random(7);
  const std::vector<uint32_t> ids = RandomIds(random, 900);
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 own(seed);
      for (int round = 0; round < 30; ++round) {
        const CreatedSequence made = shared.Create(ids);
        const size_t end = std::max<size_t>(made.token_count, own() % ids.size());
        const Content content = ContentOf(std::span(ids).first(end));
        (void)IngestContent(*shared.store, made.sequence_id, shared.group, made.token_count,
                            std::span(content).subspan(made.token_count));
        (void)shared.store->TruncateSequence(kTenant, made.sequence_id, own() % (end + 1));
        if (round + 1 < 30 || seed > 0) {
          ASSERT_TRUE(shared.store->DropSequence(kTenant, made.sequence_id).ok());
        }
      }
    });
  }
  Picture picture;
  for (int i = 0; i < 200; ++i) picture.ReadAll(*shared.store, shared.cache_id, 1);
  for (std::thread& thread : threads) thread.join();
  picture.ReadAll(*shared.store, shared.cache_id, 1);
  EXPECT_EQ(picture.Match(Chain(*shared.store, shared.cache_id, ids)), shared.Match(ids));
  EXPECT_EQ(picture.size() * kBlockTokens, shared.Match(ids));
}

}  // namespace
}  // namespace pqcached::kvstore
