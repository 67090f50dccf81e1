#include "tests/kvstore/brute_force.h"

namespace pqcached::kvstore {
namespace {

using testing::DecodedKeys;
using testing::DecodeKeys;
using testing::ExactKeys;
using testing::ExpectLargest;
using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::Pq;
using testing::RuleValues;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;

constexpr GroupRule kAllRules[] = {GroupRule::kSumSoftmax, GroupRule::kMaxSoftmax,
                                   GroupRule::kMeanLogit, GroupRule::kMaxLogit};

// [sink, n - window) without the excluded ranges.
std::vector<uint32_t> Candidates(const Selection& selection, uint32_t tokens) {
  std::vector<uint32_t> candidates;
  for (uint32_t token = selection.sink_tokens; token + selection.window_tokens < tokens; ++token) {
    bool masked = false;
    for (const PositionRange& range : selection.excluded) {
      masked |= token >= range.begin && token < range.end;
    }
    if (!masked) candidates.push_back(token);
  }
  return candidates;
}

void ExpectTopK(TestSequence& sequence, const LayerModel& model, const DecodedKeys& keys,
                const Selection& selection) {
  const Floats query = sequence.RandomQuery(model);
  const auto selected = sequence.store().TopK(kTenant, sequence.id(),
                                              {.layer = model.group.layers.front(),
                                               .query_position = model.tokens - 1,
                                               .queries = query.view()},
                                              selection);
  ASSERT_TRUE(selected.ok()) << selected.status();
  ASSERT_GT(selected->count, 0u);
  ASSERT_EQ(selected->positions.size(), size_t{selected->count} * model.group.kv_heads);
  const std::vector<uint32_t> candidates = Candidates(selection, model.tokens);
  for (uint32_t kv_head = 0; kv_head < model.group.kv_heads; ++kv_head) {
    ExpectLargest(
        candidates, RuleValues(model, keys, query, kv_head, selection.group_rule, candidates),
        std::span(selected->positions).subspan(kv_head * selected->count, selected->count));
  }
}

// Budgets, sinks, windows and excluded ranges that cut segments in every way.
std::vector<Selection> Terms() {
  std::vector<Selection> terms;
  terms.push_back({.budget_ratio = 0.1});
  terms.push_back({.budget_kind = BudgetKind::kCount, .budget_count = 1});
  terms.push_back({.sink_tokens = 16, .window_tokens = 64, .budget_ratio = 0.2});
  terms.push_back({.sink_tokens = 130, .window_tokens = 7, .budget_ratio = 0.5});
  terms.push_back({.sink_tokens = 4,
                   .window_tokens = 32,
                   .excluded = {{0, 2}, {100, 140}, {200, 201}, {256, 384}, {700, 2000}},
                   .budget_ratio = 0.3});
  return terms;
}

class TopKByRule : public ::testing::TestWithParam<GroupRule> {};

TEST_P(TopKByRule, MatchesBruteForceOverDecodedCodesAcrossSegmentsAndCodebooks) {
  for (const IndexDescriptor& index : {Pq(1, 8), Pq(2, 6), Pq(4, 4), Pq(4, 8)}) {
    TestSequence sequence;
    sequence.Ingest(600);
    sequence.Build(index, 3, 16);
    sequence.Append(200);  // the tail is coded under the last codebook
    const auto info = sequence.store().DescribeSequence(kTenant, sequence.id());
    ASSERT_TRUE(info.ok());
    ASSERT_GE(info->segments.size(), 5u);
    ASSERT_NE(info->segments.front().codebook_generations,
              info->segments.back().codebook_generations);
    const LayerModel& model = sequence.layer(3);
    const DecodedKeys keys = DecodeKeys(sequence.store(), sequence.id(), model, index);
    for (Selection selection : Terms()) {
      selection.index = index;
      selection.group_rule = GetParam();
      ExpectTopK(sequence, model, keys, selection);
    }
  }
}

TEST_P(TopKByRule, FlatMatchesBruteForceOverTheKeys) {
  for (const kernels::DType dtype :
       {kernels::DType::kF16, kernels::DType::kBf16, kernels::DType::kF32}) {
    CacheSpec spec = SmallSpec();
    spec.groups[0].dtype = dtype;
    TestSequence sequence(spec);
    sequence.Ingest(600);
    sequence.Append(200);
    const LayerModel& model = sequence.layer(1);
    for (Selection selection : Terms()) {
      selection.group_rule = GetParam();
      ExpectTopK(sequence, model, ExactKeys(model), selection);
    }
  }
}

TEST_P(TopKByRule, SoftcapAndLargeGroupsTakeTheSameTokensAsBruteForce) {
  for (const uint32_t group_size : {2u, 64u}) {
    CacheSpec spec = SmallSpec();
    spec.groups[0].query_heads = 2 * group_size;
    spec.groups[0].softcap = group_size == 2 ? 1.5f : 0.0f;
    TestSequence sequence(spec);
    sequence.Ingest(400);
    sequence.Build(Pq(2, 6));
    const LayerModel& model = sequence.layer(1);
    const DecodedKeys exact = ExactKeys(model);
    Selection selection{.group_rule = GetParam(), .sink_tokens = 5, .budget_ratio = 0.2};
    ExpectTopK(sequence, model, exact, selection);
    if (spec.groups[0].softcap > 0) continue;  // unit vectors decode only what is not capped
    selection.index = Pq(2, 6);
    ExpectTopK(sequence, model, DecodeKeys(sequence.store(), sequence.id(), model, Pq(2, 6)),
               selection);
  }
}

// Checks that re-ranking takes the best of what the index proposes, by exact scores; and, where
// `decoded` is not null, that the index proposes the best by those keys.
void ExpectReranked(TestSequence& sequence, const LayerModel& model, const DecodedKeys* decoded,
                    Selection selection, uint64_t count, float factor) {
  const Floats query = sequence.RandomQuery(model);
  const auto top_k = [&](uint64_t tokens, float rerank_factor) {
    selection.budget_kind = BudgetKind::kRetrieved;
    selection.budget_count = tokens;
    selection.rerank_factor = rerank_factor;
    return *sequence.store().TopK(kTenant, sequence.id(),
                                  {.layer = model.group.layers.front(),
                                   .query_position = model.tokens - 1,
                                   .queries = query.view()},
                                  selection);
  };
  const auto shortlist_count =
      static_cast<uint64_t>(std::ceil(double{factor} * static_cast<double>(count)));
  const auto proposed = top_k(shortlist_count, 1.0f), reranked = top_k(count, factor);
  ASSERT_EQ(reranked.count, count);
  const std::vector<uint32_t> candidates = Candidates(selection, model.tokens);
  for (uint32_t kv_head = 0; kv_head < model.group.kv_heads; ++kv_head) {
    const auto begin =
        proposed.positions.begin() + kv_head * static_cast<ptrdiff_t>(proposed.count);
    const std::vector<uint32_t> shortlist(begin, begin + proposed.count);
    if (decoded) {
      ExpectLargest(candidates,
                    RuleValues(model, *decoded, query, kv_head, selection.group_rule, candidates),
                    shortlist);
    }
    ExpectLargest(
        shortlist,
        RuleValues(model, ExactKeys(model), query, kv_head, selection.group_rule, shortlist),
        std::span(reranked.positions).subspan(kv_head * count, count));
  }
}

TEST_P(TopKByRule, ReRankingTakesTheBestOfWhatTheIndexProposes) {
  for (const kernels::DType dtype : {kernels::DType::kF16, kernels::DType::kF32}) {
    for (const float softcap : {0.0f, 1.5f}) {
      CacheSpec spec = SmallSpec();
      spec.groups[0].dtype = dtype;
      spec.groups[0].softcap = softcap;
      TestSequence sequence(spec);
      sequence.Ingest(700);
      sequence.Build(Pq(2, 4), 3, 16);
      sequence.Append(150);
      const LayerModel& model = sequence.layer(1);
      const Selection selection{.index = Pq(2, 4),
                                .group_rule = GetParam(),
                                .sink_tokens = 5,
                                .window_tokens = 20,
                                .excluded = {{200, 231}, {400, 401}}};
      const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, Pq(2, 4));
      // Unit vectors decode only what is not capped.
      const DecodedKeys* proposing = softcap > 0 ? nullptr : &decoded;
      // Shortlists of one token, of a tile and around it, and of all candidates (793).
      ExpectReranked(sequence, model, proposing, selection, 1, 1.0f);
      ExpectReranked(sequence, model, proposing, selection, 1, 1.5f);
      ExpectReranked(sequence, model, proposing, selection, 85, 3.0f);
      ExpectReranked(sequence, model, proposing, selection, 128, 2.0f);
      ExpectReranked(sequence, model, proposing, selection, 129, 1.99f);
      ExpectReranked(sequence, model, proposing, selection, 300, 2.6f);
      Selection all = selection;
      all.budget_ratio = 0.3;
      all.rerank_factor = kMaxRerankFactor;
      ExpectTopK(sequence, model, ExactKeys(model), all);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, TopKByRule, ::testing::ValuesIn(kAllRules));

TEST(TopK, PqWithAsManyCentroidsAsTokensSelectsWhatFlatSelects) {
  CacheSpec spec = SmallSpec();
  spec.groups[0].dtype = kernels::DType::kBf16;  // in which k-means may keep its samples
  TestSequence sequence(spec);
  sequence.Ingest(200);
  sequence.Build(Pq(1, 8), 5);
  const LayerModel& model = sequence.layer(1);
  for (const GroupRule rule : kAllRules) {
    ExpectTopK(sequence, model, ExactKeys(model),
               {.index = Pq(1, 8), .group_rule = rule, .budget_ratio = 0.25});
  }
}

TEST(TopK, OneSegmentSelectsWhatManySegmentsSelectUnderOneCodebook) {
  std::vector<std::vector<uint32_t>> selections;
  for (const uint32_t segment_tokens : {128u, 256u, 1024u}) {
    StoreOptions options = SmallOptions();
    options.segment_tokens = segment_tokens;
    options.codebook_tokens = 1 << 20;
    TestSequence sequence(SmallSpec(), options);
    sequence.Ingest(900);
    sequence.Build(Pq(2, 6), 4, 16);
    const Floats query = sequence.RandomQuery(sequence.layer(1));
    const auto selected = sequence.store().TopK(
        kTenant, sequence.id(), {.layer = 1, .query_position = 899, .queries = query.view()},
        {.index = Pq(2, 6), .sink_tokens = 16, .window_tokens = 64, .budget_ratio = 0.2});
    ASSERT_TRUE(selected.ok()) << selected.status();
    selections.push_back(selected->positions);
  }
  EXPECT_EQ(selections[0], selections[1]);
  EXPECT_EQ(selections[0], selections[2]);
}

TEST(TopK, TwoIndexesOfASequenceAnswerEachForItself) {
  TestSequence sequence;
  sequence.Ingest(500);
  sequence.Build(Pq(2, 4));
  sequence.Append(150);
  sequence.Build(Pq(4, 6));  // with an open tail
  sequence.Append(150);
  const LayerModel& model = sequence.layer(1);
  for (const IndexDescriptor& index : {Pq(2, 4), Pq(4, 6)}) {
    const DecodedKeys keys = DecodeKeys(sequence.store(), sequence.id(), model, index);
    ExpectTopK(sequence, model, keys, {.index = index, .budget_ratio = 0.1});
  }
}

TEST(Score, GivesMaxAndSumOfExponentialsOfItsLogits) {
  TestSequence sequence;
  sequence.Ingest(400);
  sequence.Build(Pq(2, 6));
  const LayerModel& model = sequence.layer(1);
  const Floats query = sequence.RandomQuery(model);
  for (const IndexDescriptor& index : {IndexDescriptor{}, Pq(2, 6)}) {
    const DecodedKeys keys = index.kind == IndexKind::kFlat
                                 ? ExactKeys(model)
                                 : DecodeKeys(sequence.store(), sequence.id(), model, index);
    const auto scores = sequence.store().Score(
        kTenant, sequence.id(), {.layer = 1, .query_position = 399, .queries = query.view()}, index,
        {100, 300});
    ASSERT_TRUE(scores.ok()) << scores.status();
    for (uint32_t head = 0; head < model.group.query_heads; ++head) {
      double sum = 0;
      float max = -1e30f;
      for (uint32_t i = 0; i < 200; ++i) {
        const float logit = scores->logits[head * 200 + i];
        double dot = 0;
        for (uint32_t dim = 0; dim < model.group.key_dim; ++dim) {
          dot += static_cast<double>(query.data[head * model.group.key_dim + dim]) *
                 keys.key(100 + i, head / model.group.group_size())[dim];
        }
        ASSERT_NEAR(logit, dot * model.group.scale(), 1e-4);
        max = std::max(max, logit);
      }
      for (uint32_t i = 0; i < 200; ++i) {
        sum += std::exp(static_cast<double>(scores->logits[head * 200 + i]) - max);
      }
      EXPECT_EQ(scores->max[head], max);
      EXPECT_NEAR(scores->sum_exp[head], sum, 1e-4 * sum);
    }
  }
}

}  // namespace
}  // namespace pqcached::kvstore
