// Attention: every level against double precision, over spans, selections, shapes and extreme
// logits; partial results merge.
#include "kernels/attend/attend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/attend/merge.h"
#include "tests/kernels/attend/attend_problem.h"

namespace pqcached::kernels {
namespace {

class AttendTest : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(AllLevels, AttendTest, testing::ValuesIn(AvailableLevels()),
                         LevelTestName);

TEST_P(AttendTest, AllRowsMatchDoublePrecisionAroundBlockBoundaries) {
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t token_count :
         {0u, 1u, 2u, 31u, 32u, 33u, 63u, 64u, 65u, 127u, 128u, 129u, 4097u}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " tokens " << token_count);
      const Problem problem = MakeProblem(dtype, 128, 128, 4, 1, token_count, token_count);
      ExpectClose(GetParam(), problem, RunAll(GetParam(), problem),
                  Expected(problem, AllTokens(token_count)));
    }
  }
}

TEST_P(AttendTest, ChosenRowsMatchDoublePrecisionAtEveryDim) {
  for (const DType dtype : kAllDTypes) {
    for (uint32_t dim = 32; dim <= 256; dim += 8) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " dim " << dim);
      const uint32_t value_dim = 32 + (dim * 3) % 232 / 8 * 8;
      const Problem problem = MakeProblem(dtype, dim, value_dim, 4, 1, 129, dim, 3);
      const std::vector<uint32_t> tokens = RandomTokens(129, 0.5, dim);
      ExpectClose(GetParam(), problem, RunChosen(GetParam(), problem, tokens),
                  Expected(problem, tokens));
    }
  }
}

TEST_P(AttendTest, EveryGroupSizeAndQueryLengthMatches) {
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t group_size : {1u, 2u, 3u, 4u, 5u, 7u, 8u}) {
      for (uint32_t query_length = 1; query_length <= kMaxAttendQueryLength; ++query_length) {
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << " G " << group_size << " L " << query_length);
        const Problem problem =
            MakeProblem(dtype, 40, 72, group_size, query_length, 75, group_size, 2);
        const std::vector<uint32_t> tokens = RandomTokens(75, 0.7, query_length);
        ExpectClose(GetParam(), problem, RunChosen(GetParam(), problem, tokens),
                    Expected(problem, tokens));
      }
    }
  }
}

// A step of speculation: the selected rows of the middle serve all queries in one call, the last
// tokens are attended to causally, query by query, and the two merge.
TEST_P(AttendTest, SharedRowsAndCausalWindowsMergeToCausalAttention) {
  constexpr uint32_t kTokens = 140;
  constexpr uint32_t kGroup = 3;
  for (const DType dtype : kAllDTypes) {
    for (uint32_t query_length = 1; query_length <= kMaxAttendQueryLength; ++query_length) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " L " << query_length);
      const uint32_t window_begin = kTokens - 20;
      Problem problem = MakeProblem(dtype, 32, 40, kGroup, query_length, kTokens, 5, 3);
      std::vector<uint32_t> middle = RandomTokens(window_begin, 0.3, query_length);
      const Result shared = RunChosen(GetParam(), problem, middle);

      Problem one = problem;  // one query of the step
      one.shape.query_length = 1;
      const size_t query_floats = size_t{kGroup} * problem.shape.key_dim;
      const size_t output_floats = size_t{kGroup} * problem.shape.value_dim;
      for (uint32_t query = 0; query < query_length; ++query) {
        one.queries.assign(problem.queries.begin() + query * query_floats,
                           problem.queries.begin() + (query + 1) * query_floats);
        std::vector<uint32_t> seen = middle;
        std::vector<uint32_t> window;
        for (uint32_t t = window_begin; t <= kTokens - query_length + query; ++t) {
          window.push_back(t);
          seen.push_back(t);
        }
        Result merged = RunChosen(GetParam(), one, window);
        const std::vector<float> own = merged.output;
        const std::vector<float> own_lse = merged.lse;
        const Partial partials[] = {
            {shared.output.data() + query * output_floats, shared.lse.data() + query * kGroup},
            {own.data(), own_lse.data()}};
        MergePartials(Exec{GetParam()}, {.query_count = kGroup,
                                         .value_dim = problem.shape.value_dim,
                                         .partials = partials,
                                         .output = merged.output,
                                         .lse = merged.lse});
        ExpectClose(GetParam(), one, merged, Expected(one, seen));
      }
    }
  }
}

TEST_P(AttendTest, QueriesOfBf16Match) {
  for (uint32_t dim = 32; dim <= 256; dim += 8) {
    for (const float softcap : {0.0f, 3.0f}) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << " softcap " << softcap);
      Problem problem = MakeProblem(DType::kBf16, dim, 40, 7, 1, 133, dim, 2);
      problem.softcap = softcap;
      for (float& value : problem.queries) value = Bf16ToF32(F32ToBf16(value));
      const std::vector<uint32_t> tokens = RandomTokens(133, 0.7, dim);
      ExpectClose(GetParam(), problem, RunChosen(GetParam(), problem, tokens),
                  Expected(problem, tokens));
    }
  }
}

