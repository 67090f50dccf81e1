// Query samples of a sequence, and the indexes that are trained on them.
#include "kvstore/sequence/query_samples.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kvstore/clock.h"
#include "tests/kvstore/brute_force.h"
#include "tests/kvstore/evict/pressure_fixture.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::DecodedKeys;
using testing::DecodeKeys;
using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::MemoryKeeper;
using testing::Pq;
using testing::RandomFloats;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;

constexpr uint32_t kQueryHeads = 4, kKeyDim = 32;

IndexDescriptor Weighted(uint32_t subspaces, uint32_t bits) {
  IndexDescriptor index = Pq(subspaces, bits);
  index.layout = SubspaceLayout::kWeighted;
  return index;
}

IndexDescriptor Contiguous(uint32_t subspaces, uint32_t bits) {
  IndexDescriptor index = Pq(subspaces, bits);
  index.layout = SubspaceLayout::kContiguous;
  return index;
}

// Queries that are large in few directions, the same for each seed.
Floats FlatQueries(std::mt19937_64& random, uint64_t count) {
  Floats queries = RandomFloats(random, {count, kQueryHeads, kKeyDim});
  for (size_t i = 0; i < queries.data.size(); ++i) {
    if (i % kKeyDim % 8 != 3) queries.data[i] *= 0.05f;
  }
  return queries;
}

std::vector<uint64_t> Positions(uint64_t begin, uint64_t end, uint64_t step = 1) {
  std::vector<uint64_t> positions;
  for (uint64_t position = begin; position < end; position += step) positions.push_back(position);
  return positions;
}

absl::Status AddSamples(Store& store, uint64_t sequence_id, const LayerSamples& samples) {
  auto ingest = store.BeginIngest(kTenant, sequence_id);
  if (!ingest.ok()) return ingest.status();
  const absl::Status added = (*ingest)->AddSamples(samples);
  const absl::Status committed = (*ingest)->Commit().status();
  return added.ok() ? committed : added;
}

// Adds samples of both layers.
void AddFlatSamples(TestSequence& sequence, const std::vector<uint64_t>& positions) {
  for (const LayerModel& model : sequence.layers()) {
    const Floats queries = FlatQueries(sequence.random(), positions.size());
    const absl::Status added = AddSamples(
        sequence.store(), sequence.id(),
        {.layer = model.group.layers.front(), .positions = positions, .queries = queries.view()});
    ASSERT_TRUE(added.ok()) << added;
  }
}

std::vector<uint32_t> SampleCounts(Store& store, uint64_t sequence_id) {
  const auto info = store.DescribeSequence(kTenant, sequence_id);
  EXPECT_TRUE(info.ok()) << info.status();
  std::vector<uint32_t> counts;
  for (const LayerInfo& layer : info->layers) counts.push_back(layer.query_sample_count);
  return counts;
}

// Mean squared error of the scores of new queries.
double ScoreError(TestSequence& sequence, const IndexDescriptor& index) {
  const LayerModel& model = sequence.layer(3);
  const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, index);
  std::mt19937_64 random(77);
  const Floats queries = FlatQueries(random, 50);
  double sum = 0;
  for (uint32_t token = 0; token < model.tokens; ++token) {
    for (uint64_t q = 0; q < 50 * kQueryHeads; ++q) {
      const auto kv_head = static_cast<uint32_t>(q % kQueryHeads / 2);
      double error = 0;
      for (uint32_t i = 0; i < kKeyDim; ++i) {
        error += double{queries.data[q * kKeyDim + i]} *
                 (model.key(token, kv_head)[i] - decoded.key(token, kv_head)[i]);
      }
      sum += error * error;
    }
  }
  return sum / model.tokens / 50 / kQueryHeads;
}

TEST(WeightedIndex, HasSmallerErrorsOfScores) {
  TestSequence sequence;
  sequence.Ingest(400);  // two generations of codebooks
  AddFlatSamples(sequence, Positions(0, 400, 2));
  sequence.Build(Weighted(4, 4));
  sequence.Build(Contiguous(4, 4));
  sequence.Append(60);  // coded on arrival
  const double weighted = ScoreError(sequence, Weighted(4, 4));
  const double contiguous = ScoreError(sequence, Contiguous(4, 4));
  EXPECT_GT(weighted, 0.0);
  EXPECT_LT(weighted, 0.5 * contiguous);
}

