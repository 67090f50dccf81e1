// Converts masks of 64 tokens to positions. Include only in files compiled for AVX-512 VBMI2; the
// anonymous namespace keeps every copy local to its file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_EMIT_AVX512VBMI_H_
#define PQCACHED_KERNELS_BASE_SIMD_EMIT_AVX512VBMI_H_

#include <immintrin.h>

#include <cstdint>

#include "kernels/base/simd/take_quota_bmi2.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kEmitGroup = 64;  // tokens per mask

inline __mmask64 ValidLanes(uint32_t begin, uint32_t end) {
  const uint32_t rest = end - begin;
  return rest >= kEmitGroup ? ~0ull : (1ull << rest) - 1;
}

// Appends positions. Entries from `written` up to the capacity may be overwritten.
struct PositionWriter {
  uint32_t* positions;
  uint32_t capacity;
  uint32_t written;

  // Appends first_position + bit for every set bit. REQUIRES: they fit.
  inline void Write(__mmask64 mask, uint32_t first_position) {
    const __m512i iota = _mm512_set_epi8(
        63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48, 47, 46, 45, 44, 43, 42, 41,
        40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18,
        17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const auto count = static_cast<uint32_t>(__builtin_popcountll(mask));
    // Compresses into a register first, because compression to memory is microcoded on Zen 4.
    __m512i bits = _mm512_maskz_compress_epi8(mask, iota);
    const __m512i base = _mm512_set1_epi32(static_cast<int>(first_position));
    uint32_t* out = positions + written;
    if (written + kEmitGroup <= capacity) {
      _mm512_storeu_si512(out, Widen(base, bits));
      for (uint32_t done = 16; done < count; done += 16) {
        bits = _mm512_alignr_epi32(_mm512_setzero_si512(), bits, 4);
        _mm512_storeu_si512(out + done, Widen(base, bits));
      }
    } else {
      for (uint32_t done = 0; done < count; done += 16) {
        const uint32_t rest = count - done;
        const auto lanes = static_cast<__mmask16>(rest >= 16 ? 0xFFFFu : (1u << rest) - 1u);
        _mm512_mask_storeu_epi32(out + done, lanes, Widen(base, bits));
        bits = _mm512_alignr_epi32(_mm512_setzero_si512(), bits, 4);
      }
    }
    written += count;
  }

 private:
  static inline __m512i Widen(__m512i base, __m512i bits) {
    return _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_castsi512_si128(bits)));
  }
};

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_EMIT_AVX512VBMI_H_
