// Tail estimates by an index of clusters.
//
// Rows are drawn from a palette of few different rows, so that each cluster consists of equal rows:
// the estimate is then the exact attention to what was not selected.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kvstore/clock.h"
#include "kvstore/read/indexes/clusters.h"
#include "kvstore/read/indexes/index_types.h"
#include "tests/kvstore/fixture.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::AttendExactly;
using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::MemoryKeeper;
using testing::Partial;
using testing::RandomFloats;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;

constexpr uint32_t kTailSegment = 1024, kClusterTokens = 16, kPalette = 12, kSinks = 16;
constexpr uint64_t kSelectedTokens = 40;

IndexDescriptor Clusters(uint32_t tokens = kClusterTokens) {
  IndexDescriptor index;
  const Refusal refusal = MakeIndex(
      "clusters", {{{.name = "tokens", .value_name = {}, .number = tokens}}}, "index", &index);
  EXPECT_TRUE(refusal.ok()) << refusal.message();
  return index;
}

StoreOptions TailOptions() {
  StoreOptions options = SmallOptions();
  options.segment_tokens = kTailSegment;
  options.codebook_tokens = kTailSegment;
  return options;
}

CacheSpec TailSpec(kernels::DType dtype = kernels::DType::kF32) {
  CacheSpec spec = SmallSpec();
  spec.capacity_bytes = size_t{128} << 20;
  spec.groups[0].dtype = dtype;
  return spec;
}

// Few different rows of one layer.
struct Palette {
  Palette(std::mt19937_64& random, const LayerGroup& group)
      : keys(RandomFloats(random, {kPalette, group.kv_heads, group.key_dim})),
        values(RandomFloats(random, {kPalette, group.kv_heads, group.value_dim})) {}

  Floats keys, values;
};

// A sequence whose rows come from palettes.
class TailSequence {
 public:
  explicit TailSequence(const CacheSpec& spec = TailSpec(),
                        const StoreOptions& options = TailOptions())
      : sequence_(spec, options) {
    for (LayerModel& model : sequence_.layers()) palettes_.emplace_back(random_, model.group);
  }

  TestSequence* operator->() { return &sequence_; }

  void Ingest(uint32_t tokens) {
    auto ingest = sequence_.store().BeginIngest(kTenant, sequence_.id());
    ASSERT_TRUE(ingest.ok()) << ingest.status();
    for (size_t i = 0; i < palettes_.size(); ++i) {
      LayerModel& model = sequence_.layers()[i];
      const Drawn rows = Draw(i, tokens);
      const absl::Status status =
          (*ingest)->Write(model.tokens, {.layer = model.group.layers.front(),
                                          .keys = rows.keys.view(),
                                          .values = rows.values.view()});
      ASSERT_TRUE(status.ok()) << status;
      model.Append(rows.keys, rows.values);
    }
    ASSERT_TRUE((*ingest)->Commit().ok());
  }

  void Append(uint32_t tokens) {
    std::vector<Drawn> drawn;
    std::vector<LayerRows> rows;
    for (size_t i = 0; i < palettes_.size(); ++i) drawn.push_back(Draw(i, tokens));
    for (size_t i = 0; i < palettes_.size(); ++i) {
      rows.push_back({.layer = sequence_.layers()[i].group.layers.front(),
                      .keys = drawn[i].keys.view(),
                      .values = drawn[i].values.view()});
    }
    const auto count = sequence_.store().Append(kTenant, sequence_.id(), sequence_.tokens(), rows);
    ASSERT_TRUE(count.ok()) << count.status();
    for (size_t i = 0; i < palettes_.size(); ++i) {
      sequence_.layers()[i].Append(drawn[i].keys, drawn[i].values);
    }
  }

 private:
  struct Drawn {
    Floats keys, values;
  };

  Drawn Draw(size_t layer, uint32_t tokens) {
    const auto draw = [&](const Floats& from, const std::vector<uint32_t>& rows) {
      Floats floats{.shape = from.shape, .data = {}};
      floats.shape[0] = tokens;
      const size_t size = from.shape[1] * from.shape[2];
      for (const uint32_t row : rows) {
        const auto begin = from.data.begin() + static_cast<ptrdiff_t>(row * size);
        floats.data.insert(floats.data.end(), begin, begin + static_cast<ptrdiff_t>(size));
      }
      return floats;
    };
    std::vector<uint32_t> rows(tokens);
    for (uint32_t& row : rows) row = static_cast<uint32_t>(random_() % kPalette);
    return {draw(palettes_[layer].keys, rows), draw(palettes_[layer].values, rows)};
  }

  TestSequence sequence_;
  std::mt19937_64 random_{7};
  std::vector<Palette> palettes_;
};