TEST(WeightedIndex, SelectsTheTokensOfItsScores) {
  TestSequence sequence;
  sequence.Ingest(400);
  AddFlatSamples(sequence, Positions(300, 400));
  const IndexDescriptor index = Weighted(2, 6);
  sequence.Build(index);
  const LayerModel& model = sequence.layer(1);
  const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, index);
  std::vector<uint32_t> all(400);
  std::iota(all.begin(), all.end(), 0u);
  for (int round = 0; round < 5; ++round) {
    const Floats query = sequence.RandomQuery(model);
    const auto selected = sequence.store().TopK(
        kTenant, sequence.id(), {.layer = 1, .query_position = 399, .queries = query.view()},
        {.index = index, .group_rule = GroupRule::kMaxLogit, .budget_ratio = 0.1});
    ASSERT_TRUE(selected.ok()) << selected.status();
    ASSERT_EQ(selected->positions.size(), size_t{2} * 40);
    for (uint32_t kv_head = 0; kv_head < 2; ++kv_head) {
      const auto values =
          testing::RuleValues(model, decoded, query, kv_head, GroupRule::kMaxLogit, all);
      std::vector<double> sorted = values;
      std::nth_element(sorted.begin(), sorted.begin() + 39, sorted.end(), std::greater<>());
      for (uint32_t i = 0; i < 40; ++i) {
        EXPECT_GT(values[selected->positions[kv_head * 40 + i]], sorted[39] - 1e-4);
      }
    }
  }
}

TEST(WeightedIndex, NeedsSamplesOfEachLayer) {
  TestSequence sequence;
  sequence.Ingest(300);
  const auto build = [&] {
    return sequence.store().BuildIndex(kTenant, sequence.id(), {.index = Weighted(4, 4)}, {});
  };
  EXPECT_EQ(build().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldOf(build()), "index");
  EXPECT_THAT(
      std::string(build().message()),
      ::testing::HasSubstr("pq m=4 b=4 weighted needs query samples, and layer 1 has none"));
  std::mt19937_64 random(1);
  const Floats queries = FlatQueries(random, 3);
  ASSERT_TRUE(AddSamples(sequence.store(), sequence.id(),
                         {.layer = 1, .positions = {0, 7, 299}, .queries = queries.view()})
                  .ok());
  EXPECT_THAT(std::string(build().message()), ::testing::HasSubstr("layer 3 has none"));
  ASSERT_TRUE(AddSamples(sequence.store(), sequence.id(),
                         {.layer = 3, .positions = {0, 7, 299}, .queries = queries.view()})
                  .ok());
  EXPECT_TRUE(build().ok()) << build();
  EXPECT_EQ(sequence.store().DescribeSequence(kTenant, sequence.id())->indexes.size(), 1u);
}

TEST(WeightedIndex, ALiveIndexWaitsForSamples) {
  TestSequence sequence;
  const IndexDescriptor index = Weighted(4, 4);
  sequence.NewSequence(
      {.session = "session", .live_index = LiveIndex{.index = index, .iterations = 3}});
  sequence.Ingest(300);
  ASSERT_TRUE(sequence.store().ClosePrefill(kTenant, sequence.id()).ok());
  ASSERT_TRUE(sequence.store().WaitIdle(SteadyTime::InfiniteFuture()));
  const auto states = [&] {
    std::vector<LayerState> found;
    const auto info = sequence.store().DescribeSequence(kTenant, sequence.id());
    EXPECT_TRUE(info.ok()) << info.status();
    for (const LayerInfo& layer : info->layers) {
      for (const LayerState state : layer.index_states) found.push_back(state);
    }
    return found;
  };
  for (const LayerState state : states()) EXPECT_EQ(state, LayerState::kFilled);
  const absl::Status refused =
      sequence.store().BuildIndex(kTenant, sequence.id(), {.index = index}, {});
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  AddFlatSamples(sequence, Positions(236, 300));
  ASSERT_TRUE(sequence.store().WaitIdle(SteadyTime::InfiniteFuture()));
  EXPECT_EQ(states(), std::vector<LayerState>(2, LayerState::kReady));
  EXPECT_LT(ScoreError(sequence, index), 1.0);
}

