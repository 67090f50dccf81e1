// Selection of pages against their definition, by brute force in double precision.
#include "kvstore/read/select/token_pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace pqcached::kvstore {
namespace {

using Pages = std::vector<uint32_t>;

PagePlan PlanOf(const Selection& selection, const PageQuery& query, const PageTerms& terms) {
  const ResolvedSelection resolved = Resolve(selection, query.query_position, kMaxSequenceTokens);
  EXPECT_TRUE(resolved.refusal.ok()) << resolved.refusal.message();
  PagePlan plan;
  PlanPages(selection, resolved, query, terms, &plan);
  return plan;
}

TEST(PlanPages, KTokensAreThatManyPagesRoundedUp) {
  Selection selection{.sink_tokens = 4, .window_tokens = 20};
  selection.budget_kind = BudgetKind::kRetrieved;
  // Candidates are [4, 380): pages 0 to 23, of which the first and the last are partly candidates.
  for (const auto& [tokens, pages] :
       std::map<uint64_t, uint32_t>{{1, 1}, {16, 1}, {17, 2}, {32, 2}, {375, 24}, {9999, 24}}) {
    selection.budget_count = tokens;
    const PagePlan plan = PlanOf(selection, {399, 1}, {.page_tokens = 16});
    EXPECT_EQ(plan.select_count, pages) << tokens;
    EXPECT_EQ(plan.competing.size(), 24u);
    EXPECT_TRUE(plan.listed.empty());
  }
}

TEST(PlanPages, PagesOfSinkAndWindowDoNotCompete) {
  Selection selection{.sink_tokens = 20, .window_tokens = 20, .budget_ratio = 1.0};
  const auto plan = [&](bool with_sink, bool with_window, uint32_t query_length = 1) {
    return PlanOf(selection, {159, query_length},
                  {.page_tokens = 32, .with_sink = with_sink, .with_window = with_window});
  };
  // The candidates are [20, 140).
  EXPECT_EQ(plan(false, false).competing, (Pages{0, 1, 2, 3, 4}));
  EXPECT_EQ(plan(true, false).listed, (Pages{0}));
  EXPECT_EQ(plan(true, false).competing, (Pages{1, 2, 3, 4}));
  EXPECT_EQ(plan(true, true).listed, (Pages{0, 4}));
  EXPECT_EQ(plan(true, true).competing, (Pages{1, 2, 3}));
  EXPECT_EQ(plan(true, true).length(), 5u);
  EXPECT_EQ(plan(false, true, 2).listed, (Pages{4, 5}));  // the second query token's own page
  selection.excluded = {{0, 32}, {64, 128}};
  EXPECT_EQ(plan(true, true).listed, (Pages{4}));
  EXPECT_EQ(plan(true, true).competing, (Pages{1}));
}

TEST(PlanPages, ShortContextsHaveNoCandidates) {
  for (const uint64_t position : {0u, 3u, 19u}) {
    const PagePlan plan = PlanOf({.sink_tokens = 4, .window_tokens = 16}, {position, 1},
                                 {.page_tokens = 16, .with_sink = true, .with_window = true});
    EXPECT_EQ(plan.select_count, 0u);
    EXPECT_EQ(plan.length(), position / 16 + 1);
  }
}

struct PageCase {
  uint32_t kv_heads = 1, group_size = 1;
  GroupRule rule = GroupRule::kSumSoftmax;
  PageTerms terms;
  Selection selection;
  PageQuery query;
};

class PageProblem {
 public:
  PageProblem(const PageCase& one, uint32_t seed) : case_(one) {
    Resolve(case_.selection, case_.query.query_position, kMaxSequenceTokens, &resolved_);
    EXPECT_TRUE(resolved_.refusal.ok()) << resolved_.refusal.message();
    PlanPages(case_.selection, resolved_, case_.query, case_.terms, &scratch_.plan);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 3);
    const size_t heads = size_t{case_.kv_heads} * case_.group_size;
    rows_.resize(heads);
    for (const PositionRange& range : resolved_.candidates) {
      for (size_t head = 0; head < heads; ++head) {
        for (uint32_t token = range.begin; token < range.end; ++token) {
          // Some are equal, so that ties occur.
          logits_.push_back(random() % 8 == 0 ? 2.0f : normal(random));
          rows_[head].push_back(logits_.back());
        }
      }
      for (uint32_t token = range.begin; token < range.end; ++token) tokens_.push_back(token);
    }
  }

  // Checks every list against the definition.
  void Check() {
    const PagePlan& plan = scratch_.plan;
    const uint32_t lists = ListCount(case_.terms, case_.kv_heads);
    const uint32_t capacity = plan.length() + 2;
    std::vector<int32_t> pages(size_t{lists} * capacity, -7);
    SelectPages(kernels::Exec{},
                {.kv_heads = case_.kv_heads,
                 .group_size = case_.group_size,
                 .rule = case_.rule,
                 .terms = case_.terms,
                 .candidates = resolved_.candidates,
                 .logits = logits_},
                SerialFor(), &scratch_, {pages.data(), capacity});
    for (uint32_t list = 0; list < lists; ++list) {
      const int32_t* const begin = &pages[size_t{list} * capacity];
      EXPECT_EQ(begin[plan.length()], -7) << "more than the planned pages are written";
      CheckList(list, {begin, begin + plan.length()});
    }
  }