Selection WithTail(bool per_query_head = false) {
  return {.per_query_head = per_query_head,
          .budget_kind = BudgetKind::kRetrieved,
          .tail_estimate = true,
          .budget_count = kSelectedTokens};
}

// Attends with the selection, and expects the attention to the tokens that are selected or for
// which `is_estimated` holds.
void ExpectAttendsTo(TestSequence& sequence, uint64_t id, uint32_t tokens,
                     const Selection& selection, const std::function<bool(uint32_t)>& is_estimated,
                     double tolerance = 1e-4) {
  const LayerModel& model = sequence.layer(1);
  for (int i = 0; i < 3; ++i) {
    const Floats query = sequence.RandomQuery(model);
    const auto attention = sequence.store().Attend(
        kTenant, id, {.layer = 1, .query_position = tokens - 1, .queries = query.view()}, selection,
        /*want_positions=*/true);
    ASSERT_TRUE(attention.ok()) << attention.status();
    const std::vector<uint32_t>& positions = attention->selected.positions;
    const uint32_t heads = model.group.query_heads, count = attention->selected.count;
    const uint32_t sets = static_cast<uint32_t>(positions.size()) / std::max(1u, count);
    for (uint32_t head = 0; head < heads; ++head) {
      const auto set = positions.begin() + static_cast<ptrdiff_t>(head * sets / heads * count);
      std::vector<uint32_t> attended;
      for (uint32_t position = 0; position < tokens; ++position) {
        const bool is_selected = count > 0 && std::binary_search(set, set + count, position);
        if (is_selected || is_estimated(position)) attended.push_back(position);
      }
      const Partial exact = AttendExactly(model, &query.data[head * model.group.key_dim],
                                          head / model.group.group_size(), attended);
      ASSERT_NEAR(attention->lse[head], exact.lse, tolerance);
      for (uint32_t j = 0; j < model.group.value_dim; ++j) {
        ASSERT_NEAR(attention->output[head * model.group.value_dim + j], exact.output[j],
                    4 * tolerance);
      }
    }
  }
}

bool All(uint32_t) { return true; }

TEST(Tail, OfEqualRowsIsTheExactAttention) {
  for (const kernels::DType dtype :
       {kernels::DType::kF32, kernels::DType::kF16, kernels::DType::kBf16}) {
    SCOPED_TRACE(static_cast<int>(dtype));
    TailSequence sequence{TailSpec(dtype)};
    sequence.Ingest(3 * kTailSegment);
    sequence->Build(Clusters());
    for (const bool per_query_head : {false, true}) {
      ExpectAttendsTo(*sequence.operator->(), sequence->id(), 3 * kTailSegment,
                      WithTail(per_query_head), All, dtype == kernels::DType::kBf16 ? 5e-3 : 1e-4);
    }
  }
}

TEST(Tail, OfALayerWithASoftcap) {
  CacheSpec spec = TailSpec();
  spec.groups[0].softcap = 2.0f;
  TailSequence sequence(spec);
  sequence.Ingest(2 * kTailSegment);
  sequence->Build(Clusters());
  ExpectAttendsTo(*sequence.operator->(), sequence->id(), 2 * kTailSegment, WithTail(), All);
}

TEST(Tail, HasOnlyCandidates) {
  TailSequence sequence;
  sequence.Ingest(2 * kTailSegment);
  sequence->Build(Clusters(), 4, /*sink_tokens=*/16);
  Selection selection = WithTail();
  selection.sink_tokens = 20;
  selection.window_tokens = 100;
  selection.excluded = {{200, 900}, {1000, 1100}};
  ExpectAttendsTo(
      *sequence.operator->(), sequence->id(), 2 * kTailSegment, selection, [](uint32_t position) {
        return position >= 20 && position < 2 * kTailSegment - 100 &&
               (position < 200 || position >= 900) && (position < 1000 || position >= 1100);
      });
}

// Clusters of all sizes of segments, whose last part may be small.
TEST(Tail, OfSegmentsOfAnySize) {
  for (const uint32_t tokens : {1u, 2u, 15u, 16u, 17u, 33u, 127u, 2049u, 4095u, 4096u, 4200u}) {
    SCOPED_TRACE(tokens);
    StoreOptions options = TailOptions();
    options.segment_tokens = 8192;
    TailSequence sequence{TailSpec(), options};
    sequence.Ingest(tokens + 1);
    // A part has 256 x 8 slots. One cluster of several rows estimates nothing exactly.
    sequence->Build(Clusters(8));
    Selection selection = WithTail();
    selection.budget_count = 1;
    selection.window_tokens = 1;
    const LayerModel& model = sequence->layer(1);
    const Floats query = sequence->RandomQuery(model);
    const auto attention = sequence->store().Attend(
        kTenant, sequence->id(), {.layer = 1, .query_position = tokens, .queries = query.view()},
        selection, false);
    ASSERT_TRUE(attention.ok()) << attention.status();
    if (tokens == 1 || tokens >= 127) {
      ExpectAttendsTo(
          *sequence.operator->(), sequence->id(), tokens + 1, selection,
          [tokens](uint32_t position) { return position < tokens; }, 1e-2);
    }
  }
}

