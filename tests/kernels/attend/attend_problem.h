// Attention problems for the tests of attend.h: random rows and queries, the result in double
// precision, and the tolerances of the header.
#ifndef PQCACHED_TESTS_KERNELS_ATTEND_ATTEND_PROBLEM_H_
#define PQCACHED_TESTS_KERNELS_ATTEND_ATTEND_PROBLEM_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "kernels/attend/attend.h"
#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Result {
  std::vector<float> output;
  std::vector<float> lse;
};

struct Problem {
  AttendShape shape;
  RowData rows;
  std::vector<float> queries;
  float scale = 1.0f;
  float softcap = 0.0f;

  uint32_t HeadCount() const { return shape.group_size * shape.query_length; }
};

inline Problem MakeProblem(DType dtype, uint32_t key_dim, uint32_t value_dim, uint32_t group_size,
                           uint32_t query_length, uint32_t token_count, uint32_t seed,
                           uint32_t span_count = 1, size_t padding_bytes = 0, size_t offset = 0) {
  Problem problem;
  problem.rows =
      MakeRows(dtype, key_dim + value_dim, token_count, span_count, seed, padding_bytes, offset);
  problem.shape = {.dtype = dtype,
                   .key_dim = key_dim,
                   .value_dim = value_dim,
                   .row_stride_bytes = problem.rows.stride_bytes,
                   .group_size = group_size,
                   .query_length = query_length};
  problem.queries = RandomFloats(size_t{problem.HeadCount()} * key_dim, seed + 1, 2.0f);
  problem.scale = 1.0f / std::sqrt(static_cast<float>(key_dim));
  return problem;
}

// The definition, in double, of the tokens given.
inline Result Expected(const Problem& problem, const std::vector<uint32_t>& tokens) {
  const AttendShape& shape = problem.shape;
  Result result;
  for (uint32_t head = 0; head < problem.HeadCount(); ++head) {
    std::vector<double> logits;
    double largest = -std::numeric_limits<double>::infinity();
    for (const uint32_t token : tokens) {
      const double* row = problem.rows.Values(token);
      double logit = 0.0;
      for (uint32_t i = 0; i < shape.key_dim; ++i) {
        logit += static_cast<double>(problem.queries[head * shape.key_dim + i]) * row[i];
      }
      logit *= static_cast<double>(problem.scale);
      const double cap = static_cast<double>(problem.softcap);
      if (cap > 0.0) logit = cap * std::tanh(logit / cap);
      logits.push_back(logit);
      largest = std::max(largest, logit);
    }
    double sum = 0.0;
    std::vector<double> output(shape.value_dim, 0.0);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const double weight = std::exp(logits[i] - largest);
      sum += weight;
      const double* value = problem.rows.Values(tokens[i]) + shape.key_dim;
      for (uint32_t j = 0; j < shape.value_dim; ++j) output[j] += weight * value[j];
    }
    for (const double value : output) {
      result.output.push_back(tokens.empty() ? 0.0f : static_cast<float>(value / sum));
    }
    result.lse.push_back(tokens.empty() ? -kInfinity : static_cast<float>(largest + std::log(sum)));
  }
  return result;
}

inline Result Run(Level level, const Problem& problem, const std::vector<uint32_t>* tokens) {
  Result result;
  result.output.assign(size_t{problem.HeadCount()} * problem.shape.value_dim, 99.0f);
  result.lse.assign(problem.HeadCount(), 99.0f);
  std::vector<std::byte> scratch(AttendScratchBytes(problem.shape) + 1);
  std::vector<uint32_t> positions;
  if (tokens != nullptr) {
    for (const uint32_t token : *tokens) positions.push_back(problem.rows.positions[token]);
  }
  const AttendArgs args{.shape = problem.shape,
                        .scale = problem.scale,
                        .softcap = problem.softcap,
                        .queries = problem.queries,
                        .spans = problem.rows.spans,
                        .positions = positions,
                        .output = result.output,
                        .lse = result.lse,
                        .scratch = std::span(scratch).subspan(1)};
  if (tokens != nullptr) {
    AttendRows(Exec{level}, args);
  } else {
    AttendAllRows(Exec{level}, args);
  }
  return result;
}

