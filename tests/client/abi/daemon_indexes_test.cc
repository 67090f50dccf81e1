// Index types and the options of selections by them, against a real pqcached on both paths.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/daemon.h"
#include "tests/client/decode_case.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::ExpectAttention;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;

class DaemonIndexesTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  Daemon daemon_;
  Client client_ = daemon_.OpenClient("default", GetParam());
};

// Graphs over keys, of a build and of a live sequence, are searched by both paths and in steps.
TEST_P(DaemonIndexesTest, GraphsAreSearchedLikeAnyIndex) {
  constexpr uint64_t kTokens = 2000, kFew = 8;
  const Layer rows(kTokens + 1, 3);
  Cache cache = Must(client_.OpenCache(testing::SpecOf("graph", {0})));
  const Index graph = Must(Index::Make("graph", {{"samples", uint64_t{64}}}));
  EXPECT_EQ(graph.kind, PQC_INDEX_GRAPH);
  constexpr uint64_t kHeadNumbers = Layer::kQueryHeads * Layer::kKeyDim;
  std::vector<uint64_t> positions;
  for (uint64_t i = 0; i < 64; ++i) positions.push_back(i * 30);
  std::vector<float> queries(64 * kHeadNumbers);
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  for (float& number : queries) number = normal(random);
  const QuerySamples samples{
      0, positions, Tensor(queries.data(), PQC_F32, {64, Layer::kQueryHeads, Layer::kKeyDim})};
  const auto fill = [&](const SequenceOptions& options) {
    Sequence sequence = Must(cache.CreateSequence(options));
    MustBeOk(sequence.Ingest(0, 0, rows.keys(0, kTokens), rows.values(0, kTokens)));
    return sequence;
  };
  Sequence built = fill({});
  const Status without = built.BuildIndex({.index = graph});
  EXPECT_EQ(without.code(), PQC_FAILED_PRECONDITION) << without.ToString();
  EXPECT_EQ(without.field(), "options.index");
  MustBeOk(built.AddQuerySamples({&samples, 1}));
  MustBeOk(built.BuildIndex({.index = graph}));
  Sequence live = fill({.live_index = LiveIndex{.index = graph}});
  MustBeOk(live.AddQuerySamples({&samples, 1}));
  MustBeOk(live.BuildIndex({.index = graph}));
  Sequence attached = Must(cache.Attach(live.id()));

  for (Sequence* sequence : {&built, &live, &attached}) {
    size_t found = 0;
    for (size_t q = 0; q < 20; ++q) {
      const Tensor numbers(queries.data() + q * kHeadNumbers, PQC_F32,
                           {Layer::kQueryHeads, Layer::kKeyDim});
      const Query query{.layer = 0, .query_position = kTokens, .queries = numbers};
      Selection selection{.index = graph, .window_tokens = 1, .retrieved_tokens = kFew};
      selection.group_rule = PQC_PER_QUERY_HEAD;
      const std::vector<uint32_t> by_graph = Must(sequence->TopK(query, selection)).positions;
      selection.index = Index::Flat();
      const std::vector<uint32_t> best = Must(sequence->TopK(query, selection)).positions;
      ASSERT_EQ(by_graph.size(), best.size());
      for (size_t i = 0; i < best.size(); i += kFew) {
        std::vector<uint32_t> common;
        std::set_intersection(&best[i], &best[i] + kFew, &by_graph[i], &by_graph[i] + kFew,
                              std::back_inserter(common));
        found += common.size();
      }
      // A step attends to the same tokens.
      selection.index = graph;
      const StepItem items[] = {{sequence, kTokens}};
      Step step = Must(client_.BeginStep(items, &selection));
      const Tensor of_step(queries.data() + q * kHeadNumbers, PQC_F32,
                           {1, Layer::kQueryHeads, Layer::kKeyDim});
      const Attention room{.output = std::vector<float>(Layer::kQueryHeads * Layer::kValueDim),
                           .lse = std::vector<float>(Layer::kQueryHeads)};
      Attention attention = room, expected = room;
      MustBeOk(step.Attend(0, of_step, attention.output, attention.lse, &selection));
      const std::vector<int32_t> lists(by_graph.begin(), by_graph.end());
      MustBeOk(step.AttendPositions(0, of_step,
                                    {.positions = lists, .list_count = Layer::kQueryHeads},
                                    expected.output, expected.lse));
      ExpectAttention(attention, expected);
    }
    EXPECT_GT(found, 20 * Layer::kQueryHeads * kFew * 3 / 4);
  }
}

