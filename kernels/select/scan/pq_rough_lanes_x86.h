// Lanes of four and eight floats, for pq_rough_lanes_simd.h on x86.
//
// Include only in the instruction-set files of x86; the anonymous namespace keeps every copy local
// to its file.
#ifndef PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LANES_X86_H_
#define PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LANES_X86_H_

#include <immintrin.h>

#include "kernels/select/scan/pq_rough.h"

namespace pqcached::kernels {
namespace {

struct MachineX86 {
  using Four = __m128;

  struct Lanes4 {
    using Vector = __m128;
    static constexpr uint32_t kCount = 4;
    static Vector Load(const float* at) { return _mm_load_ps(at); }
    static void Store(float* at, Vector x) { _mm_storeu_ps(at, x); }
    static Four Sum(Vector x) { return x; }
    static Four Largest(Vector x) { return x; }
  };

  struct Lanes8 {
    using Vector = __m256;
    static constexpr uint32_t kCount = 8;
    static Vector Load(const float* at) { return _mm256_load_ps(at); }
    static void Store(float* at, Vector x) { _mm256_storeu_ps(at, x); }
    static Vector Larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
    static Four Sum(Vector x) {
      return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    }
    static Four Largest(Vector x) {
      return _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    }
  };

  // A rotation, unlike a shift, needs no copy of the word.
  template <uint32_t kFactor>
  static uint64_t ByteTimes(uint64_t word, uint32_t i) {
    constexpr uint32_t kShift = kFactor == 4   ? 4
                                : kFactor == 8 ? 5
                                               : 6;  // log2 of kFactor floats in bytes
    const uint32_t right = (8 * i + 64 - kShift) % 64;
    return ((word >> right | word << ((64 - right) % 64)) & (255u << kShift)) / 4;
  }

  static void Store(float* at, Four x) { _mm_store_ps(at, x); }

  static Four JoinSums(Four a, Four b, Four c, Four d) {
    const Four first = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    const Four second = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    return _mm_add_ps(_mm_movelh_ps(first, second), _mm_movehl_ps(second, first));
  }
  static Four JoinLargest(Four a, Four b, Four c, Four d) {
    const Four first = _mm_max_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    const Four second = _mm_max_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    return _mm_max_ps(_mm_movelh_ps(first, second), _mm_movehl_ps(second, first));
  }
};

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LANES_X86_H_
