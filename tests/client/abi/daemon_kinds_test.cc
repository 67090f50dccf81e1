// Layers of kinds selected, full and window in one cache, against a real pqcached on both paths.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/daemon.h"
#include "tests/client/decode_case.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::DecodeArguments;
using testing::DecodeItem;
using testing::DecodeLayer;
using testing::ExpectAttention;
using testing::FillModel;
using testing::FullAttention;
using testing::GroupOf;
using testing::ItemsOf;
using testing::Layer;
using testing::MakeModel;
using testing::Model;
using testing::Must;
using testing::MustBeOk;
using testing::Range;
using testing::RangeCase;

constexpr uint64_t kSink = 4, kWindow = 16;
constexpr uint32_t kSelected = 0, kFull = 1;
// The layers of kind window, and their windows.
constexpr uint32_t kWindows[] = {24, 1, 1000};
constexpr uint32_t kFirstWindow = 2, kLayers = 5;

LayerGroup WindowGroup(uint32_t layer, uint32_t window_tokens) {
  LayerGroup group = GroupOf({layer}, PQC_F32);
  group.kind = PQC_LAYERS_WINDOW;
  group.window_tokens = window_tokens;
  return group;
}

LayerGroup FullGroup(uint32_t layer) {
  LayerGroup group = GroupOf({layer}, PQC_F32);
  group.kind = PQC_LAYERS_FULL;
  return group;
}

CacheSpec MixedSpec() {
  CacheSpec spec = testing::SpecOf("mixed", {kSelected});
  spec.groups.push_back(FullGroup(kFull));
  for (uint32_t i = 0; i < std::size(kWindows); ++i) {
    spec.groups.push_back(WindowGroup(kFirstWindow + i, kWindows[i]));
  }
  return spec;
}

// Each query token attends to the layer's last `window_tokens` tokens up to itself, without the
// excluded ones.
Attention WindowAttention(const std::vector<DecodeItem>& batch, const DecodeArguments& from,
                          uint32_t layer, uint64_t window_tokens,
                          const std::vector<pqc_token_range>& excluded = {}) {
  Attention attention;
  for (size_t i = 0; i < batch.size(); ++i) {
    for (uint32_t token = 0; token < batch[i].length; ++token) {
      const uint64_t end = batch[i].position + token + 1;
      std::vector<uint32_t> seen = Range(end - std::min(window_tokens, end), end);
      std::erase_if(seen, [&](uint32_t position) {
        return std::any_of(excluded.begin(), excluded.end(), [&](const pqc_token_range& range) {
          return range.begin <= position && position < range.end;
        });
      });
      for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
        from.cases[i].AddTokens((*batch[i].model)[layer], token, head, seen, &attention);
      }
    }
  }
  return attention;
}

class DaemonKindsTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  bool local() const { return GetParam() == PQC_PATH_ONLY_LOCAL; }

  void KillWorker() {
    const std::string pid = std::to_string(daemon_.process().pid());
    std::ifstream workers("/proc/" + pid + "/task/" + pid + "/children");
    pid_t worker = 0;
    ASSERT_TRUE(workers >> worker);
    ASSERT_EQ(kill(worker, SIGKILL), 0);
    while (kill(worker, 0) == 0) poll(nullptr, 0, 1);  // until the supervisor has noticed it
  }

  // Decodes all layers of a step: exactly in those that select nothing.
  void ExpectExactStep(const std::vector<DecodeItem>& batch, uint32_t flags = 0) {
    Step step = Must(client_.BeginStep(ItemsOf(batch), &few_, 0, flags));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      SCOPED_TRACE(::testing::Message() << "layer " << layer << " at " << batch[0].position);
      const DecodeArguments from(batch, layer);
      Attention attention;
      MustBeOk(DecodeLayer(step, layer, from, &attention));
      if (layer == kSelected) continue;
      ExpectAttention(attention, layer == kFull ? FullAttention(batch, from, layer)
                                                : WindowAttention(batch, from, layer,
                                                                  kWindows[layer - kFirstWindow]));
      if (HasFatalFailure()) return;
    }
    MustBeOk(step.End());
  }

  Daemon daemon_;
  Client client_ = daemon_.OpenClient("default", GetParam());
  Cache cache_ = Must(client_.OpenCache(MixedSpec()));
  const Selection few_ = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.2};
  const Model first_ = MakeModel(420, 1, kLayers), second_ = MakeModel(420, 11, kLayers),
              third_ = MakeModel(420, 21, kLayers);
};

