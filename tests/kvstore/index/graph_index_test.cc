// Sequences with an index of graphs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvstore/clock.h"
#include "kvstore/read/indexes/index_types.h"
#include "tests/kvstore/fixture.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::MemoryKeeper;
using testing::RandomFloats;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;

constexpr uint32_t kTokens = 4096, kSegment = 2048, kQueryHeads = 4, kKeyDim = 32;
// Wanted tokens of a query that walks: the smaller, the less is scanned.
constexpr uint64_t kFew = 32;

IndexDescriptor Graph(uint32_t samples = 256) {
  IndexDescriptor index;
  const Refusal refusal = MakeIndex("graph",
                                    {{{.name = "list_size", .value_name = {}, .number = 32},
                                      {.name = "samples", .value_name = {}, .number = samples}}},
                                    "index", &index);
  EXPECT_TRUE(refusal.ok()) << refusal.message();
  return index;
}

StoreOptions GraphOptions() {
  StoreOptions options = SmallOptions();
  options.segment_tokens = kSegment;
  options.codebook_tokens = 2 * kSegment;
  return options;
}

CacheSpec GraphSpec() {
  CacheSpec spec = SmallSpec();
  spec.capacity_bytes = size_t{256} << 20;
  return spec;
}

// Adds random queries of every 8th token to all layers.
void AddSamples(Store& store, uint64_t id, uint32_t tokens, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> positions;
  for (uint32_t i = 0; i < tokens; i += 8) positions.push_back(i);
  auto ingest = store.BeginIngest(kTenant, id);
  ASSERT_TRUE(ingest.ok()) << ingest.status();
  for (const uint32_t layer : {1u, 3u}) {
    const Floats queries = RandomFloats(random, {positions.size(), kQueryHeads, kKeyDim});
    const absl::Status added =
        (*ingest)->AddSamples({.layer = layer, .positions = positions, .queries = queries.view()});
    ASSERT_TRUE(added.ok()) << added;
  }
  ASSERT_TRUE((*ingest)->Commit().ok());
}

std::vector<uint32_t> Select(Store& store, uint64_t id, const Floats& query, uint64_t position,
                             const Selection& selection) {
  const auto selected = store.TopK(
      kTenant, id, {.layer = 1, .query_position = position, .queries = query.view()}, selection);
  EXPECT_TRUE(selected.ok()) << selected.status();
  return selected.ok() ? selected->positions : std::vector<uint32_t>();
}

Selection Few(const IndexDescriptor& index, GroupRule rule, bool per_query_head) {
  return {.index = index,
          .group_rule = rule,
          .per_query_head = per_query_head,
          .budget_kind = BudgetKind::kCount,
          .budget_count = kFew};
}

struct Found {
  double recall = 0;
  uint32_t exact_queries = 0;  // whose tokens are exactly the best ones
};

// Compares the tokens from `begin` on of 40 random queries with the best ones.
Found Compare(Store& store, uint64_t id, uint32_t tokens, const IndexDescriptor& index,
              GroupRule rule = GroupRule::kSumSoftmax, bool per_query_head = true,
              uint32_t begin = 0) {
  std::mt19937_64 random(99);
  Found found;
  constexpr int kQueries = 40;
  for (int i = 0; i < kQueries; ++i) {
    const Floats query = RandomFloats(random, {1, kQueryHeads, kKeyDim});
    const auto by = [&](const IndexDescriptor& by_index) {
      Selection selection = Few(by_index, rule, per_query_head);
      if (begin > 0) selection.excluded = {{0, begin}};
      return Select(store, id, query, tokens - 1, selection);
    };
    const std::vector<uint32_t> graph = by(index), best = by({});
    const size_t sets = per_query_head ? kQueryHeads : 2;
    EXPECT_EQ(graph.size(), sets * kFew);
    if (graph.size() != best.size()) return found;
    size_t hits = 0;
    for (size_t set = 0; set < sets; ++set) {
      const auto first = graph.begin() + static_cast<ptrdiff_t>(set * kFew);
      EXPECT_TRUE(std::is_sorted(first, first + kFew, std::less_equal<>()));
      for (size_t j = 0; j < kFew; ++j) {
        hits += std::binary_search(first, first + kFew, best[set * kFew + j]) ? 1 : 0;
      }
    }
    found.recall += static_cast<double>(hits) / static_cast<double>(sets * kFew) / kQueries;
    found.exact_queries += hits == sets * kFew ? 1 : 0;
  }
  return found;
}

// Most of the best tokens are found, but not all of them: keys were left out.
void ExpectWalks(const Found& found) {
  EXPECT_GT(found.recall, 0.8);
  EXPECT_LT(found.exact_queries, 40u);
}

