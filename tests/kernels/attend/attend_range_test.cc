// Attention of a tile of queries over a range: every level against double precision, over rows,
// heads, dims, spans, causal masks and extreme logits.
#include "kernels/attend/attend_range.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Behind every row: a query at this position sees all of them.
constexpr uint32_t kBehind = 100000;

struct Result {
  std::vector<float> output;
  std::vector<float> lse;
};

struct Problem {
  AttendRangeShape shape;
  RowData rows;
  std::vector<float> queries;
  float scale = 1.0f;
  float softcap = 0.0f;
  uint32_t query_position = kBehind;

  uint32_t HeadCount() const { return shape.group_size * shape.token_count; }
};

struct Sizes {
  uint32_t key_dim = 128;
  uint32_t value_dim = 128;
  uint32_t group_size = 4;
  uint32_t tokens = 12;  // of the query
  uint32_t rows = 100;
  uint32_t span_count = 1;
  size_t padding_bytes = 0;
  size_t offset = 0;
};

Problem MakeProblem(DType dtype, const Sizes& sizes, uint32_t seed) {
  Problem problem;
  problem.rows = MakeRows(dtype, sizes.key_dim + sizes.value_dim, sizes.rows, sizes.span_count,
                          seed, sizes.padding_bytes, sizes.offset);
  problem.shape = {.dtype = dtype,
                   .key_dim = sizes.key_dim,
                   .value_dim = sizes.value_dim,
                   .row_stride_bytes = problem.rows.stride_bytes,
                   .group_size = sizes.group_size,
                   .token_count = sizes.tokens};
  problem.queries = RandomFloats(size_t{problem.HeadCount()} * sizes.key_dim, seed + 1, 2.0f);
  problem.scale = 1.0f / std::sqrt(static_cast<float>(sizes.key_dim));
  return problem;
}

// Makes all queries numbers of bf16, as those of a model in bf16 are.
void RoundQueries(Problem* problem) {
  for (float& value : problem->queries) value = Bf16ToF32(F32ToBf16(value));
}

// The definition, in double.
Result Expected(const Problem& problem) {
  const AttendRangeShape& shape = problem.shape;
  Result result;
  for (uint32_t head = 0; head < problem.HeadCount(); ++head) {
    const uint32_t last = problem.query_position + head / shape.group_size;
    std::vector<double> logits;
    double largest = -std::numeric_limits<double>::infinity();
    for (uint32_t row = 0; row < problem.rows.positions.size(); ++row) {
      if (problem.rows.positions[row] > last) break;
      const double* key = problem.rows.Values(row);
      double logit = 0.0;
      for (uint32_t i = 0; i < shape.key_dim; ++i) {
        logit += static_cast<double>(problem.queries[head * shape.key_dim + i]) * key[i];
      }
      logit *= static_cast<double>(problem.scale);
      const double cap = static_cast<double>(problem.softcap);
      if (cap > 0.0) logit = cap * std::tanh(logit / cap);
      logits.push_back(logit);
      largest = std::max(largest, logit);
    }
    double sum = 0.0;
    std::vector<double> output(shape.value_dim, 0.0);
    for (size_t row = 0; row < logits.size(); ++row) {
      const double weight = std::exp(logits[row] - largest);
      sum += weight;
      const double* value = problem.rows.Values(row) + shape.key_dim;
      for (uint32_t i = 0; i < shape.value_dim; ++i) output[i] += weight * value[i];
    }
    for (const double value : output) {
      result.output.push_back(logits.empty() ? 0.0f : static_cast<float>(value / sum));
    }
    result.lse.push_back(logits.empty() ? -kInfinity : static_cast<float>(largest + std::log(sum)));
  }
  return result;
}

