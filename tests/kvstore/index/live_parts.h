// Sequences with an incremental index, and checks of their codes.
#ifndef PQCACHED_TESTS_KVSTORE_INDEX_LIVE_PARTS_H_
#define PQCACHED_TESTS_KVSTORE_INDEX_LIVE_PARTS_H_

#include <functional>
#include <utility>
#include <vector>

#include "kvstore/clock.h"
#include "tests/kvstore/brute_force.h"
#include "tests/kvstore/index/nearest.h"

namespace pqcached::kvstore::testing {

inline const IndexDescriptor kIndex = Pq(2, 4);
inline constexpr uint32_t kChunk = 256;
inline constexpr uint32_t kTail = 128;

inline StoreOptions LiveOptions() {
  StoreOptions options = SmallOptions();
  options.segment_tokens = kChunk;
  options.tail_tokens = kTail;
  options.codebook_tokens = 4 * kChunk;
  options.train_tokens = kChunk;
  options.merge_segments = 4;
  return options;
}

inline SequenceSpec Live(uint64_t seed = 7) {
  return {.session = "session",
          .live_index = LiveIndex{.index = kIndex, .iterations = 4, .seed = seed}};
}

// Keys around `center`, `spread` wide; random values.
inline void Add(TestSequence& sequence, uint32_t tokens, float center, float spread, bool append) {
  std::vector<Floats> floats;
  std::vector<LayerRows> rows;
  for (const LayerModel& model : sequence.layers()) {
    floats.push_back(sequence.RandomKeys(model, tokens));
    for (float& element : floats.back().data) element = center + spread * element;
    floats.push_back(sequence.RandomValues(model, tokens));
  }
  for (size_t i = 0; i < sequence.layers().size(); ++i) {
    rows.push_back({.layer = sequence.layers()[i].group.layers.front(),
                    .keys = floats[2 * i].view(),
                    .values = floats[2 * i + 1].view()});
  }
  if (append) {
    const auto added = sequence.store().Append(kTenant, sequence.id(), sequence.tokens(), rows);
    ASSERT_TRUE(added.ok()) << added.status();
  } else {
    auto ingest = sequence.store().BeginIngest(kTenant, sequence.id());
    ASSERT_TRUE(ingest.ok()) << ingest.status();
    for (const LayerRows& of_layer : rows) {
      ASSERT_TRUE((*ingest)->Write(sequence.tokens(), of_layer).ok());
    }
    ASSERT_TRUE((*ingest)->Commit().ok());
  }
  for (size_t i = 0; i < sequence.layers().size(); ++i) {
    sequence.layers()[i].Append(floats[2 * i], floats[2 * i + 1]);
  }
}

inline void WaitIdle(Store& store) {
  ASSERT_TRUE(store.WaitIdle(SteadyTime::Now() + absl::Minutes(2)));
}

inline SequenceInfo Describe(TestSequence& sequence) {
  auto info = sequence.store().DescribeSequence(kTenant, sequence.id());
  EXPECT_TRUE(info.ok()) << info.status();
  return *std::move(info);
}

// Calls `body` once while no work on incremental indexes of the sequence goes on: the build of
// another index pauses it.
inline void WhilePaused(TestSequence& sequence, const std::function<void()>& body) {
  bool called = false;
  const absl::Status status = sequence.store().BuildIndex(
      kTenant, sequence.id(), {.index = Pq(1, 4)}, [&](const BuildProgress&) {
        if (!called) body();
        called = true;
        return true;
      });
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(called);
}

inline absl::Status Finish(TestSequence& sequence) {
  return sequence.store().BuildIndex(kTenant, sequence.id(), {.index = kIndex}, {});
}

// Every segment is coded by one codebook, with the nearest of its centroids.
inline void ExpectCoded(TestSequence& sequence) {
  const SequenceInfo info = Describe(sequence);
  EXPECT_TRUE(info.live_index.ok()) << info.live_index;
  for (const LayerModel& model : sequence.layers()) {
    const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, kIndex);
    for (const SegmentInfo& segment : info.segments) {
      const PositionRange range{static_cast<uint32_t>(segment.tokens.begin),
                                static_cast<uint32_t>(segment.tokens.end)};
      ExpectNearest(model, kIndex, decoded, range, range);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

// TopK gives what brute force finds among the decoded keys.
inline void ExpectSelects(TestSequence& sequence, const IndexDescriptor& index = kIndex) {
  const LayerModel& model = sequence.layer(3);
  const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, index);
  std::vector<uint32_t> candidates;
  for (uint32_t token = 4; token + 8 < model.tokens; ++token) candidates.push_back(token);
  Selection selection;
  selection.index = index;
  selection.sink_tokens = 4;
  selection.window_tokens = 8;
  selection.budget_kind = BudgetKind::kCount;
  selection.budget_count = 4 + 8 + 50;
  for (int i = 0; i < 5; ++i) {
    const Floats query = sequence.RandomQuery(model);
    const auto selected = sequence.store().TopK(
        kTenant, sequence.id(),
        {.layer = 3, .query_position = model.tokens - 1u, .queries = query.view()}, selection);
    ASSERT_TRUE(selected.ok()) << selected.status();
    for (uint32_t kv_head = 0; kv_head < model.group.kv_heads; ++kv_head) {
      ExpectLargest(candidates,
                    RuleValues(model, decoded, query, kv_head, selection.group_rule, candidates),
                    std::span(selected->positions)
                        .subspan(size_t{kv_head} * selected->count, selected->count));
    }
  }
}

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_INDEX_LIVE_PARTS_H_