// A later generation is trained with the maps of the first one, also without samples.
TEST(WeightedIndex, LaterGenerationsNeedNoSamples) {
  MemoryKeeper keeper;
  StoreOptions options = SmallOptions();
  options.keeper = &keeper;
  options.merge_segments = 2;
  const IndexDescriptor index = Weighted(4, 4);
  std::mt19937_64 random(5);
  uint64_t id = 0;
  uint32_t tokens = 0;
  std::unique_ptr<Store> store;
  const auto open = [&] {
    store.reset();
    auto created = Store::Create(options);
    ASSERT_TRUE(created.ok()) << created.status();
    store = *std::move(created);
  };
  const auto append = [&](uint32_t count, float scale) {
    std::vector<Floats> parts;
    for (int layer = 0; layer < 2; ++layer) {
      parts.push_back(RandomFloats(random, {count, 2, kKeyDim}));
      for (float& x : parts.back().data) x *= scale;
      parts.push_back(RandomFloats(random, {count, 2, 40}));
    }
    const std::vector<LayerRows> rows = {
        {.layer = 1, .keys = parts[0].view(), .values = parts[1].view()},
        {.layer = 3, .keys = parts[2].view(), .values = parts[3].view()}};
    const auto stored = store->Append(kTenant, id, tokens, rows);
    ASSERT_TRUE(stored.ok()) << stored.status();
    tokens += count;
    ASSERT_TRUE(store->WaitIdle(SteadyTime::InfiniteFuture()));
  };
  open();
  const auto cache = store->OpenCache(kTenant, SmallSpec());
  ASSERT_TRUE(cache.ok()) << cache.status();
  const auto created = store->CreateSequence(
      kTenant, cache->cache_id,
      {.session = "session", .live_index = LiveIndex{.index = index, .iterations = 3}});
  ASSERT_TRUE(created.ok()) << created.status();
  id = created->sequence_id;
  append(200, 1.0f);
  for (const uint32_t layer : {1u, 3u}) {
    const Floats queries = FlatQueries(random, 100);
    ASSERT_TRUE(
        AddSamples(*store, id,
                   {.layer = layer, .positions = Positions(100, 200), .queries = queries.view()})
            .ok());
  }
  ASSERT_TRUE(store->BuildIndex(kTenant, id, {.index = index}, {}).ok());
  EXPECT_EQ(SampleCounts(*store, id), (std::vector<uint32_t>{100, 100}));
  open();  // the samples are lost, the index is not
  EXPECT_EQ(store->Recovery().dropped_records, 0u);
  EXPECT_EQ(SampleCounts(*store, id), (std::vector<uint32_t>{0, 0}));
  for (int round = 0; round < 6; ++round) append(128, 4.0f);  // drifted keys
  const auto info = store->DescribeSequence(kTenant, id);
  ASSERT_TRUE(info.ok());
  EXPECT_GT(info->segments.back().codebook_generations.front(),
            info->segments.front().codebook_generations.front());
  for (const LayerInfo& layer : info->layers) {
    EXPECT_EQ(layer.index_states, std::vector<LayerState>{LayerState::kReady});
  }
  const absl::Status rebuilt =
      store->BuildIndex(kTenant, id, {.index = index, .rebuild = true}, {});
  EXPECT_TRUE(rebuilt.ok()) << rebuilt;  // with the maps of the index that it replaces
}

