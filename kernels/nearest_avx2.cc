// Nearest centroids with 8 centroids to a register and tiles of 6 samples by 16 centroids: 12 of
// the 16 registers accumulate.
#include <immintrin.h>

#include "kernels/nearest.h"

namespace pqcached::kernels {
namespace {

float ReduceMax(__m256 x) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}

float ReduceAdd(__m256 x) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

template <uint32_t kSamples>
void FindTile(const NearestCentroids& centroids, uint32_t first, const float* samples,
              uint8_t* codes, float* scores) {
  __m256 sums[kSamples][2];
  for (uint32_t s = 0; s < kSamples; ++s) {
    sums[s][0] = _mm256_loadu_ps(centroids.bias + first);
    sums[s][1] = _mm256_loadu_ps(centroids.bias + first + 8);
  }
  const float* column = centroids.columns + first;
  for (uint32_t i = 0; i < centroids.dim; ++i) {
    const __m256 low = _mm256_loadu_ps(column);
    const __m256 high = _mm256_loadu_ps(column + 8);
    for (uint32_t s = 0; s < kSamples; ++s) {
      const __m256 sample = _mm256_broadcast_ss(samples + size_t{s} * centroids.dim + i);
      sums[s][0] = _mm256_fmadd_ps(low, sample, sums[s][0]);
      sums[s][1] = _mm256_fmadd_ps(high, sample, sums[s][1]);
    }
    column += centroids.count;
  }
  for (uint32_t s = 0; s < kSamples; ++s) {
    const float score = ReduceMax(_mm256_max_ps(sums[s][0], sums[s][1]));
    const __m256 wanted = _mm256_set1_ps(score);
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(sums[s][0], wanted, _CMP_EQ_OQ));
    const int high = _mm256_movemask_ps(_mm256_cmp_ps(sums[s][1], wanted, _CMP_EQ_OQ));
    const auto equal = static_cast<uint32_t>(low | high << 8);
    // No bit only where scores are NaN, which finite samples cannot give.
    const uint32_t code = equal == 0 ? 0u : static_cast<uint32_t>(__builtin_ctz(equal));
    if (first != 0 && !(score > scores[s])) continue;
    scores[s] = score;
    codes[s] = static_cast<uint8_t>(first + code);
  }
}

void Find(const NearestCentroids& centroids, const float* samples, uint32_t sample_count,
          uint8_t* codes, float* scores) {
  for (uint32_t first = 0; first < centroids.count; first += 16) {
    uint32_t s = 0;
    for (; s + 6 <= sample_count; s += 6) {
      FindTile<6>(centroids, first, samples + size_t{s} * centroids.dim, codes + s, scores + s);
    }
    for (; s < sample_count; ++s) {
      FindTile<1>(centroids, first, samples + size_t{s} * centroids.dim, codes + s, scores + s);
    }
  }
}

uint32_t FindOne(const float* rows, uint32_t count, uint32_t dim, const float* sample) {
  uint32_t nearest = 0;
  float least = 0.0f;
  for (uint32_t c = 0; c < count; ++c) {
    const float* row = rows + size_t{c} * dim;
    __m256 sum = _mm256_setzero_ps();
    uint32_t i = 0;
    for (; i + 8 <= dim; i += 8) {
      const __m256 difference =
          _mm256_sub_ps(_mm256_loadu_ps(sample + i), _mm256_loadu_ps(row + i));
      sum = _mm256_fmadd_ps(difference, difference, sum);
    }
    float distance = ReduceAdd(sum);
    for (; i < dim; ++i) distance += (sample[i] - row[i]) * (sample[i] - row[i]);
    if (c == 0 || distance < least) {
      least = distance;
      nearest = c;
    }
  }
  return nearest;
}

void Add(uint32_t dim, const float* samples, uint32_t sample_count, const uint8_t* codes,
         float* sums, float* norms) {
  for (uint32_t s = 0; s < sample_count; ++s) {
    const float* sample = samples + size_t{s} * dim;
    float* sum = sums + size_t{codes[s]} * dim;
    __m256 lanes = _mm256_setzero_ps();
    uint32_t i = 0;
    for (; i + 8 <= dim; i += 8) {
      const __m256 x = _mm256_loadu_ps(sample + i);
      _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), x));
      lanes = _mm256_fmadd_ps(x, x, lanes);
    }
    float norm = ReduceAdd(lanes);
    for (; i < dim; ++i) {
      sum[i] += sample[i];
      norm += sample[i] * sample[i];
    }
    norms[s] = norm;
  }
}

}  // namespace

const NearestOps kNearestAvx2 = {
    .find = Find, .find_bf16 = nullptr, .find_one = FindOne, .add = Add, .add_bf16 = nullptr};

}  // namespace pqcached::kernels
