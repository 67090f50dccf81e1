// CountForMass: every level against a plain sort in double precision.
#include "kernels/select/mass_count.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace pqcached::kernels {
namespace {

struct MassCase {
  uint32_t group_size = 1;
  GroupRule rule = GroupRule::kSumSoftmax;
  std::vector<uint32_t> span_sizes = {};
  bool has_own = true;
  bool all_equal = false;
};

class MassProblem {
 public:
  MassProblem(const MassCase& mass_case, uint64_t seed) : case_(mass_case) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0.0f, 2.0f);
    for (const uint32_t size : case_.span_sizes) {
      std::vector<float>& logits = logits_.emplace_back(size_t{size} * case_.group_size);
      for (float& logit : logits) logit = case_.all_equal ? 1.0f : normal(random);
      spans_.push_back(
          {.logits = logits.data(), .head_stride = size, .token_count = size, .first_position = 0});
    }
    for (uint32_t head = 0; head < case_.group_size; ++head) {
      own_.push_back(case_.has_own ? OwnWeight{normal(random), 3.0f} : OwnWeight{});
    }
  }

  uint32_t Count(Level level, double mass) const {
    const Exec exec{.level = level};
    std::vector<std::byte> memory(MassCountScratchBytes(token_count()) + 64);
    void* begin = memory.data();
    size_t room = memory.size();
    std::align(64, 1, begin, room);
    return CountForMass(exec, {.group_size = case_.group_size,
                               .rule = case_.rule,
                               .spans = spans_,
                               .own = own_,
                               .mass = mass,
                               .scratch = {static_cast<std::byte*>(begin), room}});
  }

  uint32_t token_count() const {
    return std::accumulate(case_.span_sizes.begin(), case_.span_sizes.end(), 0u);
  }

  // Returns the mass of own tokens and of the k best candidates for every k.
  std::vector<double> Masses() const {
    const uint32_t group = case_.group_size, count = token_count();
    std::vector<double> sums(group), own_sums(group), candidate_sums(group);
    for (uint32_t head = 0; head < group; ++head) {
      own_sums[head] = own_[head].sum_exp * std::exp(double{own_[head].max});
      for (uint32_t i = 0; i < count; ++i) candidate_sums[head] += std::exp(double{logit(head, i)});
      sums[head] = own_sums[head] + candidate_sums[head];
    }
    std::vector<double> values(count), masses(count);
    double mass = 0;
    for (uint32_t head = 0; head < group; ++head) mass += own_sums[head] / sums[head] / group;
    for (uint32_t i = 0; i < count; ++i) {
      double sum = 0, largest_share = 0, largest = -1e30, total = 0;
      for (uint32_t head = 0; head < group; ++head) {
        const double one = logit(head, i), share = std::exp(one) / candidate_sums[head];
        masses[i] += std::exp(one) / sums[head] / group;
        sum += share;
        largest_share = std::max(largest_share, share);
        largest = std::max(largest, one);
        total += one;
      }
      values[i] = group == 1                             ? largest
                  : case_.rule == GroupRule::kSumSoftmax ? sum
                  : case_.rule == GroupRule::kMaxSoftmax ? largest_share
                  : case_.rule == GroupRule::kMaxLogit   ? largest
                                                         : total;
    }
    std::vector<uint32_t> order(count);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return values[a] > values[b]; });
    std::vector<double> of_best = {mass};
    for (const uint32_t i : order) of_best.push_back(mass += masses[i]);
    return of_best;
  }

 private:
  float logit(uint32_t head, uint32_t token) const {
    size_t span = 0;
    while (token >= case_.span_sizes[span]) token -= case_.span_sizes[span++];
    return logits_[span][size_t{head} * case_.span_sizes[span] + token];
  }

  const MassCase case_;
  std::vector<std::vector<float>> logits_;
  std::vector<ScoreSpan> spans_;
  std::vector<OwnWeight> own_;
};

// k is the smallest number with the mass, but for what rounding of the weights can move.
void ExpectSmallest(const MassProblem& problem, double mass) {
  const std::vector<double> masses = problem.Masses();
  constexpr double kRounding = 2e-5;
  for (const Level level : AvailableLevels()) {
    const uint32_t k = problem.Count(level, mass);
    ASSERT_LT(k, masses.size());
    EXPECT_GE(masses[k], mass - kRounding) << "level " << static_cast<int>(level);
    if (k > 0) {
      EXPECT_LT(masses[k - 1], mass + kRounding) << "level " << static_cast<int>(level);
    }
  }
}

TEST(CountForMass, IsTheSmallestCount) {
  uint64_t seed = 0;
  for (const uint32_t group : {1u, 3u, 4u, 64u}) {
    for (const GroupRule rule : {GroupRule::kSumSoftmax, GroupRule::kMaxSoftmax,
                                 GroupRule::kMeanLogit, GroupRule::kMaxLogit}) {
      for (const std::vector<uint32_t>& sizes :
           std::vector<std::vector<uint32_t>>{{1}, {2}, {15}, {16, 17}, {1, 300, 5}, {5000}}) {
        for (const bool has_own : {false, true}) {
          const MassProblem problem({group, rule, sizes, has_own}, ++seed);
          for (const double mass : {0.01, 0.5, 0.9, 0.99, 0.999}) {
            SCOPED_TRACE(::testing::Message()
                         << "group " << group << ", rule " << static_cast<int>(rule) << ", mass "
                         << mass << ", tokens " << problem.token_count());
            ExpectSmallest(problem, mass);
          }
        }
      }
    }
  }
}

TEST(CountForMass, GrowsWithTheMass) {
  const MassProblem problem({4, GroupRule::kSumSoftmax, {2000}}, 5);
  for (const Level level : AvailableLevels()) {
    uint32_t before = 0;
    for (double mass = 0.05; mass <= 1.0; mass += 0.05) {
      const uint32_t k = problem.Count(level, mass);
      EXPECT_GE(k, before);
      before = k;
    }
    EXPECT_LE(problem.Count(level, 1.0), 2000u);
  }
}

TEST(CountForMass, OfEqualTokensIsTheirShare) {
  for (const uint32_t group : {1u, 4u}) {
    const MassProblem problem({group, GroupRule::kSumSoftmax, {1000}, false, true}, 5);
    for (const Level level : AvailableLevels()) {
      EXPECT_NEAR(problem.Count(level, 0.25), 250.0, 1.0);
      EXPECT_NEAR(problem.Count(level, 1.0), 1000.0, 1.0);
    }
  }
}

TEST(CountForMass, IsZeroWhereTheOwnTokensSuffice) {
  const std::vector<float> logits(8, -10.0f);
  const ScoreSpan span{.logits = logits.data(), .head_stride = 8, .token_count = 8};
  const OwnWeight own{.max = 5.0f, .sum_exp = 1.0f};
  alignas(64) static std::byte scratch[1 << 17];
  ASSERT_LE(MassCountScratchBytes(8), sizeof(scratch));
  for (const Level level : AvailableLevels()) {
    EXPECT_EQ(CountForMass(Exec{.level = level}, {.group_size = 1,
                                                  .spans = {&span, 1},
                                                  .own = {&own, 1},
                                                  .mass = 0.99,
                                                  .scratch = scratch}),
              0u);
  }
}

}  // namespace
}  // namespace pqcached::kernels