// The codes of a segment that was open when the worker ended have the maps of those that follow.
TEST(WeightedIndex, AnOpenPromptGoesOnAfterARestart) {
  MemoryKeeper keeper;
  StoreOptions options = SmallOptions();
  options.keeper = &keeper;
  const IndexDescriptor index = Weighted(4, 4);
  uint64_t id = 0;
  std::mt19937_64 random(5);
  for (int round = 0; round < 2; ++round) {
    auto created = Store::Create(options);
    ASSERT_TRUE(created.ok()) << created.status();
    Store& store = **created;
    if (round == 0) {
      const auto cache = store.OpenCache(kTenant, SmallSpec());
      ASSERT_TRUE(cache.ok()) << cache.status();
      const auto sequence = store.CreateSequence(
          kTenant, cache->cache_id,
          {.session = "session", .live_index = LiveIndex{.index = index, .iterations = 3}});
      ASSERT_TRUE(sequence.ok()) << sequence.status();
      id = sequence->sequence_id;
    }
    const uint64_t begin = round * uint64_t{128};
    auto ingest = store.BeginIngest(kTenant, id);
    ASSERT_TRUE(ingest.ok()) << ingest.status();
    for (const uint32_t layer : {1u, 3u}) {
      const Floats keys = RandomFloats(random, {128, 2, kKeyDim});
      const Floats values = RandomFloats(random, {128, 2, 40});
      ASSERT_TRUE((*ingest)
                      ->Write(begin, {.layer = layer, .keys = keys.view(), .values = values.view()})
                      .ok());
      const Floats queries = FlatQueries(random, 64);
      if (round > 0) continue;
      ASSERT_TRUE(
          (*ingest)
              ->AddSamples(
                  {.layer = layer, .positions = Positions(64, 128), .queries = queries.view()})
              .ok());
    }
    ASSERT_TRUE((*ingest)->Commit().ok());
    ASSERT_TRUE(store.WaitIdle(SteadyTime::InfiniteFuture()));
    if (round == 0) continue;
    const absl::Status built = store.BuildIndex(kTenant, id, {.index = index}, {});
    EXPECT_TRUE(built.ok()) << built;
  }
}

// Adds samples of all 300 tokens to both layers of a sequence: six extents.
void AddToPrompt(testing::PressureStore& shared, uint64_t id) {
  std::mt19937_64 random(1);
  const Floats queries = FlatQueries(random, 300);
  for (const uint32_t layer : shared.group.layers) {
    const absl::Status added =
        AddSamples(*shared.store, id,
                   {.layer = layer, .positions = Positions(0, 300), .queries = queries.view()});
    ASSERT_TRUE(added.ok()) << added;
  }
}

TEST(QuerySamples, AreFreedWhenTheirPromptIsRetained) {
  testing::PressureStore shared(64);
  const uint64_t id = shared.Fill(testing::Prompt(1, 300));
  AddToPrompt(shared, id);
  EXPECT_GT(shared.used_bytes(), 3 * testing::kSegmentBytes);
  shared.Drop(id);
  EXPECT_EQ(shared.used_bytes(), 2 * testing::kSegmentBytes);
}

// Three segments and the samples make room for five segments, the segments alone do not.
TEST(QuerySamples, CountWhenAnIdleSequenceIsEvicted) {
  StoreOptions options = testing::PressureOptions();
  options.evict_idle_after = absl::Nanoseconds(1);
  testing::PressureStore shared(5, options);
  const uint64_t idle = shared.Fill(testing::Prompt(1, 300));
  AddToPrompt(shared, idle);
  absl::SleepFor(absl::Milliseconds(2));
  const auto admission =
      shared.store->Admit(kTenant, shared.cache_id, {.prefill_tokens = 640, .index = {}});
  ASSERT_TRUE(admission.ok()) << admission.status();
  EXPECT_EQ(admission->verdict, Verdict::kFitsAfterEviction);
  EXPECT_EQ(admission->bytes_to_evict, shared.used_bytes());
  shared.Fill(testing::Prompt(2, 640));
  EXPECT_EQ(shared.Read(idle).code(), absl::StatusCode::kNotFound);
}

TEST(QuerySamples, AllQueryHeadsAreRepresented) {
  for (const uint32_t heads : {1u, 2u, 3u, 8u, 16u, 64u}) {
    for (const uint32_t positions : {1u, 512u, 576u, 1024u}) {
      const SampledQueries samples{.position_count = positions, .queries_per_position = heads};
      const uint64_t gap = SampleGap(samples, 4096);
      std::vector<bool> seen(heads);
      uint64_t count = 0;
      for (uint64_t i = 0; i < uint64_t{positions} * heads; i += gap, ++count) {
        seen[i % heads] = true;
      }
      EXPECT_LE(count, 4096u);
      EXPECT_EQ(std::count(seen.begin(), seen.end(), false), 0) << heads << " " << positions;
    }
  }
}

TEST(QuerySamples, OfALayerAreBounded) {
  TestSequence sequence;
  sequence.Ingest(5000);
  const size_t before = sequence.store().DescribeSequence(kTenant, sequence.id())->used_bytes;
  AddFlatSamples(sequence, Positions(0, 3000));
  AddFlatSamples(sequence, Positions(2000, 5000));
  for (const uint32_t count : SampleCounts(sequence.store(), sequence.id())) {
    EXPECT_LE(count, kMaxSamplePositions);
    EXPECT_GT(count, kMaxSamplePositions / 4);
  }
  const size_t after = sequence.store().DescribeSequence(kTenant, sequence.id())->used_bytes;
  EXPECT_GT(after, before);
  EXPECT_LE(after, before + 2 * kMaxSamplePositions * kQueryHeads * kKeyDim * sizeof(float));
}

TEST(QuerySamples, KeepTheNewestAndEqualGaps) {
  EXPECT_TRUE(KeptSamples({}, 100).empty());
  std::vector<uint32_t> positions(1000);
  std::iota(positions.begin(), positions.end(), 500u);
  EXPECT_EQ(KeptSamples(positions, 1000).size(), 1000u);
  const std::vector<size_t> kept = KeptSamples(positions, 200);
  ASSERT_LE(kept.size(), 200u);
  ASSERT_GT(kept.size(), 150u);
  for (size_t i = 0; i < kSampleWindow; ++i) {
    EXPECT_EQ(kept[kept.size() - 1 - i], 999 - i);
  }
  for (size_t i = 1; i + kSampleWindow < kept.size(); ++i) EXPECT_EQ(kept[i] - kept[i - 1], 8u);
  EXPECT_EQ(kept.front(), 0u);
}

TEST(QuerySamples, AreSharedWithForksAndRemovedWithTheirTokens) {
  TestSequence sequence;
  sequence.Ingest(300);
  AddFlatSamples(sequence, Positions(0, 300, 10));
  Store& store = sequence.store();
  const auto used = [&] { return store.ListCaches("").front().used_bytes; };
  const size_t used_before = used();
  const auto whole = store.ForkSequence(kTenant, sequence.id(), 0, "session");
  const auto part = store.ForkSequence(kTenant, sequence.id(), 128, "session");
  ASSERT_TRUE(whole.ok() && part.ok());
  EXPECT_EQ(used(), used_before);
  EXPECT_EQ(SampleCounts(store, whole->sequence_id), (std::vector<uint32_t>{30, 30}));
  EXPECT_EQ(SampleCounts(store, part->sequence_id), (std::vector<uint32_t>{13, 13}));
  sequence.Truncate(291);  // the open segment stays
  EXPECT_EQ(SampleCounts(store, sequence.id()), (std::vector<uint32_t>{30, 30}));
  sequence.Truncate(290);
  EXPECT_EQ(SampleCounts(store, sequence.id()), (std::vector<uint32_t>{29, 29}));
  sequence.Truncate(0);
  EXPECT_EQ(SampleCounts(store, sequence.id()), (std::vector<uint32_t>{0, 0}));
  EXPECT_TRUE(store.BuildIndex(kTenant, whole->sequence_id, {.index = Weighted(4, 4)}, {}).ok());
  ASSERT_TRUE(store.DropSequence(kTenant, whole->sequence_id).ok());
  ASSERT_TRUE(store.DropSequence(kTenant, part->sequence_id).ok());
  ASSERT_TRUE(store.DropSequence(kTenant, sequence.id()).ok());
  ASSERT_TRUE(store.WaitIdle(SteadyTime::InfiniteFuture()));
  EXPECT_EQ(used(), 0u);
}

