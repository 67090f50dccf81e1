// Several tenants in pools that are too small, against a plain model: random operations, every byte
// compared. What is leased, pinned or being written never goes; what went says so; nothing leaks.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <optional>
#include <thread>

#include "tests/kvstore/evict/pressure_fixture.h"

namespace pqcached::kvstore {
namespace {

using testing::Content;
using testing::ContentOf;
using testing::ContentRows;
using testing::kSegmentBytes;
using testing::Pq;
using testing::Prompt;

// tests/long.sh models goes on for much longer.
const bool kFull = std::getenv("PQCACHED_FULL_TESTS") != nullptr;
const int kSteps = kFull ? 60'000 : 2'500;
const int kRounds = kFull ? 600 : 20;
constexpr size_t kPoolSegments = 16;
constexpr char kSession[] = "session";
constexpr const char* kTenants[] = {"sure", "other"};
// Guaranteed to the first tenant beside the cache that it has.
constexpr size_t kSureSegments = 8;

struct Modelled {
  uint64_t id = 0;
  std::vector<uint32_t> ids;
  size_t stored = 0;
  uint64_t lease_id = 0;
  bool pinned = false;
  std::unique_ptr<IngestTransaction> ingest = nullptr;

  bool safe() const { return lease_id != 0 || pinned || ingest != nullptr; }
};

StoreOptions ModelOptions(EvictionPolicy policy) {
  StoreOptions options = testing::PressureOptions();
  options.eviction_policy = policy;
  options.evict_idle_after = absl::Nanoseconds(1);
  options.max_sequences = 12;
  options.max_pool_bytes = (2 * kPoolSegments + kSureSegments + 4) * kSegmentBytes;
  options.tenant_quotas.by_tenant["sure"] = {.guaranteed_bytes =
                                                 (kPoolSegments + kSureSegments) * kSegmentBytes};
  return options;
}

class PressureModel {
 public:
  PressureModel(uint64_t seed, EvictionPolicy policy)
      : random_(seed), store_(*Store::Create(ModelOptions(policy))) {
    EXPECT_TRUE(store_->OpenLocalSession("tenant", kSession, 1).ok());
    for (const std::string tenant : kTenants) {
      const auto cache = store_->OpenCache(tenant, testing::PoolOf(kPoolSegments));
      EXPECT_TRUE(cache.ok()) << cache.status();
      cache_ids_[tenant] = cache->cache_id;
    }
  }

  void Run(int steps) {
    for (int step = 0; step < steps && !::testing::Test::HasFatalFailure(); ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      tenant_ = kTenants[Random(2)];
      Step();
    }
    ::testing::Test::RecordProperty("model_test_operations", steps);
    // The guarantee has held, whatever others opened meanwhile.
    CacheSpec spec = testing::PoolOf(kSureSegments);
    spec.name = "guaranteed";
    EXPECT_TRUE(store_->OpenCache("sure", spec).ok());
    for (const std::string tenant : kTenants) {
      tenant_ = tenant;
      while (!all().empty()) Drop(Random(all().size()));
      const auto left = store_->ListSequences(tenant, cache_ids_[tenant]);
      for (const SequenceInfo& info : *left) {
        EXPECT_TRUE(info.is_cached_prefix);
        EXPECT_TRUE(store_->PinSequence("", info.sequence_id, absl::ZeroDuration()).ok());
        EXPECT_TRUE(store_->EvictSequence(kAllTenants, info.sequence_id).ok());
      }
    }
    for (const CacheInfo& cache : store_->ListCaches("")) {
      EXPECT_EQ(cache.used_bytes, 0u) << cache.tenant << " " << cache.spec.name;
      EXPECT_EQ(cache.largest_free_bytes, std::bit_floor(cache.capacity_bytes));
    }
    EXPECT_GT(refused_, 0) << "the pools were never full";
    EXPECT_GT(evicted_, 0) << "nothing was ever evicted";
    EXPECT_GT(store_->Stats(kAllTenants).matched_tokens, 0u);
  }

 private:
  uint32_t Random(size_t below) { return static_cast<uint32_t>(random_() % below); }
  std::vector<Modelled>& all() { return all_[tenant_]; }
  const LayerGroup& group() const { return group_; }
  Content ContentBelow(const Modelled& one, size_t end) const {
    return ContentOf(std::span(one.ids).first(end));
  }

  void Step() {
    if (all().empty()) return Create();
    const size_t i = Random(all().size());
    const uint32_t dice = Random(100);
    if (dice < 15) return Create();
    if (dice < 50) return Grow(i);
    if (dice < 60) return Drop(i);
    if (dice < 66) return Truncate(i);
    if (dice < 70) return Pin(i);
    if (dice < 76) return Lease(i);
    if (dice < 80) return Ingest(i);
    if (dice < 84) return Build(i);
    if (dice < 88) return Evict(i);
    if (dice < 90) return Open();
    Read(i);
  }