// Clusters estimate the tokens that a selection leaves out, in single calls and in steps.
TEST_P(DaemonIndexesTest, ATailIsEstimatedByClusters) {
  constexpr uint64_t kTokens = 2000;
  const Layer rows(kTokens + 1, 3);
  Cache cache = Must(client_.OpenCache(testing::SpecOf("tail", {0})));
  Sequence sequence = Must(cache.CreateSequence({}));
  MustBeOk(sequence.Ingest(0, 0, rows.keys(0, kTokens), rows.values(0, kTokens)));
  const std::vector<float> numbers(Layer::kQueryHeads * Layer::kKeyDim, 0.3f);
  const Query query{.layer = 0,
                    .query_position = kTokens,
                    .queries = Tensor(numbers, {Layer::kQueryHeads, Layer::kKeyDim})};
  Selection selection{.index = Index::Flat(),
                      .window_tokens = 1,
                      .retrieved_tokens = kTokens / 20,
                      .tail_estimate = true};
  const Status without = sequence.Attend(query, selection).status();
  EXPECT_EQ(without.code(), PQC_FAILED_PRECONDITION) << without.ToString();
  EXPECT_EQ(without.field(), "selection.tail_estimate");
  const Index clusters = Must(Index::Make("clusters", {{"tokens", uint64_t{16}}}));
  EXPECT_EQ(clusters.kind, PQC_INDEX_CLUSTERS);
  MustBeOk(sequence.BuildIndex({.index = clusters}));

  const Attention full =
      Must(sequence.Attend(query, {.index = Index::Flat(), .window_tokens = 1, .ratio = 1.0}));
  const auto error = [&full](const Attention& found) {
    double sum = 0;
    for (size_t i = 0; i < full.output.size(); ++i) {
      sum += std::pow(found.output[i] - full.output[i], 2.0);
    }
    return std::sqrt(sum);
  };
  // A step finds what was built after the client has mapped the sequence.
  {
    Sequence other = Must(cache.CreateSequence({}));
    MustBeOk(other.Ingest(0, 0, rows.keys(0, kTokens), rows.values(0, kTokens)));
    Selection plain = selection;
    plain.tail_estimate = false;
    Must(other.Attend(query, plain));
    MustBeOk(other.BuildIndex({.index = clusters}));
    const StepItem items[] = {{&other, kTokens}};
    Step step = Must(client_.BeginStep(items, &selection));
    std::vector<float> output(Layer::kQueryHeads * Layer::kValueDim), lse(Layer::kQueryHeads);
    MustBeOk(step.Attend(0, Tensor(numbers, {1, Layer::kQueryHeads, Layer::kKeyDim}), output, lse,
                         nullptr));
  }
  for (const bool per_query_head : {false, true}) {
    selection.group_rule = per_query_head ? PQC_PER_QUERY_HEAD : PQC_SUM_SOFTMAX;
    const Attention estimated = Must(sequence.Attend(query, selection));
    Selection plain = selection;
    plain.tail_estimate = false;
    EXPECT_LT(error(estimated), 0.5 * error(Must(sequence.Attend(query, plain))));
    const StepItem items[] = {{&sequence, kTokens}};
    Step step = Must(client_.BeginStep(items, &selection));
    Attention attention{.output = std::vector<float>(Layer::kQueryHeads * Layer::kValueDim),
                        .lse = std::vector<float>(Layer::kQueryHeads)};
    MustBeOk(step.Attend(0, Tensor(numbers, {1, Layer::kQueryHeads, Layer::kKeyDim}),
                         attention.output, attention.lse, nullptr));
    ExpectAttention(attention, estimated);
  }
}

// A decode call merges the estimate with sink and window, and counts tokens by attention mass.
TEST_P(DaemonIndexesTest, DecodeCallsTakeBothOptions) {
  constexpr uint64_t kTokens = 1500;
  const Layer rows(kTokens + 1, 3);
  Cache cache = Must(client_.OpenCache(testing::SpecOf("decode", {0})));
  Sequence sequence = Must(cache.CreateSequence({}));
  MustBeOk(sequence.Ingest(0, 0, rows.keys(0, kTokens), rows.values(0, kTokens)));
  MustBeOk(
      sequence.BuildIndex({.index = Must(Index::Make("clusters", {{"tokens", uint64_t{16}}}))}));
  const std::vector<float> numbers(Layer::kQueryHeads * Layer::kKeyDim, 0.3f);
  const Tensor queries(numbers, {1, Layer::kQueryHeads, Layer::kKeyDim});
  std::vector<uint32_t> counts(1);
  const auto decode = [&](Selection selection) {
    selection.index = Index::Flat();
    selection.sink_tokens = 16;
    selection.window_tokens = 32;
    std::vector<float> output(Layer::kQueryHeads * Layer::kValueDim);
    const StepItem items[] = {{&sequence, kTokens}};
    Step step = Must(client_.BeginStep(items, &selection));
    MustBeOk(step.Decode(0, queries, rows.keys(kTokens, kTokens + 1),
                         rows.values(kTokens, kTokens + 1), output, {}, nullptr, counts));
    return output;
  };
  const std::vector<float> full = decode({.ratio = 1.0});
  const auto error = [&full](const std::vector<float>& output) {
    double sum = 0;
    for (size_t i = 0; i < full.size(); ++i) sum += std::pow(output[i] - full[i], 2.0);
    return std::sqrt(sum);
  };
  const double plain = error(decode({.retrieved_tokens = 75}));
  EXPECT_LT(error(decode({.retrieved_tokens = 75, .tail_estimate = true})), 0.5 * plain);
  decode({.attention_mass = 0.3});
  const uint32_t few = counts[0];
  decode({.attention_mass = 0.8});
  EXPECT_GT(few, 0u);
  EXPECT_LT(few, counts[0]);
  EXPECT_LT(counts[0], kTokens - 48);
}