TEST(GraphIndex, FindsMostOfTheBestTokens) {
  TestSequence sequence(GraphSpec(), GraphOptions());
  sequence.Ingest(kTokens);
  AddSamples(sequence.store(), sequence.id(), kTokens, 5);
  sequence.Build(Graph());
  for (const bool per_query_head : {false, true}) {
    for (const GroupRule rule :
         {GroupRule::kSumSoftmax, GroupRule::kMaxLogit, GroupRule::kMeanLogit}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(rule) << per_query_head);
      ExpectWalks(Compare(sequence.store(), sequence.id(), kTokens, Graph(), rule, per_query_head));
    }
  }
}

// Of many tokens, all keys are scored.
TEST(GraphIndex, IsExactWhereManyTokensAreWanted) {
  TestSequence sequence(GraphSpec(), GraphOptions());
  sequence.Ingest(kTokens);
  AddSamples(sequence.store(), sequence.id(), kTokens, 5);
  sequence.Build(Graph());
  const Floats query = sequence.RandomQuery(sequence.layer(1));
  Selection selection = Few(Graph(), GroupRule::kSumSoftmax, false);
  selection.budget_count = kTokens / 4;
  Selection exact = selection;
  exact.index = {};
  EXPECT_EQ(Select(sequence.store(), sequence.id(), query, kTokens - 1, selection),
            Select(sequence.store(), sequence.id(), query, kTokens - 1, exact));
}

TEST(GraphIndex, NeedsQuerySamples) {
  TestSequence sequence(GraphSpec(), GraphOptions());
  sequence.Ingest(kSegment);
  const absl::Status refused =
      sequence.store().BuildIndex(kTenant, sequence.id(), {.index = Graph()}, {});
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(refused.message(), ::testing::HasSubstr("samples"));
}

// Rows that no graph has, after the build and after a truncation, are candidates as all others.
TEST(GraphIndex, RowsWithoutAGraphAreFound) {
  TestSequence sequence(GraphSpec(), GraphOptions());
  sequence.Ingest(kTokens);
  AddSamples(sequence.store(), sequence.id(), kTokens, 5);
  sequence.Build(Graph());
  for (int i = 0; i < 3; ++i) sequence.Append(90);
  const uint32_t tokens = sequence.tokens();
  const LayerModel& model = sequence.layer(1);
  const auto find = [&](uint32_t position, uint32_t stored) {
    // A query that is the key of the token itself, in all heads.
    Floats query{.shape = {1, kQueryHeads, kKeyDim}, .data = {}};
    for (uint32_t head = 0; head < kQueryHeads; ++head) {
      const float* const key = model.key(position, head / 2);
      for (uint32_t i = 0; i < kKeyDim; ++i) query.data.push_back(4 * key[i]);
    }
    const auto positions = Select(sequence.store(), sequence.id(), query, stored - 1,
                                  Few(Graph(), GroupRule::kMaxLogit, false));
    EXPECT_LT(*std::max_element(positions.begin(), positions.end()), stored);
    return std::count(positions.begin(), positions.end(), position);
  };
  EXPECT_EQ(find(tokens - 1, tokens), 2);
  EXPECT_EQ(find(kTokens + 5, tokens), 2);
  sequence.Truncate(3000);
  EXPECT_EQ(find(2999, 3000), 2);
  sequence.Append(50);
  EXPECT_EQ(find(3049, 3050), 2);
}

TEST(GraphIndex, SinksWindowsAndExcludedTokensAreLeftOut) {
  TestSequence sequence(GraphSpec(), GraphOptions());
  sequence.Ingest(kTokens);
  AddSamples(sequence.store(), sequence.id(), kTokens, 5);
  sequence.Build(Graph(), 4, /*sink_tokens=*/16);
  for (const ExcludedRanges& excluded :
       {ExcludedRanges{{16, 500}}, ExcludedRanges{{100, 1900}, {2500, 2510}}}) {
    Selection selection = Few(Graph(), GroupRule::kSumSoftmax, false);
    selection.sink_tokens = 16;
    selection.window_tokens = 64;
    selection.budget_count += 16 + 64;
    selection.excluded = excluded;
    for (int i = 0; i < 20; ++i) {
      const Floats query = sequence.RandomQuery(sequence.layer(1));
      for (const uint32_t position :
           Select(sequence.store(), sequence.id(), query, kTokens - 1, selection)) {
        EXPECT_GE(position, 16u);
        EXPECT_LT(position, kTokens - 64);
        for (const PositionRange& range : excluded) {
          EXPECT_FALSE(position >= range.begin && position < range.end) << position;
        }
      }
    }
  }
}

