// Layers of kinds full and window: their rows are stored like all others, and no index has them.
#include <cmath>
#include <numeric>

#include "tests/kvstore/index/live_parts.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::Add;
using testing::AttendExactly;
using testing::Describe;
using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::Live;
using testing::LiveOptions;
using testing::MemoryKeeper;
using testing::Partial;
using testing::Pq;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;
using testing::ToFloats;
using testing::WaitIdle;

constexpr uint32_t kFull = 0, kSelected = 1, kWindow = 2;  // layers
constexpr uint32_t kSink = 5, kOwn = 20;
// 40 dims of the full layers are no multiple of 16 sub-spaces.
const IndexDescriptor kWide = Pq(16, 4);

CacheSpec MixedSpec() {
  CacheSpec spec = SmallSpec();
  spec.default_index = kWide;
  LayerGroup full = spec.groups[0];
  full.kind = LayerKind::kFull;
  full.layers = {kFull, 4};
  full.key_dim = 40;
  full.kv_heads = 1;
  full.query_heads = 3;
  LayerGroup window = spec.groups[0];
  window.kind = LayerKind::kWindow;
  window.layers = {kWindow};
  window.window_tokens = kOwn;
  spec.groups.push_back(full);
  spec.groups.push_back(window);
  return spec;
}

Selection Terms(const IndexDescriptor& index, double ratio) {
  return {.index = index, .sink_tokens = kSink, .window_tokens = kOwn, .budget_ratio = ratio};
}

std::vector<uint32_t> Between(uint32_t begin, uint32_t end) {
  std::vector<uint32_t> tokens(end - begin);
  std::iota(tokens.begin(), tokens.end(), begin);
  return tokens;
}

absl::StatusOr<Attention> AttendAt(TestSequence& sequence, const LayerModel& model,
                                   const Floats& query, uint32_t position, const Selection& terms) {
  return sequence.store().Attend(
      kTenant, sequence.id(),
      {.layer = model.group.layers.front(), .query_position = position, .queries = query.view()},
      terms, true);
}

// Whether a query attends to exactly these tokens, in every kv head.
void ExpectAttendsTo(TestSequence& sequence, const LayerModel& model, uint32_t position,
                     const Selection& terms, const std::vector<uint32_t>& tokens) {
  const Floats query = sequence.RandomQuery(model);
  const auto attention = AttendAt(sequence, model, query, position, terms);
  ASSERT_TRUE(attention.ok()) << attention.status();
  ASSERT_EQ(attention->selected.count, tokens.size());
  for (uint32_t head = 0; head < model.group.kv_heads; ++head) {
    const auto* begin = attention->selected.positions.data() + head * tokens.size();
    EXPECT_EQ(std::vector<uint32_t>(begin, begin + tokens.size()), tokens);
  }
  for (uint32_t head = 0; head < model.group.query_heads; ++head) {
    const Partial exact = AttendExactly(model, &query.data[head * model.group.key_dim],
                                        head / model.group.group_size(), tokens);
    if (tokens.empty()) {
      EXPECT_EQ(attention->lse[head], -INFINITY);
    } else {
      EXPECT_NEAR(attention->lse[head], exact.lse, 5e-5);
    }
    for (uint32_t i = 0; i < model.group.value_dim; ++i) {
      EXPECT_NEAR(attention->output[head * model.group.value_dim + i], exact.output[i], 1e-4);
    }
  }
}

TEST(LayerKinds, OnlyLayersOfKindWindowHaveWindowTokens) {
  const auto field_of = [](LayerKind kind, uint32_t window_tokens) {
    CacheSpec spec = SmallSpec();
    spec.groups[0].kind = kind;
    spec.groups[0].window_tokens = window_tokens;
    const absl::Status status = ValidateCacheSpec(spec);
    EXPECT_TRUE(status.ok() || absl::IsInvalidArgument(status)) << status;
    return std::string(FieldOf(status));
  };
  for (const LayerKind kind : {LayerKind::kSelected, LayerKind::kFull}) {
    EXPECT_EQ(field_of(kind, 0), "");
    EXPECT_EQ(field_of(kind, 1), "layer_groups[0].window_tokens");
  }
  EXPECT_EQ(field_of(LayerKind::kNone, 1), "layer_groups[0].window_tokens");
  EXPECT_EQ(field_of(LayerKind::kWindow, 1), "");
  EXPECT_EQ(field_of(LayerKind::kWindow, kMaxSequenceTokens), "");
  for (const uint32_t wrong : {0u, kMaxSequenceTokens + 1, ~0u}) {
    EXPECT_EQ(field_of(LayerKind::kWindow, wrong), "layer_groups[0].window_tokens");
  }
}