inline Result RunChosen(Level level, const Problem& problem, const std::vector<uint32_t>& tokens) {
  return Run(level, problem, &tokens);
}

// Attends by logits that are computed here; keys and queries are not passed. `rows_have_keys`
// false: the rows begin with the values.
inline Result RunScored(Level level, const Problem& problem, const std::vector<uint32_t>& tokens,
                        bool rows_have_keys = true) {
  const AttendShape& shape = problem.shape;
  Result result;
  result.output.assign(size_t{problem.HeadCount()} * shape.value_dim, 99.0f);
  result.lse.assign(problem.HeadCount(), 99.0f);
  std::vector<float> logits;
  for (uint32_t head = 0; head < problem.HeadCount(); ++head) {
    for (const uint32_t token : tokens) {
      double logit = 0.0;
      for (uint32_t i = 0; i < shape.key_dim; ++i) {
        logit += static_cast<double>(problem.queries[head * shape.key_dim + i]) *
                 problem.rows.Values(token)[i];
      }
      logit *= static_cast<double>(problem.scale);
      const double cap = static_cast<double>(problem.softcap);
      logits.push_back(static_cast<float>(cap > 0.0 ? cap * std::tanh(logit / cap) : logit));
    }
  }
  RowData rows = problem.rows;
  const size_t key_bytes = shape.key_dim * DTypeBytes(shape.dtype);
  for (size_t at = rows.offset; at + key_bytes <= rows.bytes.size(); at += rows.stride_bytes) {
    std::fill_n(rows.bytes.begin() + static_cast<ptrdiff_t>(at), key_bytes, std::byte{0xff});
  }
  std::vector<RowSpan> spans = rows.spans;
  for (RowSpan& span : spans) {
    span.rows = rows.bytes.data() + (span.rows - problem.rows.bytes.data());
    if (!rows_have_keys && span.rows != nullptr) span.rows += key_bytes;
  }
  AttendShape row_shape = shape;
  if (!rows_have_keys) row_shape.key_dim = 0;
  std::vector<uint32_t> positions;
  for (const uint32_t token : tokens) positions.push_back(rows.positions[token]);
  std::vector<std::byte> scratch(AttendScratchBytes(shape) + 1);
  AttendScored(Exec{level}, {.shape = row_shape,
                             .scale = 1000.0f,
                             .softcap = 1e-3f,
                             .spans = spans,
                             .positions = positions,
                             .output = result.output,
                             .lse = result.lse,
                             .scratch = std::span(scratch).subspan(1),
                             .logits = logits});
  return result;
}

inline Result RunAll(Level level, const Problem& problem) { return Run(level, problem, nullptr); }

inline bool UsesBf16Products(Level level, DType dtype) {
  return level == Level::kAvx512Bf16 && dtype == DType::kBf16;
}

// Holds what the header promises.
inline void ExpectClose(Level level, const Problem& problem, const Result& actual,
                        const Result& expected) {
  const bool bf16 = UsesBf16Products(level, problem.shape.dtype);
  double largest_value = 0.0;
  for (const double value : problem.rows.values) {
    largest_value = std::max(largest_value, std::abs(value));
  }
  const double worst_allowed = (bf16 ? 5e-3 : 2e-5) * largest_value;
  double error_sum = 0.0;
  double worst = 0.0;
  for (size_t i = 0; i < expected.output.size(); ++i) {
    const double error =
        std::abs(static_cast<double>(actual.output[i]) - static_cast<double>(expected.output[i]));
    ASSERT_FALSE(std::isnan(actual.output[i])) << "output " << i;
    worst = std::max(worst, error);
    error_sum += error;
  }
  EXPECT_LE(worst, worst_allowed);
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

}  // namespace pqcached::kernels

#endif  // PQCACHED_TESTS_KERNELS_ATTEND_ATTEND_PROBLEM_H_