TEST_P(AttendTest, MoreHeadsThanOnePassMatch) {
  const Problem problem = MakeProblem(DType::kBf16, 64, 64, 33, 4, 40, 5);
  ExpectClose(GetParam(), problem, RunAll(GetParam(), problem), Expected(problem, AllTokens(40)));
}

TEST_P(AttendTest, LongSelectionsOverManySpansMatch) {
  for (const DType dtype : kAllDTypes) {
    SCOPED_TRACE(DTypeName(dtype));
    const Problem problem = MakeProblem(dtype, 128, 128, 4, 1, 4097, 3, 9);
    const std::vector<uint32_t> tokens = RandomTokens(4097, 0.1, 4);
    ExpectClose(GetParam(), problem, RunChosen(GetParam(), problem, tokens),
                Expected(problem, tokens));
    ExpectClose(GetParam(), problem, RunAll(GetParam(), problem),
                Expected(problem, AllTokens(4097)));
  }
}

TEST_P(AttendTest, EmptySpansBetweenOthersAreSkipped) {
  Problem problem = MakeProblem(DType::kF16, 64, 64, 2, 1, 5, 3, 9);  // 9 spans, 5 tokens
  ExpectClose(GetParam(), problem, RunAll(GetParam(), problem), Expected(problem, AllTokens(5)));
  const std::vector<uint32_t> ends = {0, 4};
  ExpectClose(GetParam(), problem, RunChosen(GetParam(), problem, ends), Expected(problem, ends));
}

TEST_P(AttendTest, UnalignedRowsAndStridesMatch) {
  for (const DType dtype : kAllDTypes) {
    for (const size_t padding_bytes : {1, 2, 24, 64}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " padding " << padding_bytes);
      const Problem problem = MakeProblem(dtype, 40, 104, 4, 1, 131, 9, 2, padding_bytes, 3);
      ExpectClose(GetParam(), problem, RunAll(GetParam(), problem),
                  Expected(problem, AllTokens(131)));
    }
  }
}

TEST_P(AttendTest, SoftcapBoundsTheLogits) {
  for (const DType dtype : kAllDTypes) {
    for (const float softcap : {0.5f, 10.0f, 50.0f}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " softcap " << softcap);
      Problem problem = MakeProblem(dtype, 128, 64, 4, 3, 165, 8);
      problem.softcap = softcap;
      problem.scale *= 5.0f;
      ExpectClose(GetParam(), problem, RunAll(GetParam(), problem),
                  Expected(problem, AllTokens(165)));
    }
  }
}

TEST_P(AttendTest, NothingChosenGivesZeroAndMinusInfinity) {
  for (const DType dtype : kAllDTypes) {
    const Problem problem = MakeProblem(dtype, 64, 72, 4, 2, 10, 8);
    const Result result = RunChosen(GetParam(), problem, {});
    for (const float value : result.output) EXPECT_EQ(value, 0.0f);
    for (const float value : result.lse) EXPECT_EQ(value, -kInfinity);
  }
}

TEST_P(AttendTest, LogitsOfMinusInfinityCountAsAbsent) {
  Problem problem = MakeProblem(DType::kF32, 32, 32, 1, 1, 70, 8);
  for (float& value : problem.queries) value = 2e38f;
  problem.scale = 1.0f;
  for (uint32_t token = 0; token < 70; ++token) {
    for (uint32_t i = 0; i < 32; ++i) problem.rows.Set(token, i, -2e38f);
  }
  const Result none = RunAll(GetParam(), problem);
  for (const float value : none.output) EXPECT_EQ(value, 0.0f);
  EXPECT_EQ(none.lse[0], -kInfinity);

  for (uint32_t i = 0; i < 32; ++i) problem.rows.Set(66, i, 0.0f);  // the only finite logit: 0
  const Result one = RunAll(GetParam(), problem);
  for (uint32_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(one.output[i], problem.rows.Values(66)[32 + i], 1e-5) << i;
  }
  EXPECT_NEAR(one.lse[0], 0.0f, 1e-6f);
}

