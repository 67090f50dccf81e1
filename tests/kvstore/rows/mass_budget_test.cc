// Budgets of attention mass: the k of a selection against a plain sort of the index's own scores.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::Pq;
using testing::SmallSpec;
using testing::TestSequence;

constexpr uint32_t kMassTokens = 700;

CacheSpec MassSpec(uint32_t group_size, float softcap = 0) {
  CacheSpec spec = SmallSpec();
  spec.groups[0].query_heads = 2 * group_size;
  spec.groups[0].softcap = softcap;
  return spec;
}

Selection Mass(const IndexDescriptor& index, double mass,
               const Selection::MassBounds& bounds = {}) {
  return {.index = index,
          .sink_tokens = 10,
          .window_tokens = 50,
          .budget_kind = BudgetKind::kMass,
          .budget_count = Selection::CountOf(bounds),
          .budget_ratio = mass};
}

class MassBudget {
 public:
  explicit MassBudget(const CacheSpec& spec = MassSpec(4)) : sequence(spec) {
    sequence.Ingest(kMassTokens);
    for (const IndexDescriptor& index : {Pq(2, 6), Pq(4, 8)}) sequence.Build(index);
    query = sequence.RandomQuery(model());
    // Attention of several tokens, not of all: a query of random numbers is a flat one.
    for (float& number : query.data) number *= 2;
  }

  const LayerModel& model() { return sequence.layer(1); }

  absl::StatusOr<Selected> TopK(const Selection& selection) {
    return sequence.store().TopK(
        kTenant, sequence.id(),
        {.layer = 1, .query_position = kMassTokens - 1, .queries = query.view()}, selection);
  }

  // The exponentials of a query head's logits for all tokens: by the index, of sink and window
  // exactly; 0 for excluded tokens.
  std::vector<double> Weights(uint32_t head, const Selection& selection) {
    std::vector<double> weights(kMassTokens);
    const auto scores = [&](const IndexDescriptor& index) {
      return sequence.store()
          .Score(kTenant, sequence.id(),
                 {.layer = 1, .query_position = kMassTokens - 1, .queries = query.view()}, index,
                 {0, kMassTokens})
          ->logits;
    };
    const auto by_index = scores(selection.index), exact = scores({});
    for (uint32_t i = 0; i < kMassTokens; ++i) {
      const size_t at = size_t{head} * kMassTokens + i;
      weights[i] = std::exp(double{IsOwn(i, selection) ? exact[at] : by_index[at]});
    }
    for (const PositionRange& range : selection.excluded) {
      std::fill(weights.begin() + range.begin, weights.begin() + range.end, 0.0);
    }
    return weights;
  }

  static bool IsOwn(uint32_t token, const Selection& selection) {
    return token < selection.sink_tokens || token >= kMassTokens - selection.window_tokens;
  }

  // The mass of sink, window and the positions, in the mean over query heads [begin, end).
  double MassOf(const std::vector<uint32_t>& positions, uint32_t begin, uint32_t end,
                const Selection& selection) {
    double mass = 0;
    for (uint32_t head = begin; head < end; ++head) {
      const std::vector<double> weights = Weights(head, selection);
      double covered = 0;
      for (uint32_t i = 0; i < kMassTokens; ++i) {
        const bool is_selected = std::binary_search(positions.begin(), positions.end(), i);
        if (is_selected || IsOwn(i, selection)) covered += weights[i];
      }
      mass += covered / std::accumulate(weights.begin(), weights.end(), 0.0) / (end - begin);
    }
    return mass;
  }

  // Returns the smallest mass of a set under k selected tokens.
  double LeastMass(Selection selection, uint32_t k) {
    selection.budget_kind = BudgetKind::kRetrieved;
    selection.budget_count = std::max(k, 1u);
    auto selected = *TopK(selection);
    if (k == 0) selected.positions.clear();
    const uint32_t heads = model().group.query_heads;
    const uint32_t sets = selection.SetCount(model().group.kv_heads, heads);
    double least = 1;
    for (uint32_t set = 0; set < sets; ++set) {
      const auto begin = selected.positions.begin() + static_cast<ptrdiff_t>(size_t{set} * k);
      least = std::min(least, MassOf({begin, begin + k}, set * heads / sets,
                                     (set + 1) * heads / sets, selection));
    }
    return least;
  }

  // k is the smallest number by which all sets have the mass.
  void ExpectSmallest(const Selection& selection) {
    const auto selected = TopK(selection);
    ASSERT_TRUE(selected.ok()) << selected.status();
    const uint32_t k = selected->count;
    EXPECT_GE(LeastMass(selection, k), selection.budget_ratio - 1e-4);
    if (k > 0) {
      EXPECT_LT(LeastMass(selection, k - 1), selection.budget_ratio + 1e-4);
    }
    const uint32_t sets = selection.SetCount(model().group.kv_heads, model().group.query_heads);
    EXPECT_EQ(selected->positions.size(), size_t{sets} * k);
  }

  TestSequence sequence;
  Floats query;
};