TEST_P(DaemonKindsTest, DecodingIsExactWhereNothingIsSelected) {
  Sequence a = FillModel(cache_, first_, 300, kSink), b = FillModel(cache_, second_, 250, kSink),
           c = FillModel(cache_, third_, 9, kSink);
  const auto step = [&](uint32_t number, uint32_t flags = 0) {
    ExpectExactStep({{&a, &first_, 300 + number},
                     {&b, &second_, 250 + 3 * number, 3},
                     {&c, &third_, 9 + 2 * number, 2}},
                    flags);
  };
  step(0);
  const uint64_t before = Must(client_.Count()).rpcs;
  for (uint32_t number = 1; number < 40 && !HasFatalFailure(); ++number) step(number);
  if (local()) {
    EXPECT_EQ(Must(client_.Count()).rpcs, before);
  }
  step(40, PQC_STEP_SELECT_PER_TOKEN);
  for (Sequence* sequence : {&a, &b, &c}) MustBeOk(sequence->Flush());
  EXPECT_EQ(Must(a.Describe()).token_count, 341u);
}

TEST_P(DaemonKindsTest, ExcludedTokensAreLeftOut) {
  Sequence sequence = FillModel(cache_, first_, 300, kSink);
  Selection masked = few_;
  masked.excluded = {{2, 50}, {280, 283}, {290, 295}};
  const std::vector<DecodeItem> batch = {{&sequence, &first_, 300, 4}};
  Step step = Must(client_.BeginStep(ItemsOf(batch), &masked));
  const DecodeArguments from(batch, kFirstWindow);
  Attention attention;
  MustBeOk(DecodeLayer(step, kFirstWindow, from, &attention));
  ExpectAttention(attention, WindowAttention(batch, from, kFirstWindow, 24, masked.excluded));
  const DecodeArguments of_full(batch, kFull);
  MustBeOk(DecodeLayer(step, kFull, of_full, &attention));
  ExpectAttention(attention, WindowAttention(batch, of_full, kFull, 1000, masked.excluded));
}

// Of the index that the selection names, and of its budget, nothing is left but for layer 0.
TEST_P(DaemonKindsTest, StepsSelectAllOrNothing) {
  Sequence sequence = FillModel(cache_, first_, 300, kSink);
  constexpr uint32_t kCandidates = 300 + 1 - kSink - kWindow;
  for (const uint32_t flags : {0u, uint32_t{PQC_STEP_SELECT_PER_TOKEN}}) {
    const std::vector<DecodeItem> batch = {{&sequence, &first_, 300, 2}};
    Step step = Must(client_.BeginStep(ItemsOf(batch), &few_, 0, flags));
    for (uint32_t layer = kFull; layer < kLayers; ++layer) {
      SCOPED_TRACE(layer);
      const DecodeArguments from(batch, layer);
      const uint32_t count = layer == kFull ? kCandidates : 0;
      Attention attention;
      attention.output.assign(2 * Layer::kQueryHeads * Layer::kValueDim, NAN);
      attention.lse.assign(2 * Layer::kQueryHeads, NAN);
      uint32_t counts[] = {77};
      MustBeOk(step.Attend(layer, from.query_tensor(), attention.output, attention.lse, nullptr,
                           counts));
      EXPECT_EQ(counts[0], count);
      const pqc_token_range taken = {kSink, kSink + count};
      ExpectAttention(attention, from.cases[0].Expected(first_[layer], taken));
      const auto positions = Must(step.TopK(layer, from.query_tensor()));
      EXPECT_EQ(positions.counts, std::vector<uint32_t>{count});
      const uint64_t selections = flags ? 2 : 1;
      ASSERT_EQ(positions.positions.size(), selections * Layer::kKvHeads * count);
      for (size_t i = 0; i < positions.positions.size(); ++i) {
        ASSERT_EQ(positions.positions[i], kSink + i % count);
      }
      if (flags) continue;
      PageOptions pages{.page_tokens = 16};
      const auto bare = Must(step.TopKPages(layer, from.query_tensor(), pages));
      EXPECT_EQ(bare.lengths, std::vector<uint32_t>{layer == kFull ? 18u : 0u});
      pages.flags = PQC_PAGES_WITH_SINK | PQC_PAGES_WITH_WINDOW;
      const auto with_ends = Must(step.TopKPages(layer, from.query_tensor(), pages));
      EXPECT_EQ(with_ends.lengths, std::vector<uint32_t>{layer == kFull ? 19u : 0u});
    }
  }
}