 private:
  // The number by which the rule compares tokens of one kv head.
  double TokenScore(uint32_t kv_head, size_t token) const {
    double sum_logit = 0, max_logit = -1e300, sum_weight = 0, max_weight = 0;
    for (uint32_t i = 0; i < case_.group_size; ++i) {
      const size_t head = size_t{kv_head} * case_.group_size + i;
      const double logit = double{rows_[head][token]};
      const double weight = std::exp(logit - lse_.at(head));
      sum_logit += logit;
      max_logit = std::max(max_logit, logit);
      sum_weight += weight;
      max_weight = std::max(max_weight, weight);
    }
    switch (case_.rule) {
      case GroupRule::kSumSoftmax:
        return sum_weight;
      case GroupRule::kMaxSoftmax:
        return std::log(max_weight);
      case GroupRule::kMeanLogit:
        return sum_logit;
      case GroupRule::kMaxLogit:
        break;
    }
    return max_logit;
  }

  std::map<uint32_t, double> PageScores(uint32_t list) {
    for (size_t head = 0; head < rows_.size(); ++head) {
      double sum = 0;
      for (const float logit : rows_[head]) sum += std::exp(double{logit});
      lse_[head] = std::log(sum);
    }
    std::map<uint32_t, double> scores;
    for (size_t token = 0; token < tokens_.size(); ++token) {
      double score = TokenScore(list, token);
      for (uint32_t head = 1; head < case_.kv_heads; ++head) {
        const double other = TokenScore(head, token);
        if (case_.terms.heads == HeadRule::kMax) score = std::max(score, other);
        if (case_.terms.heads == HeadRule::kSum) score += other;
      }
      const uint32_t page = tokens_[token] / case_.terms.page_tokens;
      const auto [found, is_new] = scores.try_emplace(page, score);
      if (!is_new) found->second = std::max(found->second, score);
    }
    for (const uint32_t page : scratch_.plan.listed) scores.erase(page);
    return scores;
  }

  void CheckList(uint32_t list, const std::vector<int32_t>& pages) {
    EXPECT_TRUE(std::is_sorted(pages.begin(), pages.end()));
    const std::set<uint32_t> chosen(pages.begin(), pages.end());
    ASSERT_EQ(chosen.size(), pages.size()) << "a page is listed twice";
    for (const uint32_t page : scratch_.plan.listed) ASSERT_TRUE(chosen.contains(page)) << page;
    const std::map<uint32_t, double> scores = PageScores(list);
    ASSERT_EQ(scores.size(), scratch_.plan.competing.size());
    double least = 1e300, most = -1e300;
    uint32_t count = 0;
    for (const auto& [page, score] : scores) {
      if (chosen.contains(page)) {
        least = std::min(least, score);
        ++count;
      } else {
        most = std::max(most, score);
      }
    }
    EXPECT_EQ(count, scratch_.plan.select_count);
    const double slack = 1e-5 * (1 + std::abs(most));
    ASSERT_LE(most, least + slack) << "a better page is left out";
    // Of equal pages, those with the lowest numbers: exact where scores are single logits.
    if (case_.rule != GroupRule::kMaxLogit || case_.terms.heads == HeadRule::kSum) return;
    bool left_out = false;
    for (const auto& [page, score] : scores) {
      if (score != least) continue;
      EXPECT_FALSE(left_out && chosen.contains(page)) << "not the lowest of equal pages: " << page;
      left_out = left_out || !chosen.contains(page);
    }
  }

  PageCase case_;
  ResolvedSelection resolved_;
  PageScratch scratch_;
  std::vector<float> logits_;             // as SelectPages reads them
  std::vector<std::vector<float>> rows_;  // [heads][candidate tokens]
  std::vector<uint32_t> tokens_;
  std::map<size_t, double> lse_;
};

TEST(SelectPages, MatchesTheDefinition) {
  uint32_t seed = 0;
  for (const uint32_t page_tokens : {16u, 32u, 64u}) {
    for (const HeadRule heads : {HeadRule::kEach, HeadRule::kMax, HeadRule::kSum}) {
      for (const GroupRule rule : {GroupRule::kSumSoftmax, GroupRule::kMaxSoftmax,
                                   GroupRule::kMeanLogit, GroupRule::kMaxLogit}) {
        for (const uint32_t group_size : {1u, 3u}) {
          for (const uint32_t context : {65u, 100u, 511u, 512u, 513u}) {
            for (const bool with_ends : {false, true}) {
              SCOPED_TRACE(::testing::Message()
                           << "pages of " << page_tokens << ", heads " << static_cast<int>(heads)
                           << ", rule " << static_cast<int>(rule) << ", group " << group_size
                           << ", context " << context << ", with ends " << with_ends);
              PageCase one{.kv_heads = 1 + seed % 4,
                           .group_size = group_size,
                           .rule = rule,
                           .terms = {.page_tokens = page_tokens,
                                     .heads = heads,
                                     .with_sink = with_ends,
                                     .with_window = with_ends},
                           .selection = {.group_rule = rule, .sink_tokens = 5, .window_tokens = 21},
                           .query = {context - 1, 1}};
              one.selection.budget_kind = BudgetKind::kRetrieved;
              one.selection.budget_count = 1 + seed * 13 % context;
              if (seed % 2 == 1) one.selection.excluded = {{7, 19}, {32, 64}, {90, 91}};
              PageProblem(one, ++seed).Check();
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace pqcached::kvstore
