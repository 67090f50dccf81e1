// Compression of eight 32-bit lanes, which AVX2 has no instruction for: a table maps each mask to
// the indices of its bits. Include only in files compiled for AVX2; the anonymous namespace keeps
// every copy local to its file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_COMPRESS_AVX2_H_
#define PQCACHED_KERNELS_BASE_SIMD_COMPRESS_AVX2_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {
namespace {

struct BitIndexTable {
  alignas(64) uint8_t rows[256][8];  // the indices of the row's bits, ascending; then zeros
};

constexpr BitIndexTable MakeBitIndexTable() {
  BitIndexTable table = {};
  for (uint32_t mask = 0; mask < 256; ++mask) {
    uint32_t count = 0;
    for (uint32_t bit = 0; bit < 8; ++bit) {
      if ((mask >> bit & 1u) != 0) table.rows[mask][count++] = static_cast<uint8_t>(bit);
    }
  }
  return table;
}

constexpr BitIndexTable kBitIndexes = MakeBitIndexTable();

// Returns the indices of the bits of `mask` (below 256) as eight bytes.
inline __m128i BitIndexBytes(uint32_t mask) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kBitIndexes.rows[mask]));
}

// Returns the indices of the bits of `mask` (below 256), one a lane.
inline __m256i BitIndexes(uint32_t mask) { return _mm256_cvtepu8_epi32(BitIndexBytes(mask)); }

inline __m256 CompressFloats(__m256 x, uint32_t mask) {
  return _mm256_permutevar8x32_ps(x, BitIndexes(mask));
}

// Returns a mask of the lanes whose index is below `count`.
inline __m256i FirstLanes(size_t count) {
  alignas(32) static constexpr int32_t kLanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                                     0,  0,  0,  0,  0,  0,  0,  0};
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kLanes + 8 - (count < 8 ? count : 8)));
}

// The same as bits.
inline uint32_t FirstBits(size_t count) { return count < 8 ? (1u << count) - 1u : 0xFFu; }

// Loads min(count, 8) numbers; the other lanes are zeros and are not read.
inline __m256 LoadFirst(const float* from, size_t count) {
  return count >= 8 ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, FirstLanes(count));
}

inline void StoreFirst(float* to, size_t count, __m256 x) {
  if (count >= 8) {
    _mm256_storeu_ps(to, x);
  } else {
    _mm256_maskstore_ps(to, FirstLanes(count), x);
  }
}

// Stores up to eight words; only the first `room` may be overwritten.
inline void StoreWords(uint32_t* to, size_t room, __m256i x) {
  if (room >= 8) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
  } else {
    _mm256_maskstore_epi32(reinterpret_cast<int*>(to), FirstLanes(room), x);
  }
}

inline uint32_t BitCount(uint32_t mask) { return static_cast<uint32_t>(__builtin_popcount(mask)); }

inline uint32_t MaskBits(__m256 mask) { return static_cast<uint32_t>(_mm256_movemask_ps(mask)); }

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_COMPRESS_AVX2_H_