TEST(LayerKinds, IndexesHaveNoCodesOfLayersThatSelectNothing) {
  CacheSpec selected_only = SmallSpec();
  selected_only.default_index = kWide;
  TestSequence mixed(MixedSpec()), other(selected_only);
  for (TestSequence* sequence : {&mixed, &other}) sequence->Ingest(400);
  const size_t mixed_rows = Describe(mixed).used_bytes, other_rows = Describe(other).used_bytes;
  std::vector<uint32_t> reported;
  const absl::Status built = mixed.store().BuildIndex(
      kTenant, mixed.id(), {.index = kWide, .iterations = 2}, [&](const BuildProgress& progress) {
        EXPECT_EQ(progress.layer_count, 2u);
        if (progress.codebook_generation == 0) reported.push_back(progress.layer);
        return true;
      });
  ASSERT_TRUE(built.ok()) << built;
  std::sort(reported.begin(), reported.end());
  EXPECT_EQ(reported, (std::vector<uint32_t>{1, 3}));
  other.Build(kWide, 2, 16);
  const SequenceInfo info = Describe(mixed), of_other = Describe(other);
  EXPECT_EQ(info.index_bytes, of_other.index_bytes);
  EXPECT_EQ(info.codebook_bytes, of_other.codebook_bytes);
  EXPECT_GT(info.codebook_bytes, 0u);
  EXPECT_EQ(info.used_bytes - mixed_rows, of_other.used_bytes - other_rows);
  ASSERT_EQ(info.layers.size(), 5u);
  for (const LayerInfo& layer : info.layers) {
    EXPECT_EQ(layer.row_count, 400u);
    EXPECT_EQ(layer.index_states, std::vector<LayerState>{LayerState::kReady});
  }
  EXPECT_EQ(info.segments.front().state, SegmentState::kSealed);
  const auto build_again = mixed.store().BuildIndex(kTenant, mixed.id(), {.index = kWide}, {});
  EXPECT_EQ(build_again.code(), absl::StatusCode::kAlreadyExists) << build_again;
}

TEST(LayerKinds, ARequestOfMemoryCountsNoCodesOfThem) {
  TestSequence mixed(MixedSpec()), selected(SmallSpec());
  const auto bytes_of_index = [](TestSequence& sequence) {
    size_t needed[2];
    for (const bool indexed : {false, true}) {
      const auto admission = sequence.store().Admit(kTenant, sequence.cache_id(),
                                                    {.prefill_tokens = 1000,
                                                     .output_tokens = 100,
                                                     .index = indexed ? kWide : IndexDescriptor{}});
      EXPECT_TRUE(admission.ok()) << admission.status();
      needed[indexed] = admission->needed_bytes;
    }
    return needed[1] - needed[0];
  };
  EXPECT_EQ(bytes_of_index(mixed), bytes_of_index(selected));
}

TEST(LayerKinds, QueriesOfFullLayersTakeAllCandidates) {
  TestSequence sequence(MixedSpec());
  sequence.Ingest(300);
  for (const bool built : {false, true}) {
    if (built) sequence.Build(kWide, 2);
    const LayerModel& model = sequence.layer(kFull);
    for (const IndexDescriptor& index : {kWide, Pq(2, 4), IndexDescriptor{}}) {
      ExpectAttendsTo(sequence, model, 299, Terms(index, 0.1), Between(kSink, 280));
      ExpectAttendsTo(sequence, model, 100, Terms(index, 1.0), Between(kSink, 81));
    }
    Selection counted = Terms(kWide, 0);
    counted.budget_kind = BudgetKind::kCount;
    counted.budget_count = 1;
    ExpectAttendsTo(sequence, model, 299, counted, Between(kSink, 280));
    Selection masked = Terms(kWide, 0.2);
    masked.excluded = {{0, 50}, {60, 300}};
    ExpectAttendsTo(sequence, model, 299, masked, Between(50, 60));
    const Floats query = sequence.RandomQuery(model);
    const auto beyond = AttendAt(sequence, model, query, 320, Terms(kWide, 0.1));
    EXPECT_EQ(beyond.status().code(), absl::StatusCode::kOutOfRange) << beyond.status();
  }
}

