// Queries of several tokens over a made-up layer, and their causal attention in plain loops.
#ifndef PQCACHED_TESTS_CLIENT_RANGE_CASE_H_
#define PQCACHED_TESTS_CLIENT_RANGE_CASE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tests/client/layer.h"

namespace pqcached::testing {

struct RangeCase {
  RangeCase(uint64_t query_tokens, uint64_t position, uint32_t seed)
      : tokens(query_tokens), query_position(position) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    queries.resize(tokens * Layer::kQueryHeads * Layer::kKeyDim);
    for (float& value : queries) value = normal(generator);
  }

  Query query(uint32_t layer = 0) const {
    return {.layer = layer,
            .query_position = query_position,
            .queries = {queries, {tokens, Layer::kQueryHeads, Layer::kKeyDim}}};
  }

  // Each token attends to the positions of the range up to its own.
  Attention Expected(const Layer& layer, pqc_token_range range) const {
    Attention attention;
    for (uint64_t token = 0; token < tokens; ++token) {
      const uint64_t end = std::min(range.end, query_position + token + 1);
      for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
        AddTokens(layer, token, head, Range(std::min(range.begin, end), end), &attention);
      }
    }
    return attention;
  }

  float Logit(const Layer& layer, uint64_t token, uint32_t head, uint32_t position) const {
    const float* query = &queries[(token * Layer::kQueryHeads + head) * Layer::kKeyDim];
    const float* key = layer.key(position, head / Layer::kGroup);
    double sum = 0;
    for (uint32_t i = 0; i < Layer::kKeyDim; ++i) sum += double{query[i]} * double{key[i]};
    return static_cast<float>(sum / std::sqrt(double{Layer::kKeyDim}));
  }

  // Adds the attention of one query head over the positions that it sees.
  void AddTokens(const Layer& layer, uint64_t token, uint32_t head,
                 const std::vector<uint32_t>& seen, Attention* attention) const {
    const float* query = &queries[(token * Layer::kQueryHeads + head) * Layer::kKeyDim];
    double sum = 0;
    std::vector<double> output(Layer::kValueDim);
    for (const uint32_t position : seen) {
      const float* key = layer.key(position, head / Layer::kGroup);
      const float* value = layer.value(position, head / Layer::kGroup);
      double logit = 0;
      for (uint32_t i = 0; i < Layer::kKeyDim; ++i) logit += double{query[i]} * double{key[i]};
      const double weight = std::exp(logit / std::sqrt(double{Layer::kKeyDim}));
      sum += weight;
      for (uint32_t i = 0; i < Layer::kValueDim; ++i) output[i] += weight * double{value[i]};
    }
    attention->lse.push_back(sum > 0 ? static_cast<float>(std::log(sum))
                                     : -std::numeric_limits<float>::infinity());
    for (const double value : output) {
      attention->output.push_back(sum > 0 ? static_cast<float>(value / sum) : 0.0f);
    }
  }

  uint64_t tokens;
  uint64_t query_position;
  std::vector<float> queries;
};

inline void ExpectAttention(const Attention& actual, const Attention& expected,
                            float tolerance = 1e-4f) {
  ASSERT_EQ(actual.lse.size(), expected.lse.size());
  ASSERT_EQ(actual.output.size(), expected.output.size());
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    if (std::isinf(expected.lse[i])) {
      ASSERT_EQ(actual.lse[i], expected.lse[i]) << "lse " << i;
    } else {
      ASSERT_NEAR(actual.lse[i], expected.lse[i], tolerance) << "lse " << i;
    }
  }
  for (size_t i = 0; i < expected.output.size(); ++i) {
    ASSERT_NEAR(actual.output[i], expected.output[i], tolerance) << "output " << i;
  }
}

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_RANGE_CASE_H_