  // What happened to a call on a sequence: false when it has gone, which it may have unless it is safe.
  bool Survived(size_t i, const absl::Status& status) {
    if (status.code() != absl::StatusCode::kNotFound) return true;
    EXPECT_FALSE(all()[i].safe()) << status;
    EXPECT_NE(status.message().find("was evicted"), absl::string_view::npos) << status;
    ++evicted_;
    all().erase(all().begin() + static_cast<ptrdiff_t>(i));
    return false;
  }

  void Create() {
    if (all().size() >= 8) return Drop(Random(all().size()));
    Modelled made{.ids = Prompt(Random(3), 900, 256, 1 + Random(4))};
    made.ids.resize(128 + Random(made.ids.size() - 128));
    const auto created = store_->CreateSequence(
        tenant_, cache_ids_[tenant_],
        {.session = kSession, .token_ids = made.ids, .extra_key = {}, .live_index = {}});
    if (absl::IsResourceExhausted(created.status())) return UnpinRetained();
    ASSERT_TRUE(created.ok()) << created.status();
    made.id = created->sequence_id;
    made.stored = created->token_count;
    ASSERT_LE(made.stored, made.ids.size());
    all().push_back(std::move(made));
    Read(all().size() - 1);
  }

  // What was pinned when its sequence ended has filled max_sequences.
  void UnpinRetained() {
    const auto sequences = store_->ListSequences(tenant_, cache_ids_[tenant_]);
    int unpinned = 0;
    for (const SequenceInfo& info : *sequences) {
      if (!info.is_cached_prefix || info.pin_left == absl::ZeroDuration()) continue;
      ASSERT_TRUE(store_->PinSequence("", info.sequence_id, absl::ZeroDuration()).ok());
      ++unpinned;
    }
    ASSERT_GT(unpinned, 0) << "nothing keeps a retained sequence from making room";
  }

  void Grow(size_t i) {
    Modelled& one = all()[i];
    const size_t end = std::min(one.ids.size(), one.stored + 1 + Random(300));
    if (end == one.stored) return Read(i);
    const Content content = ContentBelow(one, end);
    const ContentRows rows(std::span<const uint64_t>(content).subspan(one.stored), group());
    const auto count = store_->Append(tenant_, one.id, one.stored, rows.layers);
    if (count.ok()) {
      one.stored = end;
      ASSERT_EQ(*count, end);
    } else if (absl::IsResourceExhausted(count.status())) {
      ++refused_;
      ASSERT_NE(count.status().message().find("bytes short"), absl::string_view::npos);
    } else if (absl::IsAborted(count.status())) {
      ASSERT_NE(one.ingest, nullptr);
    } else {
      ASSERT_FALSE(Survived(i, count.status()));
    }
  }

  void Truncate(size_t i) {
    Modelled& one = all()[i];
    if (one.ingest != nullptr) return;
    const size_t kept = one.stored - Random(std::min<size_t>(one.stored, 200) + 1);
    const auto count = store_->TruncateSequence(tenant_, one.id, kept, one.lease_id);
    if (!count.ok()) {
      ASSERT_FALSE(Survived(i, count.status())) << count.status();
      return;
    }
    if (kept < one.stored) {  // names went, too
      ASSERT_TRUE(store_->NameTokens(tenant_, one.id, kept, std::span(one.ids).subspan(kept)).ok());
    }
    one.stored = kept;
  }

  // Half of the pinned ones are let go of by their ends, which must keep what they retain.
  void Pin(size_t i) {
    Modelled& one = all()[i];
    const absl::Duration ttl = one.pinned ? absl::ZeroDuration() : absl::Hours(1);
    const absl::Status status = store_->PinSequence(tenant_, one.id, ttl);
    if (!Survived(i, status)) return;
    ASSERT_TRUE(status.ok()) << status;
    one.pinned = !one.pinned;
  }

  void Lease(size_t i) {
    Modelled& one = all()[i];
    if (one.lease_id != 0) {
      ASSERT_TRUE(store_->Detach(kSession, one.lease_id).ok());
      one.lease_id = 0;
      return;
    }
    const auto attached = store_->Attach(tenant_, one.id, kSession, {});
    if (!Survived(i, attached.status())) return;
    ASSERT_TRUE(attached.ok()) << attached.status();
    one.lease_id = attached->lease_id;
  }

  void Ingest(size_t i) {
    Modelled& one = all()[i];
    if (one.ingest != nullptr) {
      one.ingest.reset();
      return;
    }
    auto ingest = store_->BeginIngest(tenant_, one.id);
    if (!Survived(i, ingest.status())) return;
    ASSERT_TRUE(ingest.ok()) << ingest.status();
    one.ingest = *std::move(ingest);
  }

  void Build(size_t i) {
    Modelled& one = all()[i];
    if (one.stored == 0 || one.ingest != nullptr) return;
    const absl::Status status =
        store_->BuildIndex(tenant_, one.id, {.index = Pq(2, 4), .iterations = 1}, {});
    if (absl::IsResourceExhausted(status)) ++refused_;
    if (status.ok() || absl::IsAlreadyExists(status) || absl::IsResourceExhausted(status)) return;
    ASSERT_FALSE(Survived(i, status)) << status;
  }