TEST(LayerKinds, QueriesOfWindowLayersTakeNone) {
  TestSequence sequence(MixedSpec());
  sequence.Ingest(300);
  sequence.Build(kWide, 2);
  const LayerModel& model = sequence.layer(kWindow);
  for (const double ratio : {0.1, 1.0}) {
    for (const uint32_t position : {0u, 299u, 5000u}) {
      ExpectAttendsTo(sequence, model, position, Terms(kWide, ratio), {});
    }
  }
  const Floats query = sequence.RandomQuery(model);
  const auto attention = AttendAt(sequence, model, query, 299, Terms(kWide, 0.5));
  ASSERT_TRUE(attention.ok());
  EXPECT_EQ(attention->selected.sink_tokens, 0u);
  EXPECT_EQ(attention->selected.window_tokens, 0u);
  // Ranges and positions are read as in any layer.
  const auto range = sequence.store().AttendRange(
      kTenant, sequence.id(), {.layer = kWindow, .query_position = 299, .queries = query.view()},
      {10, 200}, {});
  ASSERT_TRUE(range.ok()) << range.status();
  const Partial exact = AttendExactly(model, query.data.data(), 0, Between(10, 200));
  EXPECT_NEAR(range->lse[0], exact.lse, 5e-5);
}

TEST(LayerKinds, ScoresOfThemAreExactOnly) {
  TestSequence sequence(MixedSpec());
  sequence.Ingest(200);
  sequence.Build(Pq(2, 4), 2);
  for (const uint32_t layer : {kFull, kWindow}) {
    const LayerModel& model = sequence.layer(layer);
    const Floats query = sequence.RandomQuery(model);
    const Query of_layer{.layer = layer, .query_position = 199, .queries = query.view()};
    const auto flat = sequence.store().Score(kTenant, sequence.id(), of_layer, {}, {3, 150});
    ASSERT_TRUE(flat.ok()) << flat.status();
    const Partial one = AttendExactly(model, query.data.data(), 0, Between(3, 4));
    EXPECT_NEAR(flat->logits[0], one.lse, 1e-4);
    const auto pq = sequence.store().Score(kTenant, sequence.id(), of_layer, Pq(2, 4), {3, 150});
    EXPECT_EQ(pq.status().code(), absl::StatusCode::kFailedPrecondition) << pq.status();
  }
}

// Codes are copied when an active segment moves away from a fork.
TEST(LayerKinds, ForksAppendsAndCutsKeepAllRows) {
  TestSequence sequence(MixedSpec());
  sequence.Ingest(300);
  sequence.Build(kWide, 2);
  sequence.Append(30);
  const auto fork = sequence.store().ForkSequence(kTenant, sequence.id(), 310, "session");
  ASSERT_TRUE(fork.ok()) << fork.status();
  const std::vector<LayerModel> shared = sequence.layers();
  sequence.Truncate(305);  // rows that the fork reads stay where they are
  sequence.Append(215);
  sequence.ExpectRowsMatch();
  ExpectAttendsTo(sequence, sequence.layer(kFull), 519, Terms(kWide, 0.1), Between(kSink, 500));
  const auto selected =
      AttendAt(sequence, sequence.layer(kSelected), sequence.RandomQuery(sequence.layer(kSelected)),
               519, Terms(kWide, 0.2));
  ASSERT_TRUE(selected.ok()) << selected.status();
  EXPECT_EQ(selected->selected.count, 104u - kSink - kOwn);
  for (const LayerModel& model : shared) {
    const auto rows = sequence.store().FetchBlocks(
        kTenant, fork->sequence_id, model.group.layers.front(), {0, 310}, RowPart::kRow);
    ASSERT_TRUE(rows.ok()) << rows.status();
    EXPECT_EQ(ToFloats(*rows), model.Rows(0, 310));
  }
}

