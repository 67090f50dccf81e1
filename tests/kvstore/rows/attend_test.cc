#include <numeric>

#include "kernels/attend/merge.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using testing::AttendExactly;
using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::Partial;
using testing::Pq;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;

// Bounds of kernels/attend/attend.h for values of magnitude about 4, with bf16 dot products the wide one.
double OutputTolerance(kernels::DType dtype) {
  return dtype == kernels::DType::kBf16 ? 2e-2 : 1e-4;
}
double LseTolerance(kernels::DType dtype) { return dtype == kernels::DType::kBf16 ? 1e-3 : 5e-5; }

CacheSpec SpecOf(kernels::DType dtype, uint32_t group_size) {
  CacheSpec spec = SmallSpec();
  spec.groups[0].layers = {1};
  spec.groups[0].dtype = dtype;
  spec.groups[0].query_heads = 2 * group_size;
  return spec;
}

void ExpectAttention(const LayerModel& model, const Floats& query, const Attention& attention,
                     const std::vector<std::vector<uint32_t>>& tokens_per_head) {
  const uint32_t group = model.group.group_size();
  for (uint32_t head = 0; head < model.group.query_heads; ++head) {
    const uint32_t kv_head = head / group;
    const Partial exact = AttendExactly(model, &query.data[head * model.group.key_dim], kv_head,
                                        tokens_per_head[kv_head]);
    ASSERT_NEAR(attention.lse[head], exact.lse, LseTolerance(model.group.dtype));
    for (uint32_t i = 0; i < model.group.value_dim; ++i) {
      ASSERT_NEAR(attention.output[head * model.group.value_dim + i], exact.output[i],
                  OutputTolerance(model.group.dtype));
    }
  }
}

class AttendAtRatioOne
    : public ::testing::TestWithParam<std::tuple<kernels::DType, uint32_t, uint32_t>> {};