TEST_P(DaemonKindsTest, CallsOfASequenceTakeAllOrNothing) {
  Sequence sequence = FillModel(cache_, first_, 300, kSink);
  const RangeCase query(1, 299, 5);
  constexpr uint32_t kCandidates = 300 - kSink - kWindow;
  for (uint32_t layer = kFull; layer < kLayers; ++layer) {
    SCOPED_TRACE(layer);
    const uint32_t count = layer == kFull ? kCandidates : 0;
    const Attention attention = Must(sequence.Attend(query.query(layer), few_));
    ExpectAttention(attention, query.Expected(first_[layer], {kSink, kSink + count}));
    EXPECT_EQ(attention.selected.count, count);
    EXPECT_EQ(attention.selected.window_tokens, layer == kFull ? kWindow : 0);
    const Selected selected = Must(sequence.TopK(query.query(layer), few_));
    EXPECT_EQ(selected.count, count);
    ASSERT_EQ(selected.positions.size(), Layer::kKvHeads * count);
    if (count > 0) {
      EXPECT_EQ(selected.positions.front(), kSink);
      EXPECT_EQ(selected.positions.back(), kSink + count - 1);
    }
    ExpectAttention(Must(sequence.AttendRange(query.query(layer), {20, 290})),
                    query.Expected(first_[layer], {20, 290}));
    EXPECT_TRUE(sequence.Score(query.query(layer), Index::Flat(), {0, 300}).ok());
    const Status scored = sequence.Score(query.query(layer), Index::Pq(2, 6), {0, 300}).status();
    EXPECT_EQ(scored.code(), PQC_FAILED_PRECONDITION) << scored.ToString();
  }
}

TEST_P(DaemonKindsTest, FullLayersNeedNoIndex) {
  Sequence sequence = Must(cache_.CreateSequence());
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    MustBeOk(sequence.Ingest(layer, 0, first_[layer].keys(0, 300), first_[layer].values(0, 300)));
  }
  const RangeCase query(1, 299, 5);
  ExpectAttention(Must(sequence.Attend(query.query(kFull), few_)),
                  query.Expected(first_[kFull], {kSink, 300 - kWindow}));
  EXPECT_EQ(sequence.Attend(query.query(kSelected), few_).status().code(), PQC_FAILED_PRECONDITION);
  if (local()) {
    const auto progress = Must(sequence.Progress());
    EXPECT_EQ(progress.layer_count, kLayers);
    EXPECT_EQ(progress.layers_ready, kLayers - 1);
  }
  const std::vector<DecodeItem> batch = {{&sequence, &first_, 300, 2}};
  Step step = Must(client_.BeginStep(ItemsOf(batch), nullptr));
  const DecodeArguments from(batch, kFull);
  Attention attention;
  MustBeOk(DecodeLayer(step, kFull, from, &attention, &few_));
  ExpectAttention(attention, FullAttention(batch, from, kFull));
  { const Step closed = std::move(step); }
  MustBeOk(sequence.BuildIndex({.iterations = 3, .seed = 1, .sink_tokens = kSink}));
  ExpectExactStep(batch);
  if (local()) {
    EXPECT_EQ(Must(sequence.Progress()).layers_ready, kLayers);
  }
}