// Rows without clusters, as those behind the last build, stay left out unless they are selected.
TEST(Tail, OfRowsWithoutClustersIsNothing) {
  StoreOptions options = TailOptions();
  options.tail_tokens = 512;  // whose clusters are of equal rows, too
  TailSequence sequence{TailSpec(), options};
  sequence.Ingest(2 * kTailSegment);
  sequence->Build(Clusters());
  sequence.Append(300);
  const auto built = [](uint32_t position) { return position < 2 * kTailSegment; };
  ExpectAttendsTo(*sequence.operator->(), sequence->id(), 2 * kTailSegment + 300, WithTail(),
                  built);
  // A truncated segment shows a part of its clusters' tokens, also with other tokens behind it.
  sequence->Truncate(1500);
  ExpectAttendsTo(*sequence.operator->(), sequence->id(), 1500, WithTail(), All);
  sequence.Append(500);
  ExpectAttendsTo(*sequence.operator->(), sequence->id(), 2000, WithTail(),
                  [](uint32_t position) { return position < 1500; });
  const absl::Status rebuilt = sequence->store().BuildIndex(
      kTenant, sequence->id(), {.index = Clusters(), .sink_tokens = 0, .rebuild = true}, {});
  ASSERT_TRUE(rebuilt.ok()) << rebuilt;
  ExpectAttendsTo(*sequence.operator->(), sequence->id(), 2000, WithTail(), All);
}

TEST(Tail, NeedsClusters) {
  TailSequence sequence;
  sequence.Ingest(kTailSegment);
  const Floats query = sequence->RandomQuery(sequence->layer(1));
  const auto attend = [&](const Selection& selection) {
    return sequence->store()
        .Attend(kTenant, sequence->id(),
                {.layer = 1, .query_position = kTailSegment - 1, .queries = query.view()},
                selection, false)
        .status();
  };
  const absl::Status refused = attend(WithTail());
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(refused.message(), ::testing::HasSubstr("tail_estimate"));
  EXPECT_THAT(refused.message(), ::testing::HasSubstr("clusters"));
  Selection all = WithTail();
  all.budget_count = kTailSegment;  // nothing is left to estimate
  EXPECT_TRUE(attend(all).ok());
}

constexpr uint32_t kTailTokens = 256;
constexpr uint32_t kFewTokens = 8;  // decode segments then have a cluster for each of the palette

// Returns the end of the tokens that have clusters: all but those of an open decode segment.
uint32_t ClusteredEnd(Store& store, uint64_t id) {
  if (!store.WaitIdle(SteadyTime::InfiniteFuture())) return 0;
  const auto info = store.DescribeSequence(kTenant, id);
  EXPECT_TRUE(info.ok()) << info.status();
  if (!info.ok() || info->segments.empty()) return 0;
  const SegmentInfo& last = info->segments.back();
  const bool is_open = last.state == SegmentState::kOpen && last.slot_capacity <= kTailTokens;
  return static_cast<uint32_t>(is_open ? last.tokens.begin : last.tokens.end);
}

StoreOptions LiveOptions() {
  StoreOptions options = TailOptions();
  options.merge_segments = 4;
  options.tail_tokens = kTailTokens;
  return options;
}

// The clusters follow a live sequence and its forks. Sinks have none.
TEST(Tail, FollowsALiveSequence) {
  TailSequence sequence{TailSpec(), LiveOptions()};
  sequence->NewSequence(
      {.session = "session",
       .live_index =
           LiveIndex{.index = Clusters(kFewTokens), .iterations = 1, .sink_tokens = kSinks}});
  Store& store = sequence->store();
  const auto expect = [&](uint64_t id) {
    const uint32_t end = ClusteredEnd(store, id);
    const auto info = store.DescribeSequence(kTenant, id);
    ASSERT_TRUE(info.ok()) << info.status();
    ASSERT_GE(end + kTailTokens, info->token_count);
    Selection selection = WithTail();
    selection.sink_tokens = kSinks;
    ExpectAttendsTo(*sequence.operator->(), id, static_cast<uint32_t>(info->token_count), selection,
                    [end](uint32_t position) { return position >= kSinks && position < end; });
  };
  sequence.Ingest(2 * kTailSegment);
  ASSERT_TRUE(store.ClosePrefill(kTenant, sequence->id()).ok());
  expect(sequence->id());
  const auto fork = store.ForkSequence(kTenant, sequence->id(), 1500, "session");
  ASSERT_TRUE(fork.ok()) << fork.status();
  expect(fork->sequence_id);
  for (int i = 0; i < 10; ++i) {
    while (sequence->tokens() % 512 != 384) sequence.Append(128);
    expect(sequence->id());
    sequence.Append(128);
  }
}