Result RunRange(Level level, const Problem& problem) {
  Result result;
  result.output.assign(size_t{problem.HeadCount()} * problem.shape.value_dim, 99.0f);
  result.lse.assign(problem.HeadCount(), 99.0f);
  // Scratch that is not zero, and guarded: writes behind it would be seen.
  const size_t scratch_bytes = AttendRangeScratchBytes(problem.shape) + 1;
  std::vector<std::byte> scratch(scratch_bytes + 64, std::byte{0xff});
  AttendRange(Exec{level}, {.shape = problem.shape,
                            .scale = problem.scale,
                            .softcap = problem.softcap,
                            .query_position = problem.query_position,
                            .queries = problem.queries,
                            .spans = problem.rows.spans,
                            .output = result.output,
                            .lse = result.lse,
                            .scratch = std::span(scratch).subspan(1, scratch_bytes - 1)});
  for (size_t i = scratch_bytes; i < scratch.size(); ++i) EXPECT_EQ(scratch[i], std::byte{0xff});
  return result;
}

// Holds what the header promises.
void ExpectClose(Level level, const Problem& problem) {
  const Result actual = RunRange(level, problem);
  const Result expected = Expected(problem);
  const bool bf16 = level == Level::kAvx512Bf16 && problem.shape.dtype == DType::kBf16;
  double largest_value = 0.0;
  for (const double value : problem.rows.values) {
    largest_value = std::max(largest_value, std::abs(value));
  }
  double error_sum = 0.0;
  double worst = 0.0;
  for (size_t i = 0; i < expected.output.size(); ++i) {
    ASSERT_FALSE(std::isnan(actual.output[i])) << "output " << i;
    const double error =
        std::abs(static_cast<double>(actual.output[i]) - static_cast<double>(expected.output[i]));
    worst = std::max(worst, error);
    error_sum += error;
  }
  EXPECT_LE(worst, (bf16 ? 5e-3 : 2e-5) * largest_value);
  if (bf16) {
    EXPECT_LE(error_sum, 5e-4 * largest_value * static_cast<double>(expected.output.size()));
  }
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    if (expected.lse[i] == -kInfinity) {
      EXPECT_EQ(actual.lse[i], -kInfinity) << "head " << i;
    } else {
      EXPECT_NEAR(actual.lse[i], expected.lse[i], bf16 ? 1e-3f : 5e-5f) << "head " << i;
    }
  }
}

class AttendRangeTest : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(AllLevels, AttendRangeTest, testing::ValuesIn(AvailableLevels()),
                         LevelTestName);

TEST_P(AttendRangeTest, RowsAroundBlockBoundariesMatch) {
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t rows : {0u, 1u, 2u, 7u, 8u, 9u, 15u, 16u, 17u, 63u, 64u, 65u, 127u, 128u,
                                129u, 255u, 256u, 257u, 1025u}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " rows " << rows);
      ExpectClose(GetParam(), MakeProblem(dtype, {.tokens = 3, .rows = rows}, rows));
    }
  }
}

TEST_P(AttendRangeTest, HeadsAroundVectorsAndGroupsMatch) {
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t heads : {1u,  2u,  3u,  4u,  8u,  9u,  11u, 12u, 13u, 15u,  16u,
                                 17u, 23u, 24u, 25u, 47u, 48u, 49u, 96u, 97u, 239u, 240u}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " heads " << heads);
      const Sizes sizes = {
          .key_dim = 40, .value_dim = 72, .group_size = 1, .tokens = heads, .rows = 75};
      ExpectClose(GetParam(), MakeProblem(dtype, sizes, heads));
    }
  }
}

TEST_P(AttendRangeTest, EveryDimMatches) {
  for (const DType dtype : kAllDTypes) {
    for (uint32_t dim = 32; dim <= 256; dim += 8) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " dim " << dim);
      const Sizes sizes = {.key_dim = dim,
                           .value_dim = 32 + (dim * 3) % 232 / 8 * 8,
                           .group_size = 3,
                           .tokens = 5,
                           .rows = 67,
                           .span_count = 3};
      ExpectClose(GetParam(), MakeProblem(dtype, sizes, dim));
    }
  }
}