  void Evict(size_t i) {
    Modelled& one = all()[i];
    const absl::Status status = store_->EvictSequence(kAllTenants, one.id);
    if (one.safe()) {
      ASSERT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      return;
    }
    ASSERT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
    all().erase(all().begin() + static_cast<ptrdiff_t>(i));
  }

  // Others take what is left, and never more.
  void Open() {
    CacheSpec spec = testing::PoolOf(1);
    spec.name = "more" + std::to_string(opened_);
    const auto cache = store_->OpenCache("greedy", spec);
    if (cache.ok()) ++opened_;
    ASSERT_EQ(cache.ok() || opened_ == 4, true) << cache.status();
    ASSERT_LE(opened_, 4u);
  }

  void Read(size_t i) {
    const Modelled& one = all()[i];
    if (one.stored == 0) return;
    const Content content = ContentBelow(one, one.stored);
    const size_t begin = Random(one.stored);
    for (const uint32_t layer : group().layers) {
      const auto rows =
          store_->FetchBlocks(tenant_, one.id, layer, {begin, one.stored}, RowPart::kRow);
      if (!Survived(i, rows.status())) return;
      ASSERT_TRUE(rows.ok()) << rows.status();
      ASSERT_TRUE(testing::ToFloats(*rows) ==
                  testing::RowsOf(std::span(content).subspan(begin), group(), layer));
    }
  }

  void Drop(size_t i) {
    Modelled& one = all()[i];
    if (one.lease_id != 0) {
      ASSERT_TRUE(store_->Detach(kSession, one.lease_id).ok());
      one.lease_id = 0;
    }
    one.ingest.reset();
    const absl::Status status = store_->DropSequence(tenant_, one.id);
    if (!Survived(i, status)) return;
    ASSERT_TRUE(status.ok()) << status;
    const auto matched = store_->MatchPrefix(tenant_, cache_ids_[tenant_], one.ids, "");
    ASSERT_TRUE(matched.ok());
    ASSERT_LE(*matched, one.ids.size());
    all().erase(all().begin() + static_cast<ptrdiff_t>(i));
  }

  std::mt19937_64 random_;
  std::unique_ptr<Store> store_;
  const LayerGroup group_ = testing::PoolOf(1).groups[0];
  std::string tenant_;
  std::map<std::string, uint64_t> cache_ids_;
  std::map<std::string, std::vector<Modelled>> all_;
  uint32_t opened_ = 0;
  int refused_ = 0;
  int evicted_ = 0;
};

TEST(PressureModel, ReadsAreNeverWrongAndNobodySafeEverGoes) {
  PressureModel(31, EvictionPolicy::kLru).Run(kSteps);
}

TEST(PressureModel, NorUnderTheOtherPolicy) {
  PressureModel(32, EvictionPolicy::kReuse).Run(kSteps);
}

// Each thread serves requests of its own, while all of them need each other's memory.
TEST(PressureModel, ThreadsThatCompeteForMemoryReadTheirOwnRows) {
  StoreOptions options = ModelOptions(EvictionPolicy::kReuse);
  options.evict_idle_after = absl::Hours(1);
  options.tenant_quotas.by_tenant.clear();
  options.max_sequences = 64;
  testing::PressureStore shared(24, options);
  std::atomic<int> served = 0;
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(thread);
      for (int round = 0; round < kRounds; ++round) {
        std::vector<uint32_t> ids = Prompt(static_cast<uint32_t>(random() % 2), 700, 256,
                                           1 + static_cast<uint32_t>(random() % 3));
        ids.resize(200 + random() % 500);
        const Content content = ContentOf(ids);
        const CreatedSequence made = shared.Create(ids);
        testing::ExpectContent(*shared.store, made.sequence_id, shared.group,
                               std::span(content).first(made.token_count));
        const auto rest = std::span(content).subspan(made.token_count);
        absl::Status status;
        if (!rest.empty()) {
          status = testing::IngestContent(*shared.store, made.sequence_id, shared.group,
                                          made.token_count, rest)
                       .status();
        }
        ASSERT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
        if (status.ok()) {
          testing::ExpectContent(*shared.store, made.sequence_id, shared.group, content);
          ++served;
        }
        shared.Drop(made.sequence_id);
        if (random() % 8 == 0) {
          for (const SequenceInfo& info : shared.Retained()) {
            shared.store->EvictSequence(kAllTenants, info.sequence_id)
                .IgnoreError();  // others do, too
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  RecordProperty("model_test_operations", static_cast<int>(threads.size()) * kRounds);
  EXPECT_GT(served, kRounds);
  for (const SequenceInfo& info : shared.Retained()) {
    EXPECT_TRUE(shared.store->EvictSequence(kAllTenants, info.sequence_id).ok());
  }
  EXPECT_EQ(shared.used_bytes(), 0u);
}

}  // namespace
}  // namespace pqcached::kvstore
