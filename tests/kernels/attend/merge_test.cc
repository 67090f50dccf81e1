// MergePartials: the identities that make partial attentions composable.
#include "kernels/attend/merge.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint32_t kDim = 40;

struct Part {
  std::vector<float> output;
  std::vector<float> lse;
};

Part RandomPart(uint32_t query_count, uint32_t seed) {
  return {RandomFloats(query_count * kDim, seed), RandomFloats(query_count, seed + 100, 10.0f)};
}

Part EmptyPart(uint32_t query_count) {
  return {std::vector<float>(query_count * kDim, std::numeric_limits<float>::quiet_NaN()),
          std::vector<float>(query_count, -kInfinity)};
}

Part Merge(Level level, const std::vector<Part>& parts, uint32_t query_count) {
  std::vector<Partial> partials;
  for (const Part& part : parts) partials.push_back({part.output.data(), part.lse.data()});
  Part merged{std::vector<float>(query_count * kDim, 7.0f), std::vector<float>(query_count, 7.0f)};
  MergePartials(Exec{level}, {.query_count = query_count,
                              .value_dim = kDim,
                              .partials = partials,
                              .output = merged.output,
                              .lse = merged.lse});
  return merged;
}

void ExpectNear(const Part& actual, const Part& expected) {
  for (size_t i = 0; i < expected.output.size(); ++i) {
    ASSERT_NEAR(actual.output[i], expected.output[i], 3e-6f) << "output " << i;
  }
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    if (std::isinf(expected.lse[i])) {
      ASSERT_EQ(actual.lse[i], expected.lse[i]) << "lse " << i;
    } else {
      ASSERT_NEAR(actual.lse[i], expected.lse[i], 1e-5f) << "lse " << i;
    }
  }
}

class MergeTest : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(AllLevels, MergeTest, testing::ValuesIn(AvailableLevels()), LevelTestName);

TEST_P(MergeTest, MatchesTheFormulaInDoublePrecision) {
  for (const size_t part_count : {1, 2, 3, 7}) {
    constexpr uint32_t kQueries = 5;
    std::vector<Part> parts;
    for (uint32_t i = 0; i < part_count; ++i) parts.push_back(RandomPart(kQueries, i));
    Part expected{std::vector<float>(kQueries * kDim), std::vector<float>(kQueries)};
    for (uint32_t query = 0; query < kQueries; ++query) {
      double sum = 0.0;
      for (const Part& part : parts) sum += std::exp(static_cast<double>(part.lse[query]));
      expected.lse[query] = static_cast<float>(std::log(sum));
      for (uint32_t i = query * kDim; i < (query + 1) * kDim; ++i) {
        double value = 0.0;
        for (const Part& part : parts) {
          value += std::exp(static_cast<double>(part.lse[query])) / sum *
                   static_cast<double>(part.output[i]);
        }
        expected.output[i] = static_cast<float>(value);
      }
    }
    ExpectNear(Merge(GetParam(), parts, kQueries), expected);
  }
}

TEST_P(MergeTest, OrderAndGroupingDoNotMatter) {
  const Part a = RandomPart(4, 1);
  const Part b = RandomPart(4, 2);
  const Part c = RandomPart(4, 3);
  const Part together = Merge(GetParam(), {a, b, c}, 4);
  ExpectNear(Merge(GetParam(), {c, a, b}, 4), together);
  ExpectNear(Merge(GetParam(), {Merge(GetParam(), {a, b}, 4), c}, 4), together);
}

TEST_P(MergeTest, EmptyPartsDoNotCountAndAreNotRead) {
  const Part a = RandomPart(4, 1);
  ExpectNear(Merge(GetParam(), {a, EmptyPart(4)}, 4), a);
  ExpectNear(Merge(GetParam(), {EmptyPart(4), a, EmptyPart(4)}, 4), a);
}

TEST_P(MergeTest, NothingGivesZeroAndMinusInfinity) {
  const Part nothing{std::vector<float>(4 * kDim, 0.0f), std::vector<float>(4, -kInfinity)};
  ExpectNear(Merge(GetParam(), {}, 4), nothing);
  ExpectNear(Merge(GetParam(), {EmptyPart(4), EmptyPart(4)}, 4), nothing);
}

TEST_P(MergeTest, FarApartSumsNeitherOverflowNorVanish) {
  Part high = RandomPart(2, 1);
  Part low = RandomPart(2, 2);
  for (float& value : high.lse) value = 3e38f;
  for (float& value : low.lse) value = -3e38f;
  ExpectNear(Merge(GetParam(), {low, high}, 2), high);
  ExpectNear(Merge(GetParam(), {low, low}, 2), low);
}

TEST_P(MergeTest, MergesInPlace) {
  const Part a = RandomPart(3, 1);
  const Part b = RandomPart(3, 2);
  Part target = a;
  const Partial partials[] = {{target.output.data(), target.lse.data()},
                              {b.output.data(), b.lse.data()}};
  MergePartials(Exec{GetParam()}, {.query_count = 3,
                                   .value_dim = kDim,
                                   .partials = partials,
                                   .output = target.output,
                                   .lse = target.lse});
  ExpectNear(target, Merge(GetParam(), {a, b}, 3));
}

}  // namespace
}  // namespace pqcached::kernels