TEST_P(AttendAtRatioOne, EqualsFullAttentionInDoublePrecision) {
  const auto [dtype, group_size, tokens] = GetParam();
  TestSequence sequence(SpecOf(dtype, group_size));
  sequence.Ingest(tokens);
  sequence.Build(Pq(2, 4), 2);
  const LayerModel& model = sequence.layer(1);
  const Floats query = sequence.RandomQuery(model);
  std::vector<uint32_t> all(tokens);
  std::iota(all.begin(), all.end(), 0u);
  for (const IndexDescriptor& index : {Pq(2, 4), IndexDescriptor{}}) {
    const auto attention = sequence.store().Attend(
        kTenant, sequence.id(), {.layer = 1, .query_position = tokens - 1, .queries = query.view()},
        {.index = index, .budget_ratio = 1.0}, true);
    ASSERT_TRUE(attention.ok()) << attention.status();
    EXPECT_EQ(attention->selected.count, tokens);
    ExpectAttention(model, query, *attention, {all, all});
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttendAtRatioOne,
                         ::testing::Combine(::testing::Values(kernels::DType::kF16,
                                                              kernels::DType::kBf16,
                                                              kernels::DType::kF32),
                                            ::testing::Values(1u, 4u, 8u),
                                            ::testing::Values(1u, 127u, 128u, 129u, 4097u)));

TEST(Attend, MiddleMergesWithSinkAndWindowToFullAttention) {
  constexpr uint32_t kTokens = 500;
  constexpr uint32_t kSink = 16;
  constexpr uint32_t kWindow = 64;
  TestSequence sequence;
  sequence.Ingest(kTokens - kWindow);  // the window stays with the engine
  sequence.Build(Pq(2, 4));
  LayerModel model = sequence.layer(3);
  model.Append(sequence.RandomKeys(model, kWindow), sequence.RandomValues(model, kWindow));
  const Floats query = sequence.RandomQuery(model);
  const auto middle = sequence.store().Attend(
      kTenant, sequence.id(), {.layer = 3, .query_position = kTokens - 1, .queries = query.view()},
      {.index = Pq(2, 4), .sink_tokens = kSink, .window_tokens = kWindow, .budget_ratio = 1.0},
      false);
  ASSERT_TRUE(middle.ok()) << middle.status();
  EXPECT_EQ(middle->selected.sink_tokens, kSink);
  EXPECT_EQ(middle->selected.window_tokens, kWindow);
  EXPECT_EQ(middle->selected.count, kTokens - kSink - kWindow);

  std::vector<uint32_t> own(kSink);
  std::iota(own.begin(), own.end(), 0u);
  for (uint32_t token = kTokens - kWindow; token < kTokens; ++token) own.push_back(token);
  std::vector<uint32_t> all(kTokens);
  std::iota(all.begin(), all.end(), 0u);
  const uint32_t dim = model.group.value_dim;
  for (uint32_t head = 0; head < model.group.query_heads; ++head) {
    const uint32_t kv_head = head / model.group.group_size();
    const float* head_query = &query.data[head * model.group.key_dim];
    const Partial engine = AttendExactly(model, head_query, kv_head, own);
    const Partial full = AttendExactly(model, head_query, kv_head, all);
    const std::vector<float> engine_output(engine.output.begin(), engine.output.end());
    const auto engine_lse = static_cast<float>(engine.lse);
    const kernels::Partial partials[] = {
        {.output = &middle->output[head * dim], .lse = &middle->lse[head]},
        {.output = engine_output.data(), .lse = &engine_lse}};
    std::vector<float> output(dim);
    float lse = 0;
    kernels::MergePartials({}, {.query_count = 1,
                                .value_dim = dim,
                                .partials = partials,
                                .output = output,
                                .lse = {&lse, 1}});
    EXPECT_NEAR(lse, full.lse, 1e-4);
    for (uint32_t i = 0; i < dim; ++i) EXPECT_NEAR(output[i], full.output[i], 1e-4);
  }
}

TEST(Attend, OverNothingIsZeroWithLseOfMinusInfinity) {
  TestSequence sequence;
  sequence.Ingest(100);
  const Floats query = sequence.RandomQuery(sequence.layer(1));
  const Query asked{.layer = 1, .query_position = 99, .queries = query.view()};
  const auto attention = sequence.store().Attend(
      kTenant, sequence.id(), asked,
      {.index = {}, .sink_tokens = 10, .window_tokens = 10, .budget_ratio = 0.1}, true);
  ASSERT_TRUE(attention.ok()) << attention.status();
  EXPECT_EQ(attention->selected.count, 0u);
  EXPECT_THAT(attention->output, ::testing::Each(0.0f));
  EXPECT_THAT(attention->lse, ::testing::Each(-std::numeric_limits<float>::infinity()));
}

TEST(Attend, OverGivenPositionsEqualsExactAttentionOverThem) {
  CacheSpec spec = SmallSpec();
  spec.groups[0].softcap = 3.0f;
  TestSequence sequence(spec);
  sequence.Ingest(300);
  const LayerModel& model = sequence.layer(1);
  const Floats query = sequence.RandomQuery(model);
  const std::vector<uint32_t> positions = {0, 127, 128, 299, 5, 6, 7, 256};
  const auto attention = sequence.store().AttendPositions(
      kTenant, sequence.id(), {.layer = 1, .query_position = 299, .queries = query.view()},
      positions, 4);
  ASSERT_TRUE(attention.ok()) << attention.status();
  ExpectAttention(model, query, *attention, {{0, 127, 128, 299}, {5, 6, 7, 256}});
}

// The scale and the softcap of the layer have no effect on logits.
TEST(Attend, ByGivenLogitsIsTheirSoftmaxOverTheValues) {
  CacheSpec spec = SmallSpec();
  spec.groups[0].softcap = 3.0f;
  TestSequence sequence(spec);
  sequence.Ingest(300);
  const LayerModel& model = sequence.layer(1);
  const uint32_t heads = model.group.query_heads, group = model.group.group_size();
  std::mt19937_64 random(7);
  Floats logits = testing::RandomFloats(random, {2, heads, 4});
  for (float& logit : logits.data) logit *= 4;
  logits.data[1] = -std::numeric_limits<float>::infinity();
  const std::vector<uint32_t> positions = {0, 127, 128, 299, 5, 6, 7, 256};
  const auto attention = sequence.store().AttendPositions(
      kTenant, sequence.id(),
      {.layer = 1, .query_position = 299, .queries = logits.view(), .has_logits = true}, positions,
      4);
  ASSERT_TRUE(attention.ok()) << attention.status();
  for (uint32_t row = 0; row < 2 * heads; ++row) {
    const uint32_t kv_head = row % heads / group;
    double sum = 0, first = 0;
    for (uint32_t i = 0; i < 4; ++i) {
      const double weight = std::exp(double{logits.data[row * 4 + i]});
      sum += weight;
      first += weight * double{model.value(positions[kv_head * 4 + i], kv_head)[0]};
    }
    EXPECT_NEAR(attention->lse[row], std::log(sum), 5e-5);
    EXPECT_NEAR(attention->output[row * model.group.value_dim], first / sum, 1e-4);
  }
}

TEST(Attend, SeesTheRowsThatWereAppendedAfterTheBuild) {
  TestSequence sequence;
  sequence.Ingest(300);
  sequence.Build(Pq(2, 4));
  for (int i = 0; i < 5; ++i) sequence.Append(70);
  sequence.ExpectRowsMatch();
  const LayerModel& model = sequence.layer(1);
  const Floats query = sequence.RandomQuery(model);
  const auto attention = sequence.store().Attend(
      kTenant, sequence.id(),
      {.layer = 1, .query_position = sequence.tokens() - 1, .queries = query.view()},
      {.index = Pq(2, 4), .budget_ratio = 1.0}, true);
  ASSERT_TRUE(attention.ok()) << attention.status();
  std::vector<uint32_t> all(sequence.tokens());
  std::iota(all.begin(), all.end(), 0u);
  ExpectAttention(model, query, *attention, {all, all});
}

// Each query head reads its own positions, as if it had them for its whole group.
TEST(Attend, OverPositionsPerQueryHeadEqualsAttentionOfEachHead) {
  TestSequence sequence;
  sequence.Ingest(300);
  const LayerModel& model = sequence.layer(1);
  const uint32_t heads = model.group.query_heads, group = model.group.group_size();
  const Floats queries = testing::RandomFloats(sequence.random(), {2, heads, model.group.key_dim});
  const Floats logits = testing::RandomFloats(sequence.random(), {2, heads, 3});
  std::vector<uint32_t> positions;
  for (uint32_t head = 0; head < heads; ++head) {
    for (const uint32_t position : {head, 100 + 7 * head, 299 - head})
      positions.push_back(position);
  }
  for (const bool has_logits : {false, true}) {
    const Query query{.layer = 1,
                      .query_position = 298,
                      .queries = has_logits ? logits.view() : queries.view(),
                      .has_logits = has_logits};
    const auto attend = [&](const std::vector<uint32_t>& of_sets) {
      auto attention = sequence.store().AttendPositions(kTenant, sequence.id(), query, of_sets, 3);
      EXPECT_TRUE(attention.ok()) << attention.status();
      return *std::move(attention);
    };
    const Attention found = attend(positions);
    EXPECT_EQ(found.selected.kv_heads, heads);
    for (uint32_t head = 0; head < heads; ++head) {
      std::vector<uint32_t> of_groups;
      for (uint32_t i = 0; i < model.group.kv_heads; ++i) {
        of_groups.insert(of_groups.end(), positions.begin() + head * 3,
                         positions.begin() + head * 3 + 3);
      }
      const Attention expected = attend(of_groups);
      EXPECT_EQ(expected.selected.kv_heads, heads / group);
      for (const uint32_t row : {head, heads + head}) {
        EXPECT_NEAR(found.lse[row], expected.lse[row], 1e-5);
        for (uint32_t i = 0; i < model.group.value_dim; ++i) {
          const size_t at = size_t{row} * model.group.value_dim + i;
          EXPECT_NEAR(found.output[at], expected.output[at], 1e-5);
        }
      }
    }
  }
}

// The logits of a re-ranking take the place of the keys in the attention.
TEST(Attend, ReRankedEqualsExactAttentionOverTheSelectedTokens) {
  for (const kernels::DType dtype : {kernels::DType::kF16, kernels::DType::kBf16}) {
    for (const float softcap : {0.0f, 3.0f}) {
      CacheSpec spec = SpecOf(dtype, 4);
      spec.groups[0].softcap = softcap;
      TestSequence sequence(spec);
      sequence.Ingest(700);
      sequence.Build(Pq(2, 4), 2);
      const LayerModel& model = sequence.layer(1);
      const Floats query = sequence.RandomQuery(model);
      const auto attention = sequence.store().Attend(
          kTenant, sequence.id(), {.layer = 1, .query_position = 699, .queries = query.view()},
          {.index = Pq(2, 4), .sink_tokens = 5, .rerank_factor = 2.5f, .budget_ratio = 0.2}, true);
      ASSERT_TRUE(attention.ok()) << attention.status();
      const auto& positions = attention->selected.positions;
      const auto count = static_cast<ptrdiff_t>(attention->selected.count);
      ASSERT_EQ(count, 135);
      ExpectAttention(model, query, *attention,
                      {{positions.begin(), positions.begin() + count},
                       {positions.begin() + count, positions.end()}});
    }
  }
}

TEST(Attend, ReRankedForSeveralQueryTokensEqualsAttentionOverTheSelectedTokens) {
  TestSequence sequence;
  sequence.Ingest(700);
  sequence.Build(Pq(2, 4), 2);
  const LayerModel& model = sequence.layer(1);
  const Floats queries =
      testing::RandomFloats(sequence.random(), {3, model.group.query_heads, model.group.key_dim});
  const Query query{.layer = 1, .query_position = 697, .queries = queries.view()};
  const auto reranked = sequence.store().Attend(
      kTenant, sequence.id(), query,
      {.index = Pq(2, 4), .window_tokens = 8, .rerank_factor = 2.0f, .budget_ratio = 0.2}, true);
  ASSERT_TRUE(reranked.ok()) << reranked.status();
  const auto expected = sequence.store().AttendPositions(
      kTenant, sequence.id(), query, reranked->selected.positions, reranked->selected.count);
  ASSERT_TRUE(expected.ok()) << expected.status();
  for (size_t i = 0; i < expected->output.size(); ++i) {
    ASSERT_NEAR(reranked->output[i], expected->output[i], 1e-4) << i;
  }
  for (size_t i = 0; i < expected->lse.size(); ++i) {
    ASSERT_NEAR(reranked->lse[i], expected->lse[i], 1e-4) << i;
  }
}

}  // namespace
}  // namespace pqcached::kvstore
