// Selection by the book: decoded keys in, values in double precision, tokens sorted by them.
#ifndef PQCACHED_TESTS_KVSTORE_BRUTE_FORCE_H_
#define PQCACHED_TESTS_KVSTORE_BRUTE_FORCE_H_

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore::testing {

// [tokens, kv_heads, key_dim]: the keys as an index knows them.
struct DecodedKeys {
  uint32_t tokens = 0;
  uint32_t kv_heads = 0;
  uint32_t key_dim = 0;
  std::vector<float> data;

  const float* key(uint32_t token, uint32_t kv_head) const {
    return &data[(size_t{token} * kv_heads + kv_head) * key_dim];
  }
};

inline DecodedKeys ExactKeys(const LayerModel& model) {
  return {model.tokens, model.group.kv_heads, model.group.key_dim, model.keys};
}

// Reads the keys back from the index by scores of unit vectors.
inline DecodedKeys DecodeKeys(Store& store, uint64_t sequence_id, const LayerModel& model,
                              const IndexDescriptor& index) {
  const LayerGroup& group = model.group;
  DecodedKeys decoded{model.tokens, group.kv_heads, group.key_dim, {}};
  decoded.data.resize(size_t{model.tokens} * group.kv_heads * group.key_dim);
  for (uint32_t dim = 0; dim < group.key_dim; ++dim) {
    Floats unit{.shape = {1, group.query_heads, group.key_dim}, .data = {}};
    unit.data.assign(size_t{group.query_heads} * group.key_dim, 0.0f);
    for (uint32_t head = 0; head < group.query_heads; ++head) {
      unit.data[head * group.key_dim + dim] = 1.0f;
    }
    const auto scores = store.Score(
        kTenant, sequence_id,
        {.layer = group.layers.front(), .query_position = model.tokens - 1, .queries = unit.view()},
        index, {0, model.tokens});
    EXPECT_TRUE(scores.ok()) << scores.status();
    if (!scores.ok()) return decoded;
    for (uint32_t kv_head = 0; kv_head < group.kv_heads; ++kv_head) {
      const size_t head = size_t{kv_head} * group.group_size();
      for (uint32_t token = 0; token < model.tokens; ++token) {
        decoded.data[(size_t{token} * group.kv_heads + kv_head) * group.key_dim + dim] =
            scores->logits[head * model.tokens + token] / group.scale();
      }
    }
  }
  return decoded;
}

// The value of each candidate for one kv head under a rule.
inline std::vector<double> RuleValues(const LayerModel& model, const DecodedKeys& keys,
                                      const Floats& query, uint32_t kv_head, GroupRule rule,
                                      const std::vector<uint32_t>& candidates) {
  const LayerGroup& group = model.group;
  const bool by_max = rule == GroupRule::kMaxSoftmax || rule == GroupRule::kMaxLogit;
  const bool softmax = rule == GroupRule::kSumSoftmax || rule == GroupRule::kMaxSoftmax;
  std::vector<double> values(candidates.size(), by_max ? -1e300 : 0.0);
  for (uint32_t g = 0; g < group.group_size(); ++g) {
    const float* q = &query.data[size_t{kv_head * group.group_size() + g} * group.key_dim];
    std::vector<double> logits;
    for (const uint32_t token : candidates) {
      double dot = 0;
      for (uint32_t i = 0; i < group.key_dim; ++i) {
        dot += static_cast<double>(q[i]) * keys.key(token, kv_head)[i];
      }
      double logit = dot * group.scale();
      if (group.softcap > 0) logit = group.softcap * std::tanh(logit / group.softcap);
      logits.push_back(logit);
    }
    if (softmax) {
      const double max = *std::max_element(logits.begin(), logits.end());
      double sum = 0;
      for (const double logit : logits) sum += std::exp(logit - max);
      for (double& logit : logits) logit = std::exp(logit - max) / sum;
    }
    for (size_t i = 0; i < logits.size(); ++i) {
      values[i] = by_max ? std::max(values[i], logits[i]) : values[i] + logits[i];
    }
  }
  return values;
}

// Fails unless `selected` are exactly k candidates, ascending, with the largest values; tokens
// closer to the k-th value than rounding allows to tell may stand in for each other.
inline void ExpectLargest(const std::vector<uint32_t>& candidates,
                          const std::vector<double>& values, std::span<const uint32_t> selected) {
  ASSERT_TRUE(std::is_sorted(selected.begin(), selected.end(), std::less_equal<uint32_t>()));
  std::vector<double> sorted = values;
  std::sort(sorted.begin(), sorted.end(), std::greater<double>());
  const double threshold = sorted[selected.size() - 1];
  const double slack = 1e-4 * std::abs(threshold) + 1e-9;
  size_t next = 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const bool chosen = next < selected.size() && selected[next] == candidates[i];
    if (chosen) ++next;
    if (values[i] > threshold + slack) {
      ASSERT_TRUE(chosen) << "token " << candidates[i];
    }
    if (values[i] < threshold - slack) {
      ASSERT_FALSE(chosen) << "token " << candidates[i];
    }
  }
  ASSERT_EQ(next, selected.size()) << "selected tokens that are no candidates";
}

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_BRUTE_FORCE_H_
