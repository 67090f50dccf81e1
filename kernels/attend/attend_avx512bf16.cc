// Attention over bf16 rows with vdpbf16ps. Dot products use dot_avx512bf16.h. The weights are
// rounded to bf16 after the softmax and normalised by the sum of the rounded weights, and the
// values of two rows are interleaved, so that one instruction adds both. With d = 128 and four
// heads, a row in L2 takes 73 cycles of a Zen 4, and 89 with FMAs.
#include "kernels/base/simd/dot_avx512bf16.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/attend/attend_simd.h"

namespace pqcached::kernels {
namespace {

// `kParts` of the queries, as in Bf16DotsOf. The scale would make other numbers of bf16 queries, so
// it multiplies their logits.
template <int kParts>
struct Bf16Math {
  using Dots = Bf16DotsOf<kParts>;
  static constexpr bool kScalesLogits = kParts == 1;
  static constexpr uint32_t kElementBytes = 2;

  // Rounds the weights to bf16 in place (in the first half of their bytes) and returns the sum of
  // the rounded weights.
  PQC_INLINE float PackWeights(float* weights, float) {
    const __m512bh ones = AsBf16(_mm512_set1_epi16(0x3f80));
    __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kBlockRows; i += 32) {
      const __m512bh packed =
          _mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights + i + 16), _mm512_loadu_ps(weights + i));
      _mm512_storeu_si512(weights + i / 2, reinterpret_cast<__m512i>(packed));
      sum = _mm512_dpbf16_ps(sum, packed, ones);
    }
    return _mm512_reduce_add_ps(sum);
  }

  // Adds weighted values of dims [dim, dim + 32 * kGroups), the last group limited by `mask`. In
  // scratch, a group of 32 dims is stored in the order that unpacking produces: the low halves of
  // its blocks of eight, then their high halves.
  template <int kHeads, int kGroups, bool kPrefetch>
  PQC_INLINE void AddValues(const Workspace& work, uint32_t head, const AttendCall& call,
                            uint32_t dim, __mmask32 mask, const std::byte* const* rows,
                            uint32_t count, Prefetcher* ahead) {
    float* values = work.values + size_t{head} * work.value_stride + dim;
    const float* weights = work.logits + size_t{head} * kBlockRows;
    const uint32_t columns = Prefetcher::Columns(call.value_dim * 2);
    __m512 sums[kHeads][2 * kGroups];
#pragma GCC unroll 4
    for (int q = 0; q < kHeads; ++q) {
      const __m512 rescale = _mm512_set1_ps(work.heads[head + static_cast<uint32_t>(q)].rescale);
#pragma GCC unroll 16
      for (int v = 0; v < 2 * kGroups; ++v) {
        const float* from = values + static_cast<uint32_t>(q) * work.value_stride + v * 16;
        sums[q][v] = _mm512_mul_ps(_mm512_loadu_ps(from), rescale);
      }
    }
    for (uint32_t t = 0; t < count; t += 2) {
      if constexpr (kPrefetch) ahead->Advance(2 * columns);
      __m512i value[2 * kGroups];
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) {
        const uint32_t index = dim + static_cast<uint32_t>(g) * 32;
        const __mmask32 cut = g == kGroups - 1 ? mask : LowMask(32);
        const __m512i even = LoadBits(rows[t] + call.value_offset_bytes, index, cut);
        const __m512i odd = LoadBits(rows[t + 1] + call.value_offset_bytes, index, cut);
        value[2 * g] = _mm512_unpacklo_epi16(even, odd);
        value[2 * g + 1] = _mm512_unpackhi_epi16(even, odd);
      }
#pragma GCC unroll 4
      for (int q = 0; q < kHeads; ++q) {
        const __m512bh weight = AsBf16(_mm512_castps_si512(
            _mm512_set1_ps(weights[static_cast<uint32_t>(q) * kBlockRows + t / 2])));
#pragma GCC unroll 16
        for (int v = 0; v < 2 * kGroups; ++v) {
          sums[q][v] = _mm512_dpbf16_ps(sums[q][v], weight, AsBf16(value[v]));
        }
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < kHeads; ++q) {
#pragma GCC unroll 16
      for (int v = 0; v < 2 * kGroups; ++v) {
        _mm512_storeu_ps(values + static_cast<uint32_t>(q) * work.value_stride + v * 16,
                         sums[q][v]);
      }
    }
  }

  template <int kHeads, bool kPrefetch>
  static void Values(const Workspace& work, uint32_t head, const AttendCall& call,
                     const std::byte* const* rows, uint32_t count, Prefetcher* ahead) {
    constexpr int kWide = kHeads == 4 ? 2 : 4;
    constexpr uint32_t kStep = kWide * 32;
    uint32_t dim = 0;
    if (kStep <= call.value_dim) {
      AddValues<kHeads, kWide, kPrefetch>(work, head, call, 0, LowMask(32), rows, count, ahead);
      dim = kStep;
    } else if (kPrefetch) {
      ahead->Advance(kBlockRows * Prefetcher::Columns(call.value_dim * kElementBytes));
    }
    for (; dim + kStep <= call.value_dim; dim += kStep) {
      AddValues<kHeads, kWide, false>(work, head, call, dim, LowMask(32), rows, count, nullptr);
    }
    for (; dim < call.value_dim; dim += 32) {
      const uint32_t left = call.value_dim - dim;
      AddValues<kHeads, 1, false>(work, head, call, dim, LowMask(left < 32 ? left : 32), rows,
                                  count, nullptr);
    }
  }

  static void Finish(const float* sums, uint32_t dim, float factor, float* output) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __m512 factors = _mm512_set1_ps(factor);
    for (uint32_t i = 0; i < dim; i += 32) {
      const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(sums + i), factors);
      const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(sums + i + 16), factors);
      const uint32_t left = dim - i;
      const __mmask32 mask = LowMask(left < 32 ? left : 32);
      _mm512_mask_storeu_ps(output + i, static_cast<__mmask16>(mask),
                            _mm512_permutex2var_ps(low, first, high));
      if (left > 16) {
        _mm512_mask_storeu_ps(output + i + 16, static_cast<__mmask16>(mask >> 16),
                              _mm512_permutex2var_ps(low, second, high));
      }
    }
  }
};

}  // namespace

void internal::AttendAvx512Bf16(const AttendCall& call) {
  if (call.logits != nullptr || AreBf16(call.queries, size_t{call.head_count} * call.key_dim)) {
    return AttendWith<Bf16Math<1>>(call);
  }
  AttendWith<Bf16Math<2>>(call);
}

}  // namespace pqcached::kernels