TEST_P(DaemonKindsTest, AllKindsOutliveAKilledWorker) {
  Sequence sequence = FillModel(cache_, first_, 300, kSink);
  for (uint64_t position = 300; position < 360 && !HasFatalFailure(); position += 3) {
    ExpectExactStep({{&sequence, &first_, position, 3}});
    if (position % 15 == 0) {
      MustBeOk(sequence.Flush());
      KillWorker();
      daemon_.AwaitServing();
      // The client's connection to the killed worker fails once more.
      while (sequence.Describe().status().code() == PQC_UNAVAILABLE) poll(nullptr, 0, 1);
    }
  }
  Sequence fork = Must(sequence.Fork(330));
  std::vector<float> keys(Layer::kKvHeads * 330 * Layer::kKeyDim);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    MustBeOk(fork.FetchBlocks(layer, {0, 330}, PQC_KEY, std::as_writable_bytes(std::span(keys))));
    for (uint64_t token = 0; token < 330; ++token) {
      ASSERT_EQ(keys[token * Layer::kKeyDim], first_[layer].key(token, 0)[0]) << token;
    }
  }
  ExpectExactStep({{&fork, &first_, 330, 2}, {&sequence, &first_, 360, 8}});
  const Selected selected = Must(sequence.TopK(RangeCase(1, 359, 7).query(kSelected), few_));
  EXPECT_EQ(selected.count, 72 - kSink - kWindow);
}

TEST_P(DaemonKindsTest, ACacheNeedsNoSelectedLayers) {
  CacheSpec spec = testing::SpecOf("full", {0});
  spec.groups = {FullGroup(0), WindowGroup(1, 24)};
  Cache cache = Must(client_.OpenCache(spec));
  const Model model = MakeModel(400, 3);
  Sequence sequence = Must(cache.CreateSequence());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    MustBeOk(sequence.Ingest(layer, 0, model[layer].keys(0, 300), model[layer].values(0, 300)));
  }
  const Status built = sequence.BuildIndex();
  EXPECT_EQ(built.code(), PQC_FAILED_PRECONDITION) << built.ToString();
  Decoder decoder = Must(Decoder::Open(sequence, few_));
  for (uint64_t position = 300; position < 340; ++position) {
    const std::vector<DecodeItem> batch = {{&sequence, &model, position}};
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const DecodeArguments from(batch, layer);
      Attention attention =
          layer == 0 ? FullAttention(batch, from, layer) : WindowAttention(batch, from, layer, 24);
      std::vector<float> output(Layer::kQueryHeads * Layer::kValueDim);
      MustBeOk(decoder.Decode(layer, {from.queries, {Layer::kQueryHeads, Layer::kKeyDim}},
                              {from.keys, {Layer::kKvHeads, Layer::kKeyDim}},
                              {from.values, {Layer::kKvHeads, Layer::kValueDim}}, output));
      for (size_t i = 0; i < output.size(); ++i) {
        ASSERT_NEAR(output[i], attention.output[i], 1e-4f) << "layer " << layer;
      }
    }
  }
  MustBeOk(sequence.Flush());
  if (local()) {
    EXPECT_EQ(Must(sequence.Progress()).layers_ready, 2u);
  }
}

// Sub-spaces keep pairs together where the rope fields say that halves are pairs.
TEST_P(DaemonKindsTest, TheLayoutOfSubspacesMattersWhereHalvesArePairs) {
  constexpr uint64_t kTokens = 600;
  const Layer rows(kTokens, 3);
  const Query query{.layer = 0, .query_position = kTokens - 1, .queries = rows.queries()};
  const auto fill = [&](pqc_rope_layout rope, std::optional<LiveIndex> live) {
    CacheSpec spec = testing::SpecOf("rope " + std::to_string(rope), {0});
    spec.groups[0].rope_layout = rope;
    spec.groups[0].rotary_dim = Layer::kKeyDim;
    Cache cache = Must(client_.OpenCache(spec));
    Sequence sequence = Must(cache.CreateSequence({.live_index = live}));
    MustBeOk(sequence.Ingest(0, 0, rows.keys(0, kTokens), rows.values(0, kTokens)));
    return sequence;
  };
  const auto select = [&](Sequence& sequence, const Index& index) {
    return Must(sequence.TopK(query, {.index = index, .ratio = 0.2})).positions;
  };
  const auto built = [&](pqc_rope_layout rope, pqc_subspace_layout layout) {
    Sequence sequence = fill(rope, {});
    const Index index = Index::Pq(4, 5, layout);
    MustBeOk(sequence.BuildIndex({.index = index, .iterations = 3, .seed = 1}));
    return select(sequence, index);
  };
  const auto contiguous = built(PQC_ROPE_HALF, PQC_SUBSPACES_CONTIGUOUS);
  EXPECT_NE(built(PQC_ROPE_HALF, PQC_SUBSPACES_PAIRS), contiguous);
  for (const pqc_rope_layout other : {PQC_ROPE_UNKNOWN, PQC_ROPE_NONE, PQC_ROPE_INTERLEAVED}) {
    EXPECT_EQ(built(other, PQC_SUBSPACES_PAIRS), contiguous) << other;
  }
  // An incremental index has its layout too.
  const Index live = Index::Pq(4, 5, PQC_SUBSPACES_CONTIGUOUS);
  Sequence sequence = fill(PQC_ROPE_HALF, LiveIndex{.index = live, .iterations = 3, .seed = 1});
  MustBeOk(sequence.BuildIndex({.index = live}));
  EXPECT_EQ(select(sequence, live).size(), contiguous.size());
  const Status pairs = sequence.TopK(query, {.index = Index::Pq(4, 5), .ratio = 0.2}).status();
  EXPECT_EQ(pairs.code(), PQC_FAILED_PRECONDITION) << pairs.ToString();
}

