// Conversions of 8 elements at a time. Wider registers are no faster, because memory bandwidth is
// the limit.
#include <immintrin.h>

#include "kernels/base/sample_convert.h"

namespace pqcached::kernels {
namespace {

constexpr size_t kLanes = 8;

// Converts in whole registers; the remaining elements pass through a padded one.
template <typename From, typename To, typename Convert>
void ConvertAll(const From* source, size_t count, To* target, Convert convert) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) convert(source + i, target + i);
  if (i == count) return;
  From padded_source[kLanes] = {};
  To padded_target[kLanes];
  __builtin_memcpy(padded_source, source + i, (count - i) * sizeof(From));
  convert(padded_source, padded_target);
  __builtin_memcpy(target + i, padded_target, (count - i) * sizeof(To));
}

__m128i Load8(const uint16_t* source) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}

}  // namespace

void WidenF16Avx2(const uint16_t* source, size_t count, float* target) {
  ConvertAll(source, count, target, [](const uint16_t* from, float* to) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(Load8(from)));
  });
}

void WidenBf16Avx2(const uint16_t* source, size_t count, float* target) {
  ConvertAll(source, count, target, [](const uint16_t* from, float* to) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(Load8(from)), 16);
    _mm256_storeu_ps(to, _mm256_castsi256_ps(bits));
  });
}

void NarrowBf16Avx2(const float* source, size_t count, uint16_t* target) {
  ConvertAll(source, count, target, [](const float* from, uint16_t* to) {
    const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(from));
    // Rounds to nearest, ties to even: adds half an ulp minus one, plus one if the last kept bit is
    // odd.
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    // Rounding could carry a NaN into infinity or zero, so a NaN keeps its upper half, made quiet.
    const __m256 value = _mm256_castsi256_ps(bits);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    rounded = _mm256_blendv_epi8(rounded, quiet, nan);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
  });
}

}  // namespace pqcached::kernels