// Rows that come after the clusters were built have clusters as well, where another index is live.
TEST(Tail, FollowsASequenceWithAnotherLiveIndex) {
  TailSequence sequence{TailSpec(), LiveOptions()};
  const IndexDescriptor live = {.kind = IndexKind::kPq, .subspace_count = 2, .bits = 4};
  sequence->NewSequence(
      {.session = "session", .live_index = LiveIndex{.index = live, .iterations = 1}});
  Store& store = sequence->store();
  sequence.Ingest(kTailSegment);
  ASSERT_TRUE(store.ClosePrefill(kTenant, sequence->id()).ok());
  sequence->Build(Clusters(kFewTokens));
  for (int i = 0; i < 12; ++i) {
    const uint32_t end = ClusteredEnd(store, sequence->id());
    ASSERT_GE(end + kTailTokens, sequence->tokens());
    ExpectAttendsTo(*sequence.operator->(), sequence->id(), sequence->tokens(), WithTail(),
                    [end](uint32_t position) { return position < end; });
    sequence.Append(i % 2 == 0 ? 130 : 300);
  }
}

// The clusters outlive the process.
TEST(Tail, OutlivesTheProcess) {
  MemoryKeeper keeper;
  StoreOptions options = TailOptions();
  options.keeper = &keeper;
  Floats query;
  const auto attend = [&query](Store& store, uint64_t id) {
    return *store.Attend(
        kTenant, id, {.layer = 1, .query_position = 2 * kTailSegment - 1, .queries = query.view()},
        WithTail(), true);
  };
  uint64_t id = 0;
  Attention before;
  {
    TestSequence sequence(TailSpec(), options);
    sequence.Ingest(2 * kTailSegment);
    sequence.Build(Clusters());
    id = sequence.id();
    query = sequence.RandomQuery(sequence.layer(1));
    before = attend(sequence.store(), id);
  }
  const auto store = Store::Create(options);
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE((*store)->WaitIdle(SteadyTime::InfiniteFuture()));
  const Attention after = attend(**store, id);
  EXPECT_EQ(after.output, before.output);
  EXPECT_EQ(after.lse, before.lse);
}

// The error becomes smaller where rows are different.
TEST(Tail, MakesTheErrorSmaller) {
  constexpr uint32_t kTokens = 4 * kTailSegment;
  TestSequence sequence(TailSpec(), TailOptions());
  sequence.Ingest(kTokens);
  sequence.Build(Clusters());
  const LayerModel& model = sequence.layer(1);
  double error[2] = {};
  for (int i = 0; i < 20; ++i) {
    const Floats query = sequence.RandomQuery(model);
    const auto attend = [&](const Selection& selection) {
      return *sequence.store().Attend(
          kTenant, sequence.id(),
          {.layer = 1, .query_position = kTokens - 1, .queries = query.view()}, selection, false);
    };
    const Attention full = attend({.budget_ratio = 1.0});
    for (const bool with_tail : {false, true}) {
      Selection selection = WithTail();
      selection.budget_count = kTokens / 20;
      selection.tail_estimate = with_tail;
      const Attention found = attend(selection);
      for (size_t j = 0; j < full.output.size(); ++j) {
        error[with_tail] += std::pow(found.output[j] - full.output[j], 2.0);
      }
    }
  }
  EXPECT_LT(error[true], 0.5 * error[false]);
}

// A build asks between the iterations of a head's clusters whether it should end.
TEST(Tail, ABuildOfClustersEndsWithinAHead) {
  TailSequence sequence;
  sequence.Ingest(4 * kTailSegment);
  std::atomic<int> calls = 0;
  BuildSpec spec{.index = Clusters()};
  spec.is_cancelled = [&] { return ++calls > 100; };
  EXPECT_EQ(sequence->store().BuildIndex(kTenant, sequence->id(), spec, {}).code(),
            absl::StatusCode::kCancelled);
  sequence->Build(Clusters());
  ExpectAttendsTo(*sequence.operator->(), sequence->id(), 4 * kTailSegment, WithTail(), All);
}

TEST(Tail, PartsHaveAPowerOfTwoOfClusters) {
  const ClusterSizes sizes{.tokens = 8};
  EXPECT_EQ(sizes.part_slots(), 2048u);
  EXPECT_EQ(sizes.MostClusters(2048), 256u);
  EXPECT_EQ(sizes.MostClusters(2049), 257u);
  EXPECT_EQ(sizes.MostClusters(7), 1u);
  EXPECT_EQ(sizes.MostClusters(0), 0u);
}

}  // namespace
}  // namespace pqcached::kvstore