// The first query token stands before, at, between and behind the rows, whose positions begin at 7
// and have gaps.
TEST_P(AttendRangeTest, EachQueryTokenSeesTheRowsUpToItsPosition) {
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t group_size : {1u, 3u, 4u, 7u}) {
      for (const uint32_t position : {0u, 6u, 7u, 8u, 70u, 71u, 100u, 134u, 135u, 200u, 300u}) {
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << " G " << group_size << " position " << position);
        Problem problem = MakeProblem(dtype,
                                      {.key_dim = 32,
                                       .value_dim = 40,
                                       .group_size = group_size,
                                       .tokens = kMaxRangeHeads / group_size,
                                       .rows = 270,
                                       .span_count = 4},
                                      position);
        problem.query_position = position;
        ExpectClose(GetParam(), problem);
      }
    }
  }
}

TEST_P(AttendRangeTest, OneTokenAtEachPositionMatches) {
  for (const DType dtype : kAllDTypes) {
    for (uint32_t position = 5; position < 45; ++position) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " position " << position);
      Problem problem = MakeProblem(
          dtype, {.key_dim = 32, .value_dim = 32, .group_size = 2, .tokens = 1, .rows = 35},
          position);
      problem.query_position = position;
      ExpectClose(GetParam(), problem);
    }
  }
}

TEST_P(AttendRangeTest, QueriesOfBf16Match) {
  for (const uint32_t rows : {1u, 129u, 700u}) {
    Problem problem = MakeProblem(DType::kBf16, {.tokens = 31, .rows = rows}, rows);
    RoundQueries(&problem);
    problem.query_position = 60;
    ExpectClose(GetParam(), problem);
  }
}

// Queries that are not numbers of bf16 keep more than their upper half.
TEST_P(AttendRangeTest, QueriesKeepMoreThanBf16) {
  Problem problem = MakeProblem(DType::kBf16, {.tokens = 31, .rows = 50}, 3);
  problem.scale *= 8.0f;
  const Result exact = Expected(problem);
  const Result actual = RunRange(GetParam(), problem);
  for (size_t i = 0; i < exact.lse.size(); ++i) EXPECT_NEAR(actual.lse[i], exact.lse[i], 1e-3f);
}

TEST_P(AttendRangeTest, UnalignedRowsAndStridesMatch) {
  for (const DType dtype : kAllDTypes) {
    for (const size_t padding_bytes : {1, 2, 24, 64}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " padding " << padding_bytes);
      ExpectClose(GetParam(), MakeProblem(dtype,
                                          {.key_dim = 40,
                                           .value_dim = 104,
                                           .rows = 131,
                                           .span_count = 2,
                                           .padding_bytes = padding_bytes,
                                           .offset = 3},
                                          9));
    }
  }
}

TEST_P(AttendRangeTest, EmptySpansBetweenOthersAreSkipped) {
  for (const uint32_t tokens : {1u, 9u}) {
    ExpectClose(GetParam(),
                MakeProblem(DType::kF16, {.tokens = tokens, .rows = 5, .span_count = 9}, 3));
  }
}

TEST_P(AttendRangeTest, SoftcapBoundsTheLogits) {
  for (const DType dtype : kAllDTypes) {
    for (const float softcap : {0.5f, 10.0f, 50.0f}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " softcap " << softcap);
      Problem problem = MakeProblem(dtype, {.value_dim = 64, .rows = 165}, 8);
      problem.softcap = softcap;
      problem.scale *= 5.0f;
      problem.query_position = 100;
      ExpectClose(GetParam(), problem);
    }
  }
}

TEST_P(AttendRangeTest, LogitsOfMinusInfinityCountAsAbsent) {
  Problem problem =
      MakeProblem(DType::kF32, {.key_dim = 32, .value_dim = 32, .tokens = 3, .rows = 70}, 8);
  for (float& value : problem.queries) value = 2e38f;
  problem.scale = 1.0f;
  for (uint32_t row = 0; row < 70; ++row) {
    for (uint32_t i = 0; i < 32; ++i) problem.rows.Set(row, i, -2e38f);
  }
  const Result none = RunRange(GetParam(), problem);
  for (const float value : none.output) EXPECT_EQ(value, 0.0f);
  for (const float value : none.lse) EXPECT_EQ(value, -kInfinity);

  for (uint32_t i = 0; i < 32; ++i) problem.rows.Set(66, i, 0.0f);  // the only finite logit: 0
  const Result one = RunRange(GetParam(), problem);
  for (uint32_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(one.output[i], problem.rows.Values(66)[32 + i], 1e-5) << i;
  }
  EXPECT_NEAR(one.lse[0], 0.0f, 1e-6f);
}

