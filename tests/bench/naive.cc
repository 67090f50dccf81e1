#include "tests/bench/naive.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

namespace pqcached::bench {

using kernels::DType;
using kernels::PqGeometry;

namespace {

void ScoreTokens(const PqGeometry& geometry, const uint8_t* planes, size_t plane_stride,
                 uint32_t token_count, const float* tables, float* scores) {
  const uint32_t subspace_count = geometry.subspace_count;
  const uint32_t bits = geometry.bits;
  for (uint32_t t = 0; t < token_count; ++t) {
    float sum = 0.0f;
    for (uint32_t j = 0; j < subspace_count; ++j) {
      sum += tables[(j << bits) + planes[j * plane_stride + t]];
    }
    scores[t] = sum;
  }
}

// Infinities and NaN come out wrong; rows of benches hold none.
template <DType kType>
float Widen(uint16_t bits) {
  if constexpr (kType == DType::kBf16) return std::bit_cast<float>(uint32_t{bits} << 16);
  const float magnitude = std::bit_cast<float>((bits & 0x7fffu) << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | (bits & 0x8000u) << 16);
}

}  // namespace

void NaiveSelect::Emit(std::span<uint32_t> positions) {
  const size_t k = positions.size();
  work_ = scores_;
  const auto kth = work_.begin() + static_cast<ptrdiff_t>(k - 1);
  std::nth_element(work_.begin(), kth, work_.end(), std::greater<>());
  const float threshold = *kth;
  size_t quota = k - static_cast<size_t>(std::count_if(
                         work_.begin(), kth, [&](float score) { return score > threshold; }));
  size_t written = 0;
  for (uint32_t t = 0; t < scores_.size(); ++t) {
    if (scores_[t] < threshold) continue;
    if (scores_[t] == threshold) {
      if (quota == 0) continue;
      --quota;
    }
    positions[written++] = t;
  }
}

void NaiveSelect::Single(const PqGeometry& geometry, const uint8_t* planes, size_t plane_stride,
                         uint32_t token_count, const float* tables, std::span<uint32_t> positions) {
  scores_.resize(token_count);
  ScoreTokens(geometry, planes, plane_stride, token_count, tables, scores_.data());
  Emit(positions);
}

void NaiveSelect::SumSoftmax(const PqGeometry& geometry, const uint8_t* planes, size_t plane_stride,
                             uint32_t token_count, uint32_t group_size, const float* tables,
                             std::span<uint32_t> positions) {
  scores_.assign(token_count, 0.0f);
  head_scores_.resize(token_count);
  for (uint32_t g = 0; g < group_size; ++g) {
    ScoreTokens(geometry, planes, plane_stride, token_count,
                tables + g * kernels::TableFloats(geometry), head_scores_.data());
    const float most = *std::max_element(head_scores_.begin(), head_scores_.end());
    float sum = 0.0f;
    for (float& score : head_scores_) {
      score = std::exp(score - most);
      sum += score;
    }
    for (uint32_t t = 0; t < token_count; ++t) scores_[t] += head_scores_[t] / sum;
  }
  Emit(positions);
}

template <DType kType>
void NaiveAttend::RunTyped(const NaiveRows& rows, uint32_t group_size, const float* queries,
                           float scale, std::span<const uint32_t> positions, float* output) {
  const uint32_t dim = rows.dim;
  const size_t count = positions.size();
  weights_.resize(count * group_size);
  for (size_t i = 0; i < count; ++i) {
    const auto* key =
        reinterpret_cast<const uint16_t*>(rows.rows + size_t{positions[i]} * rows.row_stride);
    for (uint32_t g = 0; g < group_size; ++g) {
      const float* query = queries + size_t{g} * dim;
      float sum = 0.0f;
      for (uint32_t d = 0; d < dim; ++d) sum += query[d] * Widen<kType>(key[d]);
      weights_[g * count + i] = sum * scale;
    }
  }
  for (uint32_t g = 0; g < group_size; ++g) {
    const std::span<float> weights(weights_.data() + g * count, count);
    const float most = *std::max_element(weights.begin(), weights.end());
    float sum = 0.0f;
    for (float& weight : weights) {
      weight = std::exp(weight - most);
      sum += weight;
    }
    for (float& weight : weights) weight /= sum;
  }
  std::fill(output, output + size_t{group_size} * dim, 0.0f);
  for (size_t i = 0; i < count; ++i) {
    const auto* value =
        reinterpret_cast<const uint16_t*>(rows.rows + size_t{positions[i]} * rows.row_stride) + dim;
    for (uint32_t g = 0; g < group_size; ++g) {
      const float weight = weights_[g * count + i];
      float* to = output + size_t{g} * dim;
      for (uint32_t d = 0; d < dim; ++d) to[d] += weight * Widen<kType>(value[d]);
    }
  }
}

void NaiveAttend::Run(const NaiveRows& rows, uint32_t group_size, const float* queries, float scale,
                      std::span<const uint32_t> positions, float* output) {
  if (rows.dtype == DType::kBf16) {
    RunTyped<DType::kBf16>(rows, group_size, queries, scale, positions, output);
  } else {
    RunTyped<DType::kF16>(rows, group_size, queries, scale, positions, output);
  }
}

}  // namespace pqcached::bench