TEST(MassBudget, SelectsTheFewestTokensOfEachIndexAndRule) {
  for (const uint32_t group : {1u, 4u}) {
    MassBudget test(MassSpec(group));
    for (const IndexDescriptor& index : {IndexDescriptor{}, Pq(2, 6), Pq(4, 8)}) {
      for (const GroupRule rule : {GroupRule::kSumSoftmax, GroupRule::kMaxSoftmax,
                                   GroupRule::kMeanLogit, GroupRule::kMaxLogit}) {
        for (const double mass : {0.3, 0.9, 0.99}) {
          SCOPED_TRACE(::testing::Message() << group << " " << static_cast<int>(index.bits) << " "
                                            << static_cast<int>(rule) << " " << mass);
          Selection selection = Mass(index, mass);
          selection.group_rule = rule;
          test.ExpectSmallest(selection);
        }
      }
      Selection selection = Mass(index, 0.9);
      selection.per_query_head = true;
      test.ExpectSmallest(selection);
    }
  }
}

TEST(MassBudget, LeavesExcludedTokensOutAndCapsLogits) {
  MassBudget test(MassSpec(2, /*softcap=*/3.0f));
  Selection selection = Mass(Pq(4, 8), 0.8);
  selection.excluded = {{5, 7}, {100, 300}, {640, 660}};
  test.ExpectSmallest(selection);
}

TEST(MassBudget, StaysWithinItsBounds) {
  MassBudget test;
  const auto count = [&](double mass, uint32_t least, uint32_t most) {
    const auto selected = test.TopK(Mass(Pq(4, 8), mass, {.least = least, .most = most}));
    EXPECT_TRUE(selected.ok()) << selected.status();
    return selected->count;
  };
  const uint32_t free = count(0.9, 0, 0);
  EXPECT_GT(free, 20u);
  EXPECT_LT(free, 600u);
  EXPECT_EQ(count(0.9, 0, free - 5), free - 5);
  EXPECT_EQ(count(0.9, free + 5, 0), free + 5);
  EXPECT_EQ(count(0.9, 600, 620), 600u);
  EXPECT_EQ(count(0.9, 5000, 0), kMassTokens - 60);
  EXPECT_EQ(count(1e-9, 0, 0), 0u);
  EXPECT_EQ(count(1, 0, 0), kMassTokens - 60);
  EXPECT_EQ(count(1, 0, 50), 50u);
}

// An attention attends to the positions that TopK selects.
TEST(MassBudget, IsTheSameInAnAttention) {
  MassBudget test;
  for (const float factor : {1.0f, 2.0f}) {
    Selection selection = Mass(Pq(2, 6), 0.8);
    selection.rerank_factor = factor;
    const auto selected = test.TopK(selection);
    ASSERT_TRUE(selected.ok());
    const auto attend = [&](const Selection& by) {
      return *test.sequence.store().Attend(
          kTenant, test.sequence.id(),
          {.layer = 1, .query_position = kMassTokens - 1, .queries = test.query.view()}, by, true);
    };
    const Attention attention = attend(selection);
    EXPECT_EQ(attention.selected.positions, selected->positions);
    Selection counted = selection;
    counted.budget_kind = BudgetKind::kRetrieved;
    counted.budget_count = selected->count;
    EXPECT_EQ(attention.output, attend(counted).output);
  }
}

TEST(MassBudget, ServesATailEstimateToo) {
  MassBudget test;
  IndexDescriptor clusters{.kind = IndexKind::kClusters, .subspace_count = 16};
  test.sequence.Build(clusters);
  const auto attend = [&](const Selection& selection) {
    return *test.sequence.store().Attend(
        kTenant, test.sequence.id(),
        {.layer = 1, .query_position = kMassTokens - 1, .queries = test.query.view()}, selection,
        true);
  };
  Selection selection = Mass(Pq(4, 8), 0.7);
  const Attention plain = attend(selection);
  selection.tail_estimate = true;
  const Attention estimated = attend(selection);
  EXPECT_EQ(estimated.selected.positions, plain.selected.positions);
  EXPECT_NE(estimated.lse, plain.lse);
  selection.budget_kind = BudgetKind::kRetrieved;
  selection.budget_count = plain.selected.count;
  EXPECT_EQ(estimated.output, attend(selection).output);
}

// Rows of the window that are not stored yet count as nothing.
TEST(MassBudget, CountsTheStoredRowsOfTheWindow) {
  MassBudget test;
  const auto count = [&](uint64_t query_position, uint32_t window) {
    Selection selection = Mass(Pq(4, 8), 0.8);
    selection.window_tokens = window;
    return test.sequence.store()
        .TopK(kTenant, test.sequence.id(),
              {.layer = 1, .query_position = query_position, .queries = test.query.view()},
              selection)
        ->count;
  };
  // The candidates are the same.
  EXPECT_EQ(count(kMassTokens + 99, 150 + 100), count(kMassTokens - 1, 150));
}

TEST(MassBudget, RefusesWrongTermsByField) {
  MassBudget test;
  const auto refusal = [&](const Selection& selection) {
    const absl::Status status = test.TopK(selection).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  for (const double mass : {0.0, -0.5, 1.5, std::nan("")}) {
    EXPECT_THAT(refusal(Mass({}, mass)), ::testing::HasSubstr("attention_mass"));
  }
  EXPECT_THAT(refusal(Mass({}, 0.9, {.least = 8, .most = 7})),
              ::testing::HasSubstr("least_tokens"));
}

}  // namespace
}  // namespace pqcached::kvstore
