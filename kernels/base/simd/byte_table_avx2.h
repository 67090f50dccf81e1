// Look-ups in tables of 2^b bytes by 2^(b - 4) byte shuffles of 32 codes. Shuffles give zero where
// bit 7 of an index is set, which joins the two halves of a table; the other bits choose by blends.
// Two registers of codes share the loads of the tables.
//
// Include only in files compiled for AVX2; the anonymous namespace keeps every copy local to its
// file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_BYTE_TABLE_AVX2_H_
#define PQCACHED_KERNELS_BASE_SIMD_BYTE_TABLE_AVX2_H_

#include <immintrin.h>

#include <cstdint>

namespace pqcached::kernels {
namespace {

#define PQC_FORCE_INLINE [[gnu::always_inline]] inline

inline __m256i LoadBytes(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

inline void StoreBytes(uint8_t* to, __m256i bytes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
}

// Returns 16 bytes in both halves.
PQC_FORCE_INLINE __m256i LoadTable(const uint8_t* table) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}

// Codes of two registers. `first` has the code's uppermost bit as bit 7 too, `second` its inverse.
struct CodePair {
  __m256i code[2];
  __m256i first[2];
  __m256i second[2];
};

struct BytePair {
  __m256i bytes[2];
};

// Finds bytes among the 2^kLevel tables of 16 from `table` on and as many from `table` + `half`
// on; each level chooses by one bit of the codes.
template <uint32_t kLevel>
PQC_FORCE_INLINE BytePair FindIn(const uint8_t* table, uint32_t half, const CodePair& codes) {
  BytePair found;
  if constexpr (kLevel == 0) {
    const __m256i low = LoadTable(table);
    const __m256i high = LoadTable(table + half);
    for (uint32_t i = 0; i < 2; ++i) {
      found.bytes[i] = _mm256_or_si256(_mm256_shuffle_epi8(low, codes.first[i]),
                                       _mm256_shuffle_epi8(high, codes.second[i]));
    }
  } else {
    const BytePair low = FindIn<kLevel - 1>(table, half, codes);
    const BytePair high = FindIn<kLevel - 1>(table + (8u << kLevel), half, codes);
    for (uint32_t i = 0; i < 2; ++i) {
      // Moves bit kLevel + 3 of every code to bit 7.
      const __m256i choice = _mm256_slli_epi16(codes.code[i], 4 - static_cast<int>(kLevel));
      found.bytes[i] = _mm256_blendv_epi8(low.bytes[i], high.bytes[i], choice);
    }
  }
  return found;
}

// Returns the bytes of codes below 2^kBits in a table of as many bytes.
template <uint32_t kBits>
PQC_FORCE_INLINE BytePair FindBytes(const uint8_t* table, const __m256i (&code)[2]) {
  if constexpr (kBits == 4) {
    const __m256i bytes = LoadTable(table);
    return {{_mm256_shuffle_epi8(bytes, code[0]), _mm256_shuffle_epi8(bytes, code[1])}};
  } else {
    const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
    CodePair codes;
    for (uint32_t i = 0; i < 2; ++i) {
      codes.code[i] = code[i];
      codes.first[i] = code[i];
      if constexpr (kBits < 8) {
        const __m256i moved = _mm256_slli_epi16(code[i], 8 - static_cast<int>(kBits));
        codes.first[i] = _mm256_or_si256(code[i], _mm256_and_si256(moved, top));
      }
      codes.second[i] = _mm256_xor_si256(codes.first[i], top);
    }
    return FindIn<kBits - 5>(table, 1u << (kBits - 1), codes);
  }
}

#undef PQC_FORCE_INLINE

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_BYTE_TABLE_AVX2_H_
