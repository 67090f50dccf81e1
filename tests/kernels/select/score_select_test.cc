// ScoreSelect: every level against brute force in double precision.
#include "kernels/select/score_select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace pqcached::kernels {
namespace {

constexpr GroupRule kAllRules[] = {GroupRule::kSumSoftmax, GroupRule::kMaxSoftmax,
                                   GroupRule::kMeanLogit, GroupRule::kMaxLogit};

struct ScoreCase {
  uint32_t group_size = 1;
  GroupRule rule = GroupRule::kSumSoftmax;
  std::vector<uint32_t> span_sizes = {};
  bool strange = false;  // infinities, NaN, ties and denormals among the logits
};

float RandomLogit(bool strange, std::mt19937_64& random) {
  std::normal_distribution<float> normal(0.0f, 4.0f);
  if (!strange) return normal(random);
  switch (random() % 10) {
    case 0:
      return std::numeric_limits<float>::infinity();
    case 1:
      return -std::numeric_limits<float>::infinity();
    case 2:
      return std::numeric_limits<float>::quiet_NaN();
    case 3:
      return 1e-41f;
    case 4:
      return -0.0f;
    default:
      return static_cast<float>(random() % 4);
  }
}

class ScoreProblem {
 public:
  ScoreProblem(const ScoreCase& score_case, uint64_t seed) : case_(score_case) {
    std::mt19937_64 random(seed);
    uint32_t position = 100;
    for (const uint32_t size : case_.span_sizes) {
      std::vector<float>& logits = logits_.emplace_back(size_t{size} * case_.group_size);
      for (float& logit : logits) logit = RandomLogit(case_.strange, random);
      spans_.push_back({.logits = logits.data(),
                        .head_stride = size,
                        .token_count = size,
                        .first_position = position});
      position += size + 3;
    }
    FindValues();
  }

  uint32_t token_count() const { return static_cast<uint32_t>(positions_.size()); }

  std::vector<uint32_t> Select(Level level, uint32_t k) const {
    const size_t bytes = ScoreSelectScratchBytes(case_.group_size, token_count());
    struct alignas(64) Line {
      std::byte bytes[64];
    };
    std::vector<Line> scratch(bytes / 64 + 1);
    std::vector<uint32_t> positions(k);
    ScoreSelect(Exec{level}, {.group_size = case_.group_size,
                              .rule = case_.rule,
                              .spans = spans_,
                              .positions = positions,
                              .scratch = {scratch[0].bytes, bytes}});
    return positions;
  }

  // Returns what is wrong, or "".
  std::string Judge(const std::vector<uint32_t>& selected) const {
    if (selected.empty()) return "";
    std::vector<size_t> order(positions_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return values_[a] > values_[b]; });
    const bool exact = case_.group_size == 1 || case_.rule == GroupRule::kMeanLogit ||
                       case_.rule == GroupRule::kMaxLogit;
    const double kth = values_[order[selected.size() - 1]];
    const double slack = exact                                  ? 0.0
                         : case_.rule == GroupRule::kSumSoftmax ? 2e-5 * kth
                                                                : 2e-5 + 2e-6 * std::abs(kth);
    if (!std::is_sorted(selected.begin(), selected.end())) return "not ascending";
    if (exact) {
      std::vector<uint32_t> expected;
      for (size_t i = 0; i < selected.size(); ++i) expected.push_back(positions_[order[i]]);
      std::sort(expected.begin(), expected.end());
      return expected == selected ? "" : "not the brute-force selection";
    }
    size_t next = 0;
    for (size_t i = 0; i < positions_.size(); ++i) {
      const bool taken = next < selected.size() && selected[next] == positions_[i];
      if (taken) ++next;
      if (taken && values_[i] < kth - slack) return "too small a value";
      if (!taken && values_[i] > kth + slack) return "left out a large value";
    }
    return next == selected.size() ? "" : "not a candidate";
  }

 private:
  void FindValues() {
    std::vector<std::vector<float>> tokens;
    for (const ScoreSpan& span : spans_) {
      for (uint32_t t = 0; t < span.token_count; ++t) {
        std::vector<float>& heads = tokens.emplace_back();
        for (uint32_t head = 0; head < case_.group_size; ++head) {
          heads.push_back(ClampLogit(span.logits[head * span.head_stride + t]));
        }
        positions_.push_back(span.first_position + t);
      }
    }
    std::vector<double> max(case_.group_size, -1e300);
    std::vector<double> sum(case_.group_size, 0.0);
    const auto weight = [&](const std::vector<float>& heads, uint32_t head) {
      const auto exponent = static_cast<float>(heads[head] - max[head]);
      return exponent < kMinExponent ? 0.0 : std::exp(double{exponent});
    };
    for (uint32_t head = 0; head < case_.group_size; ++head) {
      for (const auto& heads : tokens) max[head] = std::max(max[head], double{heads[head]});
      for (const auto& heads : tokens) sum[head] += weight(heads, head);
    }
    for (const auto& heads : tokens) {
      double largest = -1e300;
      double weights = 0.0;
      float logit_sum = 0.0f;
      for (uint32_t head = 0; head < case_.group_size; ++head) {
        const bool softmax = case_.rule == GroupRule::kMaxSoftmax && case_.group_size > 1;
        const double lse = softmax ? max[head] + std::log(sum[head]) : 0.0;
        largest = std::max(largest, heads[head] - lse);
        weights += weight(heads, head) / sum[head];
        logit_sum = head == 0 ? heads[head] : logit_sum + heads[head];
      }
      const bool sum_rule = case_.rule == GroupRule::kSumSoftmax && case_.group_size > 1;
      values_.push_back(sum_rule                              ? weights
                        : case_.rule == GroupRule::kMeanLogit ? double{logit_sum}
                                                              : largest);
    }
  }