TEST(QuerySamples, NewerOnesReplaceThoseOfTheSamePosition) {
  std::vector<double> errors;
  for (const bool replaced : {false, true}) {
    TestSequence sequence;
    sequence.Ingest(300);
    const auto positions = Positions(0, 300, 3);
    for (const LayerModel& model : sequence.layers()) {
      std::mt19937_64 random(3);
      Floats wrong = RandomFloats(random, {100, kQueryHeads, kKeyDim});
      for (size_t i = 0; i < wrong.data.size(); ++i) {
        if (i % kKeyDim % 8 == 3) wrong.data[i] = 0;
      }
      ASSERT_TRUE(AddSamples(sequence.store(), sequence.id(),
                             {.layer = model.group.layers.front(),
                              .positions = positions,
                              .queries = wrong.view()})
                      .ok());
    }
    if (replaced) AddFlatSamples(sequence, positions);
    EXPECT_EQ(SampleCounts(sequence.store(), sequence.id()), (std::vector<uint32_t>{100, 100}));
    sequence.Build(Weighted(4, 4));
    errors.push_back(ScoreError(sequence, Weighted(4, 4)));
  }
  EXPECT_LT(errors[1], 0.5 * errors[0]);
}

TEST(QuerySamples, RefusedOnesChangeNothing) {
  CacheSpec spec = SmallSpec();
  spec.groups.push_back({.kind = LayerKind::kFull,
                         .layers = {5},
                         .kv_heads = 2,
                         .query_heads = 4,
                         .key_dim = 32,
                         .value_dim = 40,
                         .dtype = kernels::DType::kF16});
  spec.groups[0].dtype = kernels::DType::kF16;
  TestSequence sequence(spec);
  sequence.Ingest(200);
  Store& store = sequence.store();
  std::mt19937_64 random(1);
  Floats queries = RandomFloats(random, {2, kQueryHeads, kKeyDim});
  const std::string before = testing::Dump(store);
  const auto field = [&](uint32_t layer, std::vector<uint64_t> positions, const Floats& tensor) {
    const absl::Status refused =
        AddSamples(store, sequence.id(), {layer, std::move(positions), tensor.view()});
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_EQ(testing::Dump(store), before);
    return FieldOf(refused);
  };
  EXPECT_EQ(field(2, {0, 1}, queries), "layer");
  EXPECT_EQ(field(5, {0, 1}, queries), "layer");
  EXPECT_EQ(field(1, {1, 1}, queries), "positions[1]");
  EXPECT_EQ(field(1, {2, 1}, queries), "positions[1]");
  EXPECT_EQ(field(1, {0, uint64_t{1} << 40}, queries), "positions[1]");
  EXPECT_EQ(field(1, {0, 200}, queries), "query_samples.positions");
  EXPECT_EQ(field(1, {0, 1, 2}, queries), "queries.shape");
  EXPECT_EQ(field(1, {}, queries), "queries.shape");
  queries.data[kKeyDim + 5] = std::nanf("");
  EXPECT_EQ(field(1, {0, 1}, queries), "queries");
  queries.data[kKeyDim + 5] = 1e6f;  // beyond f16
  EXPECT_EQ(field(1, {0, 1}, queries), "queries");
  queries.data[kKeyDim + 5] = 1.0f;
  queries.shape = {2, kQueryHeads * 2, kKeyDim / 2};
  EXPECT_EQ(field(1, {0, 1}, queries), "queries.shape");
}

TEST(QuerySamples, ArriveWithTheRowsOfTheirTokens) {
  TestSequence sequence;
  const LayerModel& model = sequence.layer(1);
  const Floats keys = sequence.RandomKeys(model, 10), values = sequence.RandomValues(model, 10);
  std::mt19937_64 random(1);
  const Floats queries = RandomFloats(random, {1, kQueryHeads, kKeyDim});
  auto ingest = sequence.store().BeginIngest(kTenant, sequence.id());
  ASSERT_TRUE(ingest.ok());
  ASSERT_TRUE(
      (*ingest)->AddSamples({.layer = 1, .positions = {9}, .queries = queries.view()}).ok());
  ASSERT_TRUE((*ingest)->Write(0, {.layer = 1, .keys = keys.view(), .values = values.view()}).ok());
  ASSERT_TRUE((*ingest)->Commit().ok());
  EXPECT_EQ(SampleCounts(sequence.store(), sequence.id()), (std::vector<uint32_t>{1, 0}));
}

}  // namespace
}  // namespace pqcached::kvstore
