#include "kvstore/sequence/stored_sequences.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "kvstore/model.h"
#include "tests/kvstore/cache_parts.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using testing::CacheParts;
using testing::SmallOptions;
using testing::SmallSpec;

constexpr uint32_t kMany = 1000;

class StoredSequencesTest : public ::testing::Test {
 protected:
  std::shared_ptr<const Cache> CacheOf(uint64_t id, const std::string& tenant,
                                       const decltype(CacheSpec::rank)& rank = {}) {
    CacheSpec spec = SmallSpec();
    spec.rank = rank;
    return std::make_shared<const Cache>(id, tenant, spec, nullptr, parts_.shared());
  }

  void Add(const std::shared_ptr<const Cache>& cache, uint64_t id, const std::string& session) {
    ASSERT_TRUE(sequences_.Reserve(cache->cache_id, kMany).ok());
    sequences_.Add({cache, std::make_shared<Sequence>(id, session, cache->layers.size())});
  }

  static std::vector<uint64_t> Ids(const std::vector<StoredSequence>& found) {
    std::vector<uint64_t> ids;
    for (const StoredSequence& one : found) ids.push_back(one.sequence->sequence_id());
    std::sort(ids.begin(), ids.end());
    return ids;
  }

  CacheParts parts_{SmallOptions(), 1};
  const std::shared_ptr<const Cache> a_ = CacheOf(1, "a");
  const std::shared_ptr<const Cache> b_ = CacheOf(2, "b");
  StoredSequences sequences_;
};

TEST_F(StoredSequencesTest, AreReservedUpToTheLimit) {
  ASSERT_TRUE(sequences_.Reserve(1, 2).ok());
  ASSERT_TRUE(sequences_.Reserve(1, 2).ok());
  const absl::Status full = sequences_.Reserve(1, 2);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(FieldOf(full), "max_sequences");
  EXPECT_EQ(RetryMsOf(full), kRetryMemory);
  EXPECT_TRUE(sequences_.Reserve(2, 2).ok());  // another cache
  EXPECT_EQ(sequences_.CountOfCache(1), 2u);
  sequences_.Cancel(1);
  EXPECT_TRUE(sequences_.Reserve(1, 2).ok());
}

TEST_F(StoredSequencesTest, AreFoundByTheirTenantOnly) {
  Add(a_, 7, "session");
  EXPECT_TRUE(sequences_.Find("a", 7).ok());
  EXPECT_TRUE(sequences_.FindInAnyTenant(7).ok());
  for (const char* tenant : {"b", ""}) {
    const absl::Status status = sequences_.Find(tenant, 7).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(FieldOf(status), "sequence_id");
  }
}

TEST_F(StoredSequencesTest, RemovedOnesAreNotFoundAndNotCounted) {
  Add(a_, 7, "session");
  Add(a_, 8, "session");
  sequences_.Remove(7);
  sequences_.Remove(7);
  EXPECT_EQ(sequences_.CountOfCache(1), 1u);
  sequences_.RemoveEvicted(8);
  EXPECT_EQ(sequences_.CountOfCache(1), 0u);
  const absl::Status removed = sequences_.Find("a", 7).status();
  const absl::Status evicted = sequences_.Find("a", 8).status();
  EXPECT_EQ(removed.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(evicted.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(removed.message().find("evicted"), std::string_view::npos) << removed;
  EXPECT_NE(evicted.message().find("evicted"), std::string_view::npos) << evicted;
}

TEST_F(StoredSequencesTest, AnotherTenantReceivesOneAnswerForAll) {
  Add(a_, 7, "session");
  Add(a_, 8, "session");
  sequences_.RemoveEvicted(8);
  for (const uint64_t id : {7, 8, 9}) {
    EXPECT_EQ(sequences_.Find("b", id).status().message(),
              absl::StrCat("sequence_id: no sequence ", id));
  }
  EXPECT_NE(sequences_.FindInAnyTenant(8).status().message().find("evicted"),
            std::string_view::npos);
}

TEST_F(StoredSequencesTest, AreListedByCacheSessionAndRank) {
  Add(a_, 1, "one");
  Add(a_, 2, "two");
  Add(a_, 3, "");  // retained
  Add(b_, 4, "one");
  const auto rank0 = CacheOf(5, "a", {.group = "g", .rank = 0, .rank_count = 2});
  const auto rank1 = CacheOf(6, "a", {.group = "g", .rank = 1, .rank_count = 2});
  const auto other = CacheOf(7, "b", {.group = "g", .rank = 1, .rank_count = 2});
  Add(rank0, 5, "three");
  Add(rank1, 6, "three");
  Add(other, 7, "three");
  using Expected = std::vector<uint64_t>;
  EXPECT_EQ(Ids(sequences_.OfCache(1)), (Expected{1, 2, 3}));
  EXPECT_EQ(Ids(sequences_.RetainedOfCache(1)), (Expected{3}));
  EXPECT_EQ(Ids(sequences_.OfSession("one")), (Expected{1, 4}));
  EXPECT_EQ(Ids(sequences_.OfOtherRanks(*rank0)), (Expected{6}));
  EXPECT_TRUE(sequences_.OfOtherRanks(*a_).empty());
  EXPECT_EQ(sequences_.All().size(), 7u);
}

TEST_F(StoredSequencesTest, AreChangedByManyThreads) {
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (uint64_t i = 0; i < 300; ++i) {
        const uint64_t id = 1 + t * 1000 + i;
        Add(t % 2 == 0 ? a_ : b_, id, "session");
        EXPECT_TRUE(sequences_.FindInAnyTenant(id).ok());
        EXPECT_LE(sequences_.OfSession("session").size(), 4u);
        i % 2 == 0 ? sequences_.Remove(id) : sequences_.RemoveEvicted(id);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(sequences_.All().empty());
  EXPECT_EQ(sequences_.CountOfCache(1) + sequences_.CountOfCache(2), 0u);
}

}  // namespace
}  // namespace pqcached::kvstore