TEST(LayerKinds, IncrementalIndexesAndMergesLeaveThemOut) {
  CacheSpec spec = MixedSpec();
  TestSequence sequence(spec, LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, 600, 0, 1, /*append=*/false);
  std::vector<uint32_t> done;
  const absl::Status finished = sequence.store().BuildIndex(
      kTenant, sequence.id(), {.index = testing::kIndex}, [&](const BuildProgress& progress) {
        EXPECT_EQ(progress.layer_count, 2u);
        done.push_back(progress.layers_done);
        return true;
      });
  ASSERT_TRUE(finished.ok()) << finished;
  EXPECT_EQ(done, (std::vector<uint32_t>{1, 2}));
  const size_t segments = Describe(sequence).segments.size();
  for (int i = 0; i < 9; ++i) Add(sequence, testing::kTail, 0, 1, /*append=*/true);
  WaitIdle(sequence.store());
  const SequenceInfo info = Describe(sequence);
  EXPECT_TRUE(info.live_index.ok()) << info.live_index;
  EXPECT_LT(info.segments.size(), segments + 5);  // tails were merged
  for (const LayerInfo& layer : info.layers) {
    EXPECT_EQ(layer.index_states, std::vector<LayerState>{LayerState::kReady}) << layer.layer;
  }
  size_t codebook_bytes = 0;  // of the layers that the build reports: there are no others
  const absl::Status again = sequence.store().BuildIndex(
      kTenant, sequence.id(), {.index = testing::kIndex}, [&](const BuildProgress& progress) {
        codebook_bytes += progress.codebook_bytes;
        return true;
      });
  EXPECT_TRUE(again.ok()) << again;
  EXPECT_EQ(codebook_bytes, info.codebook_bytes);
  sequence.ExpectRowsMatch();
  const uint32_t last = sequence.tokens() - 1;
  const Selection terms = Terms(testing::kIndex, 0.1);
  ExpectAttendsTo(sequence, sequence.layer(kFull), last, terms, Between(kSink, last + 1 - kOwn));
  ExpectAttendsTo(sequence, sequence.layer(kWindow), last, terms, {});
  const LayerModel& model = sequence.layer(kSelected);
  const auto selected = AttendAt(sequence, model, sequence.RandomQuery(model), last, terms);
  ASSERT_TRUE(selected.ok()) << selected.status();
  EXPECT_EQ(selected->selected.count, (last + 1) / 10 - kSink - kOwn);
}

TEST(LayerKinds, AStoreFindsThemAgain) {
  MemoryKeeper keeper;
  StoreOptions options = SmallOptions();
  options.keeper = &keeper;
  auto first = std::make_optional<TestSequence>(MixedSpec(), options);
  first->Ingest(300);
  first->Build(kWide, 2);
  first->Append(50);
  const uint64_t id = first->id();
  const std::vector<LayerModel> models = first->layers();
  const Floats query = first->RandomQuery(models[0]);
  const Query selected{.layer = kSelected, .query_position = 349, .queries = query.view()};
  const auto before = first->store().TopK(kTenant, id, selected, Terms(kWide, 0.2));
  ASSERT_TRUE(before.ok()) << before.status();
  first->store().WaitIdle(SteadyTime::InfiniteFuture());
  first.reset();

  const auto store = Store::Create(options);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ((*store)->Recovery().sequences, 1u);
  EXPECT_EQ((*store)->Recovery().dropped_records, 0u);
  const auto info = (*store)->DescribeSequence(kTenant, id);
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->indexes, std::vector<IndexDescriptor>{kWide});
  for (const LayerModel& model : models) {
    const auto rows =
        (*store)->FetchBlocks(kTenant, id, model.group.layers.front(), {0, 350}, RowPart::kRow);
    ASSERT_TRUE(rows.ok()) << rows.status();
    EXPECT_EQ(ToFloats(*rows), model.Rows(0, 350));
  }
  const auto after = (*store)->TopK(kTenant, id, selected, Terms(kWide, 0.2));
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->positions, before->positions);
  // Kinds and window are a part of the cache's identity.
  EXPECT_TRUE((*store)->OpenCache(kTenant, MixedSpec()).ok());
  CacheSpec other = MixedSpec();
  other.groups[2].window_tokens = kOwn + 1;
  const auto refused = (*store)->OpenCache(kTenant, other);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_EQ(std::string(FieldOf(refused.status())), "layer_groups[2].window_tokens");
}

TEST(LayerKinds, CachesWithoutSelectedLayersHaveNoIndexes) {
  CacheSpec spec = MixedSpec();
  spec.groups.erase(spec.groups.begin());
  TestSequence sequence(spec);
  sequence.Ingest(200);
  const auto built = sequence.store().BuildIndex(kTenant, sequence.id(), {.index = Pq(2, 4)}, {});
  EXPECT_EQ(built.code(), absl::StatusCode::kFailedPrecondition) << built;
  const auto live = sequence.store().CreateSequence(kTenant, sequence.cache_id(), Live());
  EXPECT_EQ(live.status().code(), absl::StatusCode::kFailedPrecondition) << live.status();
  ExpectAttendsTo(sequence, sequence.layer(kFull), 199, Terms(Pq(2, 4), 0.1), Between(kSink, 180));
  sequence.Append(100);
  sequence.ExpectRowsMatch();
}

}  // namespace
}  // namespace pqcached::kvstore