// An index that is trained on query samples is searched alike by both paths and in steps.
TEST_P(DaemonKindsTest, AWeightedIndexIsTrainedOnSamples) {
  constexpr uint64_t kTokens = 600;
  const Layer rows(kTokens + 1, 3);
  Cache cache = Must(client_.OpenCache(testing::SpecOf("weighted", {0})));
  Sequence sequence = Must(cache.CreateSequence());
  MustBeOk(sequence.Ingest(0, 0, rows.keys(0, kTokens), rows.values(0, kTokens)));
  constexpr uint64_t kHeadNumbers = Layer::kQueryHeads * Layer::kKeyDim;
  std::vector<uint64_t> positions;
  std::vector<float> queries;
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  for (uint64_t position = 0; position < kTokens; position += 2) {
    positions.push_back(position);
    for (uint64_t i = 0; i < kHeadNumbers; ++i) {
      queries.push_back(normal(random) * (i % 8 == 3 ? 1.0f : 0.02f));
    }
  }
  // Every other query is of another tensor.
  const int64_t stride = 2 * kHeadNumbers;
  std::vector<float> spaced(2 * queries.size(), std::nanf(""));
  for (size_t i = 0; i < queries.size(); ++i) {
    spaced[i / kHeadNumbers * 2 * kHeadNumbers + i % kHeadNumbers] = queries[i];
  }
  const QuerySamples samples{
      0, positions,
      Tensor(spaced.data(), PQC_F32, {positions.size(), Layer::kQueryHeads, Layer::kKeyDim},
             {stride, Layer::kKeyDim, 1})};
  MustBeOk(sequence.AddQuerySamples({&samples, 1}));
  const Index weighted = Index::Pq(4, 5, PQC_SUBSPACES_WEIGHTED);
  const Index contiguous = Index::Pq(4, 5, PQC_SUBSPACES_CONTIGUOUS);
  for (const Index& index : {weighted, contiguous}) {
    MustBeOk(sequence.BuildIndex({.index = index, .iterations = 3, .seed = 1}));
  }
  // Selections by the weighted index are nearer to those of exact scores.
  const auto hits = [&](const Index& index) {
    size_t found = 0;
    for (size_t q = 0; q < 20; ++q) {
      const Query query{.layer = 0,
                        .query_position = kTokens - 1,
                        .queries = Tensor(queries.data() + q * kHeadNumbers, PQC_F32,
                                          {Layer::kQueryHeads, Layer::kKeyDim})};
      const auto exact = Must(sequence.TopK(query, {.index = Index::Flat(), .ratio = 0.1}));
      const auto coded = Must(sequence.TopK(query, {.index = index, .ratio = 0.1}));
      std::vector<uint32_t> common;
      std::set_intersection(exact.positions.begin(), exact.positions.begin() + 60,
                            coded.positions.begin(), coded.positions.begin() + 60,
                            std::back_inserter(common));
      found += common.size();
    }
    return found;
  };
  EXPECT_GT(hits(weighted), hits(contiguous) * 5 / 4);
  MustBeOk(sequence.Flush());
}

INSTANTIATE_TEST_SUITE_P(Paths, DaemonKindsTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
