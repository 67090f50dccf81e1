#include "tests/bench/local/drift_keys.h"

#include <cmath>

#include "kernels/base/dtype.h"

namespace pqcached::bench {
namespace {

constexpr double kRopeBase = 500000;
constexpr float kNoise = 0.6f;
constexpr float kQueryNoise = 0.8f;
constexpr float kQueryScale = 1.6f;

}  // namespace

kvstore::TensorView Bf16Rows::view() const {
  return {.data = data.data(),
          .data_bytes = data.size(),
          .dtype = kernels::DType::kBf16,
          .shape = shape,
          .strides = {}};
}

DriftKeys::DriftKeys(const DriftShape& shape, uint64_t seed) : shape_(shape), random_(seed) {
  ChangeTheme();
}

void DriftKeys::ChangeTheme() {
  Theme theme;
  theme.centers.resize(size_t{kTopics} * shape_.kv_heads * shape_.dim);
  for (float& number : theme.centers) number = Normal();
  theme.mean.resize(size_t{shape_.kv_heads} * shape_.dim);
  for (float& number : theme.mean) number = 1.5f * Normal();
  themes_.push_back(std::move(theme));
  topic_left_ = 0;
}

void DriftKeys::Turn(float* vector, uint32_t position) const {
  const uint32_t half = shape_.dim / 2;
  for (uint32_t i = 0; i < half; ++i) {
    const double angle = position * std::pow(kRopeBase, -static_cast<double>(i) / half);
    const auto cosine = static_cast<float>(std::cos(angle));
    const auto sine = static_cast<float>(std::sin(angle));
    const float a = vector[i];
    const float b = vector[i + half];
    vector[i] = a * cosine - b * sine;
    vector[i + half] = a * sine + b * cosine;
  }
}

Bf16Rows DriftKeys::Round(const std::vector<float>& numbers, uint64_t tokens,
                          uint64_t heads) const {
  Bf16Rows rows{.data = std::vector<std::byte>(numbers.size() * 2),
                .shape = {tokens, heads, shape_.dim}};
  for (size_t i = 0; i < numbers.size(); ++i) {
    kernels::StoreElement(kernels::DType::kBf16, rows.data.data(), static_cast<uint32_t>(i),
                          numbers[i]);
  }
  return rows;
}

Bf16Rows DriftKeys::Next(uint32_t tokens) {
  const Theme& theme = themes_.back();
  const size_t token_floats = size_t{shape_.kv_heads} * shape_.dim;
  std::vector<float> numbers(tokens * token_floats);
  for (uint32_t token = 0; token < tokens; ++token, ++position_) {
    if (topic_left_ == 0) {
      topic_ = static_cast<uint32_t>(random_() % kTopics);
      topic_left_ = 16 + static_cast<uint32_t>(random_() % 49);
    }
    --topic_left_;
    for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
      float* key = &numbers[token * token_floats + size_t{head} * shape_.dim];
      const float* center = &theme.centers[(size_t{topic_} * shape_.kv_heads + head) * shape_.dim];
      for (uint32_t i = 0; i < shape_.dim; ++i) {
        key[i] = theme.mean[size_t{head} * shape_.dim + i] + center[i] + kNoise * Normal();
      }
      Turn(key, position_);
    }
  }
  return Round(numbers, tokens, shape_.kv_heads);
}

Bf16Rows DriftKeys::Values(uint32_t tokens) {
  std::vector<float> numbers(size_t{tokens} * shape_.kv_heads * shape_.dim);
  const float first = Normal();
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = first + static_cast<float>(i % 17) / 8;
  return Round(numbers, tokens, shape_.kv_heads);
}

Bf16Rows DriftKeys::Query(uint32_t position, bool newest) {
  const Theme& theme = newest ? themes_.back() : themes_[random_() % themes_.size()];
  const auto topic = static_cast<uint32_t>(random_() % kTopics);
  const uint32_t heads = shape_.kv_heads * shape_.group_size;
  std::vector<float> numbers(size_t{heads} * shape_.dim);
  for (uint32_t head = 0; head < heads; ++head) {
    const uint32_t kv_head = head / shape_.group_size;
    float* query = &numbers[size_t{head} * shape_.dim];
    for (uint32_t i = 0; i < shape_.dim; ++i) {
      const size_t channel = size_t{kv_head} * shape_.dim + i;
      query[i] =
          kQueryScale * (theme.centers[(size_t{topic} * shape_.kv_heads) * shape_.dim + channel] +
                         kQueryNoise * Normal());
    }
    Turn(query, position);
  }
  return Round(numbers, 1, heads);
}

}  // namespace pqcached::bench