TEST_P(AttendRangeTest, LogitsBeyondFloatShareEqually) {
  Problem problem =
      MakeProblem(DType::kF32, {.key_dim = 32, .value_dim = 32, .tokens = 3, .rows = 70}, 8);
  for (float& value : problem.queries) value = 2e38f;
  problem.scale = 1.0f;
  for (uint32_t row = 0; row < 70; ++row) {
    const float key = row == 3 || row == 40 ? 2e38f : 0.0f;
    for (uint32_t i = 0; i < 32; ++i) problem.rows.Set(row, i, key);
  }
  const Result result = RunRange(GetParam(), problem);
  for (uint32_t i = 0; i < 64; ++i) {
    const uint32_t column = 32 + i % 32;
    EXPECT_NEAR(result.output[i],
                (problem.rows.Values(3)[column] + problem.rows.Values(40)[column]) / 2, 1e-5);
  }
  EXPECT_EQ(result.lse[0], std::numeric_limits<float>::max());
}

// Growing logits make every block rescale what came before, falling ones none.
TEST_P(AttendRangeTest, MonotonicLogitsMatch) {
  for (const float slope : {0.1f, -0.1f}) {
    for (const DType dtype : kAllDTypes) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " slope " << slope);
      Problem problem =
          MakeProblem(dtype, {.key_dim = 32, .value_dim = 64, .tokens = 20, .rows = 400}, 8);
      problem.scale = 1.0f;
      for (size_t i = 0; i < problem.queries.size(); ++i) {
        problem.queries[i] = i % 32 == 0 ? 1.0f : 0.0f;
      }
      for (uint32_t row = 0; row < 400; ++row) {
        problem.rows.Set(row, 0, slope * static_cast<float>(row));
      }
      ExpectClose(GetParam(), problem);
    }
  }
}

// A query with NaN spoils its own output only.
TEST_P(AttendRangeTest, NanInAQueryStaysThere) {
  for (const DType dtype : kAllDTypes) {
    Problem problem = MakeProblem(dtype, {.tokens = 20, .rows = 130}, 8);
    const Result clean = RunRange(GetParam(), problem);
    problem.queries[5 * 128 + 7] = std::numeric_limits<float>::quiet_NaN();
    const Result spoilt = RunRange(GetParam(), problem);
    for (uint32_t head = 0; head < problem.HeadCount(); ++head) {
      if (head == 5) continue;
      EXPECT_NEAR(spoilt.lse[head], clean.lse[head], 1e-3f) << DTypeName(dtype) << head;
      EXPECT_NEAR(spoilt.output[head * 128], clean.output[head * 128], 2e-2f);
    }
  }
}

TEST_P(AttendRangeTest, RandomShapesMatch) {
  std::mt19937 generator(1234);
  const auto pick = [&](uint32_t low, uint32_t high) {
    return std::uniform_int_distribution<uint32_t>(low, high)(generator);
  };
  for (uint32_t round = 0; round < 60; ++round) {
    const uint32_t group_size = pick(1, 9);
    Problem problem = MakeProblem(kAllDTypes[round % 3],
                                  {.key_dim = pick(4, 32) * 8,
                                   .value_dim = pick(4, 32) * 8,
                                   .group_size = group_size,
                                   .tokens = pick(1, 90 / group_size),
                                   .rows = pick(0, 300),
                                   .span_count = pick(1, 6),
                                   .padding_bytes = pick(0, 70),
                                   .offset = pick(0, 63)},
                                  round);
    problem.query_position = pick(0, 350);
    if (round % 4 == 0) problem.softcap = 20.0f;
    SCOPED_TRACE(testing::Message() << "round " << round);
    ExpectClose(GetParam(), problem);
  }
}

}  // namespace
}  // namespace pqcached::kernels