TEST_P(AttendTest, LogitsBeyondFloatShareEqually) {
  Problem problem = MakeProblem(DType::kF32, 32, 32, 2, 1, 70, 8);
  for (float& value : problem.queries) value = 2e38f;
  for (const uint32_t token : {3u, 40u}) {
    for (uint32_t i = 0; i < 32; ++i) problem.rows.Set(token, i, 2e38f);
  }
  for (uint32_t token = 0; token < 70; ++token) {
    if (token == 3 || token == 40) continue;
    for (uint32_t i = 0; i < 32; ++i) problem.rows.Set(token, i, 0.0f);
  }
  const Result result = RunAll(GetParam(), problem);
  for (uint32_t i = 0; i < 64; ++i) {
    const uint32_t column = 32 + i % 32;
    EXPECT_NEAR(result.output[i],
                (problem.rows.Values(3)[column] + problem.rows.Values(40)[column]) / 2, 1e-5);
  }
  EXPECT_EQ(result.lse[0], std::numeric_limits<float>::max());
}

TEST_P(AttendTest, HugeButFiniteLogitsPickTheLargest) {
  for (const DType dtype : kAllDTypes) {
    SCOPED_TRACE(DTypeName(dtype));
    Problem problem = MakeProblem(dtype, 128, 128, 4, 1, 100, 8);
    problem.scale = 1e4f;
    ExpectClose(Level::kReference, problem, RunAll(Level::kReference, problem),
                Expected(problem, AllTokens(100)));
    const Result actual = RunAll(GetParam(), problem);
    const Result expected = Expected(problem, AllTokens(100));
    for (size_t i = 0; i < actual.output.size(); ++i) {
      ASSERT_NEAR(actual.output[i], expected.output[i], 0.02f) << i;
    }
    for (size_t i = 0; i < actual.lse.size(); ++i) {
      EXPECT_NEAR(actual.lse[i] / expected.lse[i], 1.0f, 1e-5f);
    }
  }
}

TEST_P(AttendTest, DenormalRowsGiveTheirMean) {
  for (const DType dtype : kAllDTypes) {
    SCOPED_TRACE(DTypeName(dtype));
    Problem problem = MakeProblem(dtype, 32, 32, 4, 1, 65, 8);
    const float denormal = dtype == DType::kF16 ? 0x1.8p-23f : 0x1p-130f;
    for (uint32_t token = 0; token < 65; ++token) {
      for (uint32_t i = 0; i < 64; ++i) problem.rows.Set(token, i, denormal);
    }
    const Result result = RunAll(GetParam(), problem);
    for (const float value : result.lse) EXPECT_NEAR(value, std::log(65.0f), 1e-4f);
    // vdpbf16ps takes bf16 denormals for zero.
    const float allowed = dtype == DType::kF16 ? denormal * 1e-5f : denormal * 1.01f;
    for (const float value : result.output) EXPECT_NEAR(value, denormal, allowed);
  }
}

TEST_P(AttendTest, EqualKeysGiveTheMeanOfTheValues) {
  for (const DType dtype : kAllDTypes) {
    SCOPED_TRACE(DTypeName(dtype));
    Problem problem = MakeProblem(dtype, 64, 64, 4, 1, 129, 8);
    for (uint32_t token = 0; token < 129; ++token) {
      for (uint32_t i = 0; i < 64; ++i) problem.rows.Set(token, i, 0.25f);
    }
    ExpectClose(GetParam(), problem, RunAll(GetParam(), problem),
                Expected(problem, AllTokens(129)));
  }
}

// Growing logits make every block rescale what came before, falling ones none.
TEST_P(AttendTest, MonotonicLogitsMatch) {
  for (const float slope : {0.2f, -0.2f}) {
    for (const DType dtype : kAllDTypes) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " slope " << slope);
      Problem problem = MakeProblem(dtype, 32, 64, 2, 1, 200, 8);
      for (uint32_t head = 0; head < 2; ++head) {
        for (uint32_t i = 0; i < 32; ++i) problem.queries[head * 32 + i] = i == 0 ? 1.0f : 0.0f;
      }
      problem.scale = 1.0f;
      for (uint32_t token = 0; token < 200; ++token) {
        problem.rows.Set(token, 0, slope * static_cast<float>(token));
      }
      ExpectClose(GetParam(), problem, RunAll(GetParam(), problem),
                  Expected(problem, AllTokens(200)));
    }
  }
}

TEST_P(AttendTest, DisjointSelectionsMergeToFullAttention) {
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t token_count : {1u, 127u, 128u, 129u, 4097u}) {
      for (const uint32_t group_size : {1u, 4u, 8u}) {
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << " tokens " << token_count << " G " << group_size);
        const Problem problem =
            MakeProblem(dtype, 128, 128, group_size, 1, token_count, token_count, 3);
        const std::vector<uint32_t> some = RandomTokens(token_count, 0.2, 6);
        std::vector<uint32_t> others;
        for (const uint32_t token : AllTokens(token_count)) {
          if (!std::binary_search(some.begin(), some.end(), token)) others.push_back(token);
        }
        const Result first = RunChosen(GetParam(), problem, some);
        const Result second = RunChosen(GetParam(), problem, others);
        Result merged = first;
        const Partial partials[] = {{first.output.data(), first.lse.data()},
                                    {second.output.data(), second.lse.data()}};
        MergePartials(Exec{GetParam()}, {.query_count = problem.HeadCount(),
                                         .value_dim = 128,
                                         .partials = partials,
                                         .output = merged.output,
                                         .lse = merged.lse});
        ExpectClose(GetParam(), problem, merged, Expected(problem, AllTokens(token_count)));
      }
    }
  }
}