// The graphs, and the samples that later graphs need, outlive the process.
TEST(GraphIndex, OutlivesTheProcess) {
  MemoryKeeper keeper;
  StoreOptions options = GraphOptions();
  options.keeper = &keeper;
  uint64_t id = 0;
  Found before;
  {
    TestSequence sequence(GraphSpec(), options);
    sequence.Ingest(kTokens);
    AddSamples(sequence.store(), sequence.id(), kTokens, 5);
    sequence.Build(Graph());
    id = sequence.id();
    before = Compare(sequence.store(), id, kTokens, Graph());
    ExpectWalks(before);
  }
  const auto store = Store::Create(options);
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE((*store)->WaitIdle(SteadyTime::InfiniteFuture()));
  const Found after = Compare(**store, id, kTokens, Graph());
  EXPECT_EQ(after.recall, before.recall);
  EXPECT_EQ(after.exact_queries, before.exact_queries);
}

// Segments of a prompt get their graphs in the background, and segments of tails when they are
// merged; a fork shares them.
TEST(GraphIndex, FollowsTheRowsOfALiveSequence) {
  StoreOptions options = GraphOptions();
  options.merge_segments = 4;
  options.tail_tokens = 512;
  options.codebook_tokens = kSegment;  // the first segment's samples are those of all
  TestSequence sequence(GraphSpec(), options);
  sequence.NewSequence(
      {.session = "session", .live_index = LiveIndex{.index = Graph(), .iterations = 1}});
  Store& store = sequence.store();
  sequence.Ingest(kSegment);
  AddSamples(store, sequence.id(), kSegment, 5);
  ASSERT_TRUE(store.WaitIdle(SteadyTime::InfiniteFuture()));
  sequence.Ingest(kSegment);
  ASSERT_TRUE(store.ClosePrefill(kTenant, sequence.id()).ok());
  ASSERT_TRUE(store.WaitIdle(SteadyTime::InfiniteFuture()));
  // Of the second segment alone: it has graphs of its own.
  const auto behind = [&](uint64_t id, uint32_t tokens, uint32_t begin) {
    return Compare(store, id, tokens, Graph(), GroupRule::kSumSoftmax, true, begin);
  };
  ExpectWalks(behind(sequence.id(), kTokens, kSegment));

  const auto fork = store.ForkSequence(kTenant, sequence.id(), kTokens, "session");
  ASSERT_TRUE(fork.ok()) << fork.status();
  while (sequence.tokens() < 3 * kSegment) sequence.Append(128);
  ASSERT_TRUE(store.WaitIdle(SteadyTime::InfiniteFuture()));
  ExpectWalks(behind(sequence.id(), 3 * kSegment, 2 * kSegment));
  ExpectWalks(behind(fork->sequence_id, kTokens, kSegment));
}

// A segment of unknown length loses its unused slots when the prompt ends: its graphs are copied.
TEST(GraphIndex, IsCopiedToASmallerSegment) {
  constexpr uint32_t kPrompt = 6656, kLast = 2560;  // in the last segment
  StoreOptions options = GraphOptions();
  options.segment_tokens = 8192;
  TestSequence sequence(GraphSpec(), options);
  sequence.NewSequence(
      {.session = "session", .live_index = LiveIndex{.index = Graph(), .iterations = 1}});
  Store& store = sequence.store();
  while (sequence.tokens() < kPrompt) sequence.Ingest(256);
  AddSamples(store, sequence.id(), kPrompt, 5);
  const auto capacity = [&] {
    return store.DescribeSequence(kTenant, sequence.id())->segments.back().slot_capacity;
  };
  EXPECT_EQ(capacity(), 4096u);
  ASSERT_TRUE(store.ClosePrefill(kTenant, sequence.id()).ok());
  ASSERT_TRUE(store.WaitIdle(SteadyTime::InfiniteFuture()));
  EXPECT_EQ(capacity(), kLast);
  const Found found = Compare(store, sequence.id(), kPrompt, Graph(), GroupRule::kSumSoftmax,
                              /*per_query_head=*/true, kPrompt - kLast);
  ExpectWalks(found);
}

// A build asks between the parts of a graph whether it should end.
TEST(GraphIndex, ABuildEndsWithinAGraph) {
  TestSequence sequence(GraphSpec(), GraphOptions());
  sequence.Ingest(kTokens);
  AddSamples(sequence.store(), sequence.id(), kTokens, 5);
  std::atomic<int> calls = 0;
  BuildSpec spec{.index = Graph()};
  // Without graphs, all of the build asks some thirty times.
  spec.is_cancelled = [&] { return ++calls > 200; };
  EXPECT_EQ(sequence.store().BuildIndex(kTenant, sequence.id(), spec, {}).code(),
            absl::StatusCode::kCancelled);
  sequence.Build(Graph());
  ExpectWalks(Compare(sequence.store(), sequence.id(), kTokens, Graph()));
}

}  // namespace
}  // namespace pqcached::kvstore
