// Segments lose the slots that a short prompt does not use.
#include "kvstore/index/shrink.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kvstore/evict/pressure_fixture.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::AppendContent;
using testing::Content;
using testing::ContentOf;
using ::testing::ElementsAre;
using testing::ExpectContent;
using testing::kTenant;
using testing::Pq;
using testing::PressureOptions;
using testing::PressureStore;
using testing::Prompt;

constexpr uint32_t kSegmentTokens = 1024;

StoreOptions Options(uint32_t segment_tokens = kSegmentTokens) {
  StoreOptions options = PressureOptions();
  options.segment_tokens = segment_tokens;
  options.tail_tokens = kSegmentTokens;
  return options;
}

class Shrink : public ::testing::Test {
 protected:
  std::vector<uint32_t> Capacities(uint64_t id) { return shared_.Capacities(id); }
  static absl::Status Build(PressureStore& shared, uint64_t id, uint32_t subspaces = 2) {
    return shared.store->BuildIndex(kTenant, id, {.index = Pq(subspaces, 4), .iterations = 2}, {});
  }
  // Returns the approximate scores of all tokens.
  static std::vector<float> Scores(PressureStore& shared, uint64_t id, uint32_t tokens) {
    testing::Floats query{.shape = {1, shared.group.query_heads, shared.group.key_dim}, .data = {}};
    for (uint64_t i = 0; i < query.shape[1] * query.shape[2]; ++i) {
      query.data.push_back(static_cast<float>(i % 7) - 3);
    }
    const Query asked{
        .layer = shared.group.layers[0], .query_position = tokens - 1, .queries = query.view()};
    const auto scores = shared.store->Score(kTenant, id, asked, Pq(2, 4), {0, tokens});
    EXPECT_TRUE(scores.ok()) << scores.status();
    return scores.ok() ? scores->logits : std::vector<float>{};
  }

  PressureStore shared_{256, Options()};
};

TEST_F(Shrink, ABuildLeavesTheSlotsThatTheTokensNeed) {
  const uint64_t id = shared_.Fill(Prompt(1, 300));
  EXPECT_THAT(Capacities(id), ElementsAre(kSegmentTokens));
  ASSERT_TRUE(Build(shared_, id).ok());
  EXPECT_THAT(Capacities(id), ElementsAre(384));
  ExpectContent(*shared_.store, id, shared_.group, ContentOf(Prompt(1, 300)));
  PressureStore exact(256, Options(384));
  const uint64_t same = exact.Fill(Prompt(1, 300));
  ASSERT_TRUE(Build(exact, same).ok());
  EXPECT_EQ(Scores(shared_, id, 300), Scores(exact, same, 300));
  EXPECT_EQ(shared_.used_bytes(), exact.used_bytes());
}

TEST_F(Shrink, LittleThatIsUnusedStays) {
  const uint64_t id = shared_.Fill(Prompt(1, 870));
  ASSERT_TRUE(Build(shared_, id).ok());
  EXPECT_THAT(Capacities(id), ElementsAre(kSegmentTokens)) << "a copy has 896 slots";
}

TEST_F(Shrink, TokensAreAppendedToShortSegments) {
  const uint64_t id = shared_.Fill(Prompt(1, 300));
  ASSERT_TRUE(Build(shared_, id).ok());
  const Content content = ContentOf(Prompt(1, 500));
  for (uint32_t begin = 300; begin < 500; begin += 10) {
    ASSERT_TRUE(AppendContent(*shared_.store, id, shared_.group, begin,
                              std::span<const uint64_t>(content).subspan(begin, 10))
                    .ok());
  }
  EXPECT_THAT(Capacities(id), ElementsAre(384, 128, 128));
  ExpectContent(*shared_.store, id, shared_.group, content);
  EXPECT_EQ(Scores(shared_, id, 500).size(), Scores(shared_, id, 300).size() / 300 * 500);
}

TEST_F(Shrink, ASharedSegmentStays) {
  const uint64_t id = shared_.Fill(Prompt(1, 300));
  ASSERT_TRUE(shared_.store->ForkSequence(kTenant, id, 300, "other").ok());
  ASSERT_TRUE(Build(shared_, id).ok());
  EXPECT_THAT(Capacities(id), ElementsAre(kSegmentTokens));
}

// Cached prefixes are worth more than the unused slots of another sequence. Of 48 units of the pool,
// the prefixes have 12, the sequence 20 and its index 4; the copy would take 18.
TEST_F(Shrink, NothingIsEvictedForTheCopy) {
  PressureStore full(12, Options());
  for (uint32_t family = 2; family < 5; ++family) full.Serve(Prompt(family, 128));
  const uint64_t id = full.Fill(Prompt(1, 700));
  ASSERT_TRUE(Build(full, id).ok());
  EXPECT_EQ(full.Describe(id).segments.front().slot_capacity, kSegmentTokens);
  EXPECT_EQ(full.Retained().size(), 3u);
  PressureStore roomy(16, Options());
  const uint64_t same = roomy.Fill(Prompt(1, 700));
  ASSERT_TRUE(Build(roomy, same).ok());
  EXPECT_EQ(roomy.Describe(same).segments.front().slot_capacity, 768u);
}

TEST_F(Shrink, ALiveSequenceShrinksWhenItsPrefillHasEnded) {
  const auto created = shared_.store->CreateSequence(
      kTenant, shared_.cache_id,
      {.session = "session", .live_index = LiveIndex{.index = Pq(2, 4), .iterations = 2}});
  ASSERT_TRUE(created.ok()) << created.status();
  const uint64_t id = created->sequence_id;
  const Content content = ContentOf(Prompt(1, 320));
  const auto prefill = std::span<const uint64_t>(content).subspan(0, 300);
  ASSERT_TRUE(testing::IngestContent(*shared_.store, id, shared_.group, 0, prefill).ok());
  ASSERT_TRUE(shared_.store->ClosePrefill(kTenant, id).ok());
  ASSERT_TRUE(shared_.store->WaitIdle(SteadyTime::Now() + absl::Seconds(60)));
  EXPECT_THAT(Capacities(id), ElementsAre(384));
  ASSERT_TRUE(AppendContent(*shared_.store, id, shared_.group, 300,
                            std::span<const uint64_t>(content).subspan(300))
                  .ok());
  ASSERT_TRUE(shared_.store->WaitIdle(SteadyTime::Now() + absl::Seconds(60)));
  EXPECT_THAT(Capacities(id), ElementsAre(384, 128));
  ExpectContent(*shared_.store, id, shared_.group, content);
  EXPECT_FALSE(Scores(shared_, id, 320).empty());
}

TEST_F(Shrink, TheNextProcessFindsTheCopy) {
  testing::MemoryKeeper keeper;
  StoreOptions options = Options();
  options.keeper = &keeper;
  uint64_t id = 0;
  size_t used_bytes = 0;
  {
    PressureStore first(256, options);
    id = first.Fill(Prompt(1, 300));
    ASSERT_TRUE(Build(first, id).ok());
    used_bytes = first.used_bytes();
  }
  PressureStore next(256, options);
  EXPECT_EQ(next.store->Recovery().dropped_records, 0u);
  EXPECT_EQ(next.store->Recovery().bytes, used_bytes);
  EXPECT_EQ(next.Describe(id).segments.front().slot_capacity, 384u);
  ExpectContent(*next.store, id, next.group, ContentOf(Prompt(1, 300)));
}

}  // namespace
}  // namespace pqcached::kvstore