TEST_P(AttendTest, RandomShapesMatch) {
  std::mt19937 generator(1234);
  const auto pick = [&](uint32_t low, uint32_t high) {
    return std::uniform_int_distribution<uint32_t>(low, high)(generator);
  };
  for (uint32_t round = 0; round < 60; ++round) {
    const uint32_t token_count = pick(0, 300);
    Problem problem =
        MakeProblem(kAllDTypes[round % 3], pick(4, 32) * 8, pick(4, 32) * 8, pick(1, 9), pick(1, 8),
                    token_count, round, pick(1, 6), pick(0, 70), pick(0, 63));
    if (round % 4 == 0) problem.softcap = 20.0f;
    const std::vector<uint32_t> tokens = RandomTokens(token_count, pick(0, 10) / 10.0, round);
    SCOPED_TRACE(testing::Message() << "round " << round);
    ExpectClose(GetParam(), problem, RunChosen(GetParam(), problem, tokens),
                Expected(problem, tokens));
  }
}

// ---- Given logits

void ExpectScoredMatches(Level level, const Problem& problem, const std::vector<uint32_t>& tokens) {
  ExpectClose(level, problem, RunScored(level, problem, tokens), Expected(problem, tokens));
  const Result scored = RunScored(level, problem, tokens);
  const Result of_values = RunScored(level, problem, tokens, /*rows_have_keys=*/false);
  EXPECT_TRUE(of_values.output == scored.output && of_values.lse == scored.lse);
}

TEST_P(AttendTest, GivenLogitsMatchAroundBlockBoundaries) {
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t tokens : {0u, 1u, 2u, 15u, 16u, 17u, 31u, 32u, 33u, 63u, 64u, 65u, 1000u}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " tokens " << tokens);
      ExpectScoredMatches(GetParam(), MakeProblem(dtype, 128, 128, 4, 1, tokens, tokens, 2),
                          AllTokens(tokens));
    }
  }
}

TEST_P(AttendTest, GivenLogitsMatchForEveryDimAndGroup) {
  for (const DType dtype : kAllDTypes) {
    for (uint32_t dim = 32; dim <= 256; dim += 8) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " dim " << dim);
      const Problem problem =
          MakeProblem(dtype, 288 - dim, dim, 1 + dim / 8 % 9, 1 + dim / 16 % 3, 75, dim, 3, 7, 5);
      ExpectScoredMatches(GetParam(), problem, RandomTokens(75, 0.7, dim));
    }
  }
}

TEST_P(AttendTest, GivenLogitsOfMoreHeadsThanOnePassMatch) {
  const Problem problem = MakeProblem(DType::kBf16, 32, 40, 70, 1, 90, 3, 2);
  ExpectScoredMatches(GetParam(), problem, RandomTokens(90, 0.6, 4));
}

TEST_P(AttendTest, GivenLogitsAreFinal) {
  Problem problem = MakeProblem(DType::kF16, 64, 64, 2, 1, 80, 9);
  problem.softcap = 2.0f;  // RunScored passes another softcap and scale
  ExpectScoredMatches(GetParam(), problem, AllTokens(80));
}

TEST_P(AttendTest, GivenLogitsOfMinusInfinityCountAsAbsent) {
  const Problem problem = MakeProblem(DType::kF32, 32, 32, 1, 1, 70, 8);
  std::vector<float> logits(70, -kInfinity), output(32, 99.0f), lse(1, 99.0f);
  std::vector<std::byte> scratch(AttendScratchBytes(problem.shape));
  const AttendArgs args{.shape = problem.shape,
                        .spans = problem.rows.spans,
                        .positions = problem.rows.positions,
                        .output = output,
                        .lse = lse,
                        .scratch = scratch,
                        .logits = logits};
  AttendScored(Exec{GetParam()}, args);
  for (const float value : output) EXPECT_EQ(value, 0.0f);
  EXPECT_EQ(lse[0], -kInfinity);
  logits[66] = 3.0f;
  AttendScored(Exec{GetParam()}, args);
  for (uint32_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(output[i], problem.rows.Values(66)[32 + i], 1e-5) << i;
  }
  EXPECT_NEAR(lse[0], 3.0f, 1e-6f);
}

}  // namespace
}  // namespace pqcached::kernels