// Each item of a step has its own number of tokens for a share of the attention.
TEST_P(DaemonIndexesTest, TokensAreCountedByAttentionMass) {
  constexpr uint64_t kTokens = 900, kHeadNumbers = Layer::kQueryHeads * Layer::kKeyDim;
  Cache cache = Must(client_.OpenCache(testing::SpecOf("mass", {0})));
  const Layer rows[] = {Layer(kTokens + 1, 3), Layer(kTokens + 1, 4)};
  std::vector<Sequence> sequences;
  for (const Layer& layer : rows) {
    sequences.push_back(Must(cache.CreateSequence({})));
    MustBeOk(sequences.back().Ingest(0, 0, layer.keys(0, kTokens), layer.values(0, kTokens)));
    MustBeOk(sequences.back().BuildIndex({.index = Index::Pq(4, 8)}));
  }
  std::vector<float> numbers(2 * kHeadNumbers);
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = (i < kHeadNumbers ? 3.0f : 1.0f) * normal(random);  // the first attends to fewer
  }
  const Selection selection{.index = Index::Pq(4, 8),
                            .sink_tokens = 4,
                            .window_tokens = 20,
                            .attention_mass = 0.8,
                            .least_tokens = 3};
  std::vector<Selected> alone;
  for (size_t i = 0; i < 2; ++i) {
    const Tensor queries(numbers.data() + i * kHeadNumbers, PQC_F32,
                         {Layer::kQueryHeads, Layer::kKeyDim});
    const Query query{.layer = 0, .query_position = kTokens, .queries = queries};
    alone.push_back(Must(sequences[i].TopK(query, selection)));
    Selection counted{.index = Index::Pq(4, 8), .sink_tokens = 4, .window_tokens = 20};
    counted.retrieved_tokens = alone[i].count;
    EXPECT_EQ(alone[i].positions, Must(sequences[i].TopK(query, counted)).positions);
    Selection capped = selection;
    capped.most_tokens = 10;
    EXPECT_EQ(Must(sequences[i].TopK(query, capped)).count, 10u);
  }
  EXPECT_LT(alone[0].count, alone[1].count);
  EXPECT_LT(alone[1].count, kTokens - 24);
  const StepItem items[] = {{&sequences[0], kTokens}, {&sequences[1], kTokens}};
  const Tensor queries(numbers, {2, Layer::kQueryHeads, Layer::kKeyDim});
  std::vector<float> output(2 * Layer::kQueryHeads * Layer::kValueDim), lse(2 * Layer::kQueryHeads);
  std::vector<uint32_t> counts(2);
  {
    Step step = Must(client_.BeginStep(items, &selection));
    const Step::Positions of_step = Must(step.TopK(0, queries));
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_EQ(of_step.counts[i], alone[i].count);
      const auto begin = of_step.positions.begin() + static_cast<ptrdiff_t>(of_step.offsets[i]);
      EXPECT_TRUE(std::equal(alone[i].positions.begin(), alone[i].positions.end(), begin));
    }
    MustBeOk(step.Attend(0, queries, output, lse, nullptr, counts));
    EXPECT_EQ(counts, (std::vector<uint32_t>{alone[0].count, alone[1].count}));
  }
  // The largest of an item's tokens, which select one by one: of a flat query and a peaked one.
  std::vector<float> flat_first(numbers.begin() + kHeadNumbers, numbers.end());
  flat_first.insert(flat_first.end(), numbers.begin(), numbers.begin() + kHeadNumbers);
  const StepItem both[] = {{&sequences[0], kTokens, 2}};
  Step by_token = Must(client_.BeginStep(both, &selection, 0, PQC_STEP_SELECT_PER_TOKEN));
  const auto attend = [&](const std::vector<float>& of_tokens) {
    counts.resize(1);
    MustBeOk(by_token.Attend(0, Tensor(of_tokens, {2, Layer::kQueryHeads, Layer::kKeyDim}), output,
                             lse, nullptr, counts));
    return counts[0];
  };
  EXPECT_EQ(attend(numbers), attend(flat_first));
}

INSTANTIATE_TEST_SUITE_P(Paths, DaemonIndexesTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_REMOTE ? "Remote" : "Local";
                         });

}  // namespace
}  // namespace pqcached
