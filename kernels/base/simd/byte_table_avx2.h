// Bytes of codes, 64 at a time, and look-ups in tables of 2^b bytes by 2^(b - 4) byte shuffles of
// 32 codes. Shuffles give zero where bit 7 of an index is set, which joins the two halves of a
// table; the other bits choose by blends. Two registers of codes share the loads of the tables.
// byte_table_neon.h has the same functions, so that *_simd.h is written once over both.
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

using Bytes = __m256i;
constexpr uint32_t kByteLanes = 32;
constexpr uint32_t kByteParts = 64 / kByteLanes;

struct Bytes64 {
  Bytes part[kByteParts];
};

inline Bytes LoadBytes(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

inline void StoreBytes(uint8_t* to, Bytes bytes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
}

inline Bytes64 LoadBytes64(const uint8_t* from) {
  return {{LoadBytes(from), LoadBytes(from + 32)}};
}

inline Bytes SetBytes(uint32_t byte) { return _mm256_set1_epi8(static_cast<char>(byte)); }

inline Bytes AndBytes(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }

// Returns the sums, at most 255.
inline Bytes AddSaturating(Bytes a, Bytes b) { return _mm256_adds_epu8(a, b); }

// Returns the bits from kShift on of every byte.
template <uint32_t kShift>
inline Bytes HighBits(Bytes x) {
  return AndBytes(_mm256_srli_epi16(x, kShift), SetBytes(0xFFu >> kShift));
}

// Returns all bits of the bytes that are equal.
inline Bytes EqualBytes(Bytes a, Bytes b) { return _mm256_cmpeq_epi8(a, b); }

// Returns all bits of the bytes that are larger in `a`. REQUIRES: below 128.
inline Bytes LargerBytes(Bytes a, Bytes b) { return _mm256_cmpgt_epi8(a, b); }

// Returns all bits of the bytes in which `bytes` has bit code % 8 set.
inline Bytes HasBit(Bytes bytes, Bytes code) {
  const __m256i bits = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
  const __m256i bit = _mm256_shuffle_epi8(bits, AndBytes(code, SetBytes(7)));
  return _mm256_cmpeq_epi8(AndBytes(bytes, bit), bit);
}

// Returns the bytes of `high` where bit kBit of the code is set, and those of `low` elsewhere.
template <uint32_t kBit>
PQC_FORCE_INLINE Bytes ChooseByBit(Bytes code, Bytes low, Bytes high) {
  return _mm256_blendv_epi8(low, high, _mm256_slli_epi16(code, 7 - static_cast<int>(kBit)));
}

// Returns one bit of each byte. REQUIRES: all bits of a byte are equal.
inline uint64_t JoinBits(const Bytes64& x) {
  return static_cast<uint32_t>(_mm256_movemask_epi8(x.part[0])) |
         uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(x.part[1]))} << 32u;
}

// Returns the bytes that are at most `bound` as bits, of 32 bytes.
inline uint32_t AtMostBits(const uint8_t* from, Bytes bound) {
  const __m256i bytes = LoadBytes(from);
  return static_cast<uint32_t>(
      _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(bytes, bound), bytes)));
}

// Returns the index of the lowest bit, or 64 if there is none.
inline uint32_t LowestBit64(uint64_t mask) { return static_cast<uint32_t>(_tzcnt_u64(mask)); }

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

// Finds bytes among the 2^kLevel tables of 16 from `table` on and as many from `table` + `half`
// on; each level chooses by one bit of the codes.
template <uint32_t kLevel>
PQC_FORCE_INLINE Bytes64 FindIn(const uint8_t* table, uint32_t half, const CodePair& codes) {
  Bytes64 found;
  if constexpr (kLevel == 0) {
    const __m256i low = LoadTable(table);
    const __m256i high = LoadTable(table + half);
    for (uint32_t i = 0; i < 2; ++i) {
      found.part[i] = _mm256_or_si256(_mm256_shuffle_epi8(low, codes.first[i]),
                                      _mm256_shuffle_epi8(high, codes.second[i]));
    }
  } else {
    const Bytes64 low = FindIn<kLevel - 1>(table, half, codes);
    const Bytes64 high = FindIn<kLevel - 1>(table + (8u << kLevel), half, codes);
    for (uint32_t i = 0; i < 2; ++i) {
      found.part[i] = ChooseByBit<kLevel + 3>(codes.code[i], low.part[i], high.part[i]);
    }
  }
  return found;
}

// Returns the bytes of codes below 2^kBits in a table of as many bytes.
template <uint32_t kBits>
PQC_FORCE_INLINE Bytes64 FindBytes(const uint8_t* table, const Bytes64& code) {
  if constexpr (kBits == 4) {
    const __m256i bytes = LoadTable(table);
    return {{_mm256_shuffle_epi8(bytes, code.part[0]), _mm256_shuffle_epi8(bytes, code.part[1])}};
  } else {
    const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
    CodePair codes;
    for (uint32_t i = 0; i < 2; ++i) {
      codes.code[i] = code.part[i];
      codes.first[i] = code.part[i];
      if constexpr (kBits < 8) {
        const __m256i moved = _mm256_slli_epi16(code.part[i], 8 - static_cast<int>(kBits));
        codes.first[i] = _mm256_or_si256(code.part[i], _mm256_and_si256(moved, top));
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
