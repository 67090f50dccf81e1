#include "tests/client/layer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

namespace pqcached::testing {

Layer::Layer(uint64_t tokens, uint32_t seed)
    : tokens_(tokens),
      keys_(tokens * kKvHeads * kKeyDim),
      values_(tokens * kKvHeads * kValueDim),
      queries_(kQueryHeads * kKeyDim) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1);
  for (float& number : keys_) number = normal(random);
  for (float& number : values_) number = normal(random);
  for (float& number : queries_) number = 2 * normal(random);
}

const float* Layer::key(uint64_t token, uint32_t kv_head) const {
  return &keys_[(token * kKvHeads + kv_head) * kKeyDim];
}
const float* Layer::value(uint64_t token, uint32_t kv_head) const {
  return &values_[(token * kKvHeads + kv_head) * kValueDim];
}

Tensor Layer::keys(uint64_t begin, uint64_t end) const {
  return {key(begin, 0), PQC_F32, {end - begin, kKvHeads, kKeyDim}};
}
Tensor Layer::values(uint64_t begin, uint64_t end) const {
  return {value(begin, 0), PQC_F32, {end - begin, kKvHeads, kValueDim}};
}

double Layer::Logit(uint64_t token, uint32_t query_head) const {
  const float* k = key(token, query_head / kGroup);
  double sum = 0;
  for (uint32_t d = 0; d < kKeyDim; ++d) sum += double{queries_[query_head * kKeyDim + d]} * k[d];
  return sum / std::sqrt(double{kKeyDim});
}

Attention Layer::Attend(const std::vector<std::vector<uint32_t>>& positions) const {
  Attention attention{.output = std::vector<float>(kQueryHeads * kValueDim),
                      .lse = std::vector<float>(kQueryHeads, -INFINITY)};
  for (uint32_t head = 0; head < kQueryHeads; ++head) {
    const std::vector<uint32_t>& of_head = positions[head / kGroup];
    double sum = 0;
    std::vector<double> output(kValueDim);
    for (const uint32_t token : of_head) {
      const double weight = std::exp(Logit(token, head));
      const float* v = value(token, head / kGroup);
      for (uint32_t d = 0; d < kValueDim; ++d) output[d] += weight * v[d];
      sum += weight;
    }
    if (of_head.empty()) continue;
    attention.lse[head] = static_cast<float>(std::log(sum));
    for (uint32_t d = 0; d < kValueDim; ++d) {
      attention.output[head * kValueDim + d] = static_cast<float>(output[d] / sum);
    }
  }
  return attention;
}

std::vector<std::vector<uint32_t>> Layer::Best(const std::vector<uint32_t>& candidates,
                                               uint32_t count) const {
  std::vector<std::vector<uint32_t>> best(kKvHeads);
  for (uint32_t kv_head = 0; kv_head < kKvHeads; ++kv_head) {
    std::vector<double> scores(tokens_);
    for (uint32_t head = kv_head * kGroup; head < (kv_head + 1) * kGroup; ++head) {
      double sum = 0;
      for (const uint32_t token : candidates) sum += std::exp(Logit(token, head));
      for (const uint32_t token : candidates) scores[token] += std::exp(Logit(token, head)) / sum;
    }
    std::vector<uint32_t> order = candidates;
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
    order.resize(count);
    std::sort(order.begin(), order.end());
    best[kv_head] = order;
  }
  return best;
}

std::vector<uint32_t> Range(uint64_t begin, uint64_t end) {
  std::vector<uint32_t> range(end - begin);
  std::iota(range.begin(), range.end(), static_cast<uint32_t>(begin));
  return range;
}

std::vector<LayerRows> RowsOf(const Layer& layer, uint64_t begin, uint64_t end,
                              uint32_t layer_count) {
  std::vector<LayerRows> rows;
  for (uint32_t number = 0; number < layer_count; ++number) {
    rows.push_back({number, layer.keys(begin, end), layer.values(begin, end)});
  }
  return rows;
}

LayerGroup GroupOf(std::vector<uint32_t> layers, pqc_dtype dtype) {
  return {.layers = std::move(layers),
          .kv_heads = Layer::kKvHeads,
          .query_heads = Layer::kQueryHeads,
          .key_dim = Layer::kKeyDim,
          .value_dim = Layer::kValueDim,
          .dtype = dtype};
}

CacheSpec SpecOf(const std::string& name, std::vector<uint32_t> layers, pqc_dtype dtype) {
  return {.name = name,
          .model_fingerprint = "model of " + name,
          .groups = {GroupOf(std::move(layers), dtype)},
          .capacity_bytes = 32 << 20};
}

}  // namespace pqcached::testing
