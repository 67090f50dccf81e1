#include "kvstore/read/resolve.h"

#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pqcached::kvstore {
namespace {

using Code = StatusCode;
using Ranges = std::vector<PositionRange>;

TEST(Resolve, CountsSinkAndWindowAgainstTheBudget) {
  const ResolvedSelection resolved =
      Resolve({.sink_tokens = 16, .window_tokens = 64, .budget_ratio = 0.1}, 4095, 4096);
  EXPECT_EQ(resolved.refusal.code, Code::kOk);
  EXPECT_EQ(resolved.candidates, (Ranges{{16, 4032}}));
  EXPECT_EQ(resolved.candidate_count, 4016u);
  EXPECT_EQ(resolved.select_count, 409u - 16 - 64);
  EXPECT_EQ(resolved.sink_tokens, 16u);
  EXPECT_EQ(resolved.window_tokens, 64u);
}

TEST(Resolve, NeedsNoRowsOfTheWindow) {
  const Selection selection{.window_tokens = 64, .budget_ratio = 1.0};
  EXPECT_EQ(Resolve(selection, 999, 936).refusal.code, Code::kOk);
  EXPECT_EQ(Resolve(selection, 999, 936).select_count, 936u);
  EXPECT_EQ(Resolve(selection, 999, 935).refusal.code, Code::kOutOfRange);
}

TEST(Resolve, ShortContextsLeaveNothingToSelect) {
  const Selection selection{.sink_tokens = 16, .window_tokens = 64, .budget_ratio = 1.0};
  for (const uint64_t position : {0u, 15u, 16u, 40u, 79u}) {
    const ResolvedSelection resolved = Resolve(selection, position, 0);
    EXPECT_EQ(resolved.refusal.code, Code::kOk) << resolved.refusal.message();
    EXPECT_EQ(resolved.select_count, 0u);
    EXPECT_EQ(resolved.sink_tokens + resolved.window_tokens, position + 1);
  }
  EXPECT_EQ(Resolve(selection, 80, 80).select_count, 1u);
}

TEST(Resolve, RatioIsClampedToWhatThereIs) {
  Selection selection{.sink_tokens = 50, .window_tokens = 30, .budget_ratio = 0.5};
  EXPECT_EQ(Resolve(selection, 99, 100).select_count, 0u);  // 50 - 80
  selection.budget_ratio = 0.8;
  EXPECT_EQ(Resolve(selection, 99, 100).select_count, 0u);
  selection.budget_ratio = 0.85;
  EXPECT_EQ(Resolve(selection, 99, 100).select_count, 5u);
  selection.budget_ratio = 1.0;
  EXPECT_EQ(Resolve(selection, 99, 100).select_count, 20u);
}

TEST(Resolve, CountLiesBetweenOneTokenMoreThanKeptAndAll) {
  Selection selection{.sink_tokens = 10,
                      .window_tokens = 20,
                      .budget_kind = BudgetKind::kCount,
                      .budget_count = 31};
  EXPECT_EQ(Resolve(selection, 99, 100).select_count, 1u);
  selection.budget_count = 100;
  EXPECT_EQ(Resolve(selection, 99, 100).select_count, 70u);
  selection.budget_count = 30;
  EXPECT_EQ(Resolve(selection, 99, 100).refusal.code, Code::kInvalidArgument);
  selection.budget_count = 101;
  EXPECT_EQ(Resolve(selection, 99, 100).refusal.code, Code::kInvalidArgument);
}

TEST(Resolve, ExcludedTokensAreNeitherAttendedNorCounted) {
  const ResolvedSelection resolved =
      Resolve({.sink_tokens = 10,
               .window_tokens = 20,
               .excluded = {{0, 4}, {8, 12}, {40, 50}, {75, 85}, {99, 200}},
               .budget_ratio = 1.0},
              99, 100);
  EXPECT_EQ(resolved.candidates, (Ranges{{12, 40}, {50, 75}}));
  EXPECT_EQ(resolved.sink_tokens, 4u);     // 4..7
  EXPECT_EQ(resolved.window_tokens, 14u);  // 85..98
  EXPECT_EQ(resolved.candidate_count, 53u);
  EXPECT_EQ(resolved.select_count, 53u);
}

TEST(Resolve, AShortlistHasTheFactorOfTheSelectedTokensAtMostAllCandidates) {
  Selection selection{.index = {IndexKind::kPq, 2, 6},
                      .sink_tokens = 10,
                      .window_tokens = 20,
                      .budget_kind = BudgetKind::kRetrieved,
                      .budget_count = 7};
  EXPECT_EQ(Resolve(selection, 99, 100).shortlist_count, 7u);
  selection.budget_count = 10;
  selection.rerank_factor = 1.1f;  // the float is larger than 1.1
  EXPECT_EQ(Resolve(selection, 99, 100).shortlist_count, 11u);
  selection.budget_count = 7;
  selection.rerank_factor = 2.1f;
  EXPECT_EQ(Resolve(selection, 99, 100).shortlist_count, 15u);
  selection.budget_count = 69;
  EXPECT_EQ(Resolve(selection, 99, 100).shortlist_count, 70u);
  selection.index = {};
  EXPECT_EQ(Resolve(selection, 99, 100).shortlist_count, 69u) << "flat is exact";
  for (const float factor : {0.0f, 0.99f, 8.01f, -2.0f, std::nanf(""), HUGE_VALF}) {
    selection.rerank_factor = factor;
    const ResolvedSelection resolved = Resolve(selection, 99, 100);
    EXPECT_EQ(resolved.refusal.code, Code::kInvalidArgument);
    EXPECT_EQ(resolved.refusal.field, "selection.rerank_factor");
  }
}

TEST(Resolve, EverythingMayBeExcluded) {
  const ResolvedSelection resolved =
      Resolve({.excluded = {{0, 1000}}, .budget_ratio = 1.0}, 99, 100);
  EXPECT_EQ(resolved.refusal.code, Code::kOk);
  EXPECT_TRUE(resolved.candidates.empty());
  EXPECT_EQ(resolved.select_count, 0u);
}

TEST(Resolve, HoldsAtTheLongestSequence) {
  const ResolvedSelection resolved =
      Resolve({.sink_tokens = ~0u, .window_tokens = ~0u, .budget_ratio = 1.0},
              kMaxSequenceTokens - 1, kMaxSequenceTokens);
  EXPECT_EQ(resolved.refusal.code, Code::kOk);
  EXPECT_EQ(resolved.select_count, 0u);
  EXPECT_EQ(Resolve({.budget_ratio = 1.0}, kMaxSequenceTokens, kMaxSequenceTokens).refusal.code,
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace pqcached::kvstore