  ScoreCase case_;
  std::vector<std::vector<float>> logits_;
  std::vector<ScoreSpan> spans_;
  std::vector<uint32_t> positions_;
  std::vector<double> values_;
};

void ExpectSelects(const ScoreCase& score_case, uint64_t seed) {
  const ScoreProblem problem(score_case, seed);
  const uint32_t n = problem.token_count();
  for (const Level level : AvailableLevels()) {
    for (const uint32_t k : {0u, std::min(n, 1u), n / 10, n / 2, n}) {
      ASSERT_EQ(problem.Judge(problem.Select(level, k)), "")
          << LevelName(level) << " n " << n << " k " << k << " G " << score_case.group_size
          << " rule " << static_cast<int>(score_case.rule) << " seed " << seed;
    }
  }
}

TEST(ScoreSelectTest, MatchesBruteForceAtAllSizes) {
  uint64_t seed = 0;
  for (const GroupRule rule : kAllRules) {
    for (const uint32_t group_size : {1u, 2u, 4u, 7u}) {
      for (const uint32_t size : {0u, 1u, 15u, 16u, 17u, 63u, 64u, 65u, 129u, 4097u}) {
        for (const bool strange : {false, true}) {
          ExpectSelects({group_size, rule, {size}, strange}, ++seed);
        }
      }
    }
  }
}

TEST(ScoreSelectTest, MatchesBruteForceOverManySpans) {
  std::mt19937_64 random(7);
  for (uint32_t round = 0; round < 100; ++round) {
    ScoreCase score_case{.group_size = 1 + static_cast<uint32_t>(random() % 8),
                         .rule = kAllRules[random() % 4],
                         .strange = random() % 4 == 0};
    for (uint64_t spans = random() % 5; spans > 0; --spans) {
      score_case.span_sizes.push_back(static_cast<uint32_t>(random() % 500));
    }
    ExpectSelects(score_case, random());
  }
}

// Long arrays are sampled for the threshold: it must hold where the sample misleads.
TEST(ScoreSelectTest, FindsTheThresholdOfLongArraysOfAnyOrder) {
  constexpr uint32_t kCount = 20011;
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> arrays(5, std::vector<float>(kCount));
  for (uint32_t i = 0; i < kCount; ++i) {
    arrays[0][i] = normal(random);
    arrays[1][i] = static_cast<float>(i);
    arrays[2][i] = i % 156 < 16 ? 0.0f : 1.0f + static_cast<float>(i % 7);
    arrays[3][i] = i % 156 < 16 ? 9.0f : normal(random);
    arrays[4][i] = i == 12345 ? -1.0f : 0.0f;
  }
  for (const std::vector<float>& values : arrays) {
    std::vector<float> order = values;
    std::sort(order.begin(), order.end(), std::greater<float>());
    const ScoreSpan span{
        .logits = values.data(), .head_stride = kCount, .token_count = kCount, .first_position = 0};
    std::vector<std::byte> scratch(ScoreSelectScratchBytes(1, kCount) + 64);
    void* aligned = scratch.data();
    size_t space = scratch.size();
    std::align(64, scratch.size() - 64, aligned, space);
    for (const uint32_t k : {1u, 5u, 200u, 2001u, 10000u, 19900u, 20010u, 20011u}) {
      for (const Level level : AvailableLevels()) {
        std::vector<uint32_t> positions(k);
        ScoreSelect(Exec{level}, {.group_size = 1,
                                  .rule = GroupRule::kSumSoftmax,
                                  .spans = {&span, 1},
                                  .positions = positions,
                                  .scratch = {static_cast<std::byte*>(aligned), space}});
        std::vector<float> got;
        for (const uint32_t position : positions) got.push_back(values[position]);
        std::sort(got.begin(), got.end(), std::greater<float>());
        ASSERT_TRUE(std::equal(got.begin(), got.end(), order.begin()))
            << LevelName(level) << " k " << k << " array " << &values - arrays.data();
      }
    }
  }
}

TEST(ScoreSelectTest, TakesTheLowestPositionsWhenAllTie) {
  const std::vector<float> logits(1000, 2.5f);
  const ScoreSpan span{
      .logits = logits.data(), .head_stride = 500, .token_count = 500, .first_position = 8};
  for (const Level level : AvailableLevels()) {
    for (const GroupRule rule : kAllRules) {
      std::vector<uint32_t> positions(123);
      alignas(64) std::byte scratch[16384];
      ScoreSelect(Exec{level}, {.group_size = 2,
                                .rule = rule,
                                .spans = {&span, 1},
                                .positions = positions,
                                .scratch = scratch});
      for (uint32_t i = 0; i < 123; ++i) ASSERT_EQ(positions[i], 8 + i) << LevelName(level);
    }
  }
}

TEST(SelectValuesTest, TakesTheLargestAndOfEqualOnesTheFirst) {
  std::mt19937_64 random(5);
  for (const uint32_t count : {0u, 1u, 7u, 15u, 16u, 17u, 63u, 64u, 65u, 1001u}) {
    std::vector<float> values(count), work(count);
    for (float& value : values) value = static_cast<float>(random() % 9);
    std::vector<uint32_t> order(count);
    for (uint32_t i = 0; i < count; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return values[a] > values[b]; });
    for (const uint32_t k : {0u, std::min(count, 1u), count / 3, count}) {
      std::vector<uint32_t> expected(order.begin(), order.begin() + k);
      std::sort(expected.begin(), expected.end());
      for (const Level level : AvailableLevels()) {
        std::vector<uint32_t> indices(k);
        SelectValues(Exec{level}, {.values = values, .indices = indices, .work = work});
        EXPECT_EQ(indices, expected) << LevelName(level) << " " << k << " of " << count;
      }
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels
