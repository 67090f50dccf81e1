// The functions of compress_avx2.h in NEON, which has neither masks as bits nor a compression. A
// table maps each mask to the indices of its bits, and byte look-ups move the lanes.
//
// Include only in files of this instruction set; the anonymous namespace keeps every copy local to
// its file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_COMPRESS_NEON_H_
#define PQCACHED_KERNELS_BASE_SIMD_COMPRESS_NEON_H_

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/base/simd/bit_index_table.h"
#include "kernels/base/simd/simd_neon.h"

namespace pqcached::kernels {
namespace {

#define PQC_FORCE_INLINE [[gnu::always_inline]] inline

using Floats = Vec::F;

struct Words {
  uint32x4_t low;
  uint32x4_t high;
};

using Lanes = Words;  // all bits of a lane, or none

PQC_FORCE_INLINE Words SetWords(uint32_t word) { return {vdupq_n_u32(word), vdupq_n_u32(word)}; }

PQC_FORCE_INLINE Words LoadWords(const uint32_t* from) {
  return {vld1q_u32(from), vld1q_u32(from + 4)};
}

PQC_FORCE_INLINE void StoreWords(uint32_t* to, Words x) {
  vst1q_u32(to, x.low);
  vst1q_u32(to + 4, x.high);
}

PQC_FORCE_INLINE Words AddWords(Words a, Words b) {
  return {vaddq_u32(a.low, b.low), vaddq_u32(a.high, b.high)};
}

PQC_FORCE_INLINE Words SubtractHalves(const uint16_t* a, const uint16_t* b) {
  const uint16x8_t x = vsubq_u16(vld1q_u16(a), vld1q_u16(b));
  return {vmovl_u16(vget_low_u16(x)), vmovl_high_u16(x)};
}

PQC_FORCE_INLINE Floats ToFloats(Words x) { return {vcvtq_f32_u32(x.low), vcvtq_f32_u32(x.high)}; }

PQC_FORCE_INLINE uint32_t SumOfWords(Words x) { return vaddvq_u32(vaddq_u32(x.low, x.high)); }

PQC_FORCE_INLINE Lanes AtLeast(Floats a, Floats b) {
  return {vcgeq_f32(a.low, b.low), vcgeq_f32(a.high, b.high)};
}
PQC_FORCE_INLINE Lanes Above(Floats a, Floats b) {
  return {vcgtq_f32(a.low, b.low), vcgtq_f32(a.high, b.high)};
}
PQC_FORCE_INLINE Lanes Equal(Floats a, Floats b) {
  return {vceqq_f32(a.low, b.low), vceqq_f32(a.high, b.high)};
}

PQC_FORCE_INLINE Lanes AllLanes() { return SetWords(~0u); }

PQC_FORCE_INLINE Lanes Both(Lanes a, Lanes b) {
  return {vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)};
}

PQC_FORCE_INLINE Lanes NotZero(Words x, Lanes mask) {
  return Both({vtstq_u32(x.low, x.low), vtstq_u32(x.high, x.high)}, mask);
}

PQC_FORCE_INLINE Floats Choose(Lanes mask, Floats x, Floats other) {
  return {vbslq_f32(mask.low, x.low, other.low), vbslq_f32(mask.high, x.high, other.high)};
}
PQC_FORCE_INLINE Words Choose(Lanes mask, Words x) { return Both(mask, x); }

PQC_FORCE_INLINE Words CountLanes(Words counts, Lanes mask) {
  return {vsubq_u32(counts.low, mask.low), vsubq_u32(counts.high, mask.high)};
}

PQC_FORCE_INLINE uint32_t MaskBits(Lanes mask) {
  alignas(16) static constexpr uint16_t kBits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  const uint16x8_t halves =
      vuzp1q_u16(vreinterpretq_u16_u32(mask.low), vreinterpretq_u16_u32(mask.high));
  return vaddvq_u16(vandq_u16(halves, vld1q_u16(kBits)));
}

PQC_FORCE_INLINE uint32_t BitCount(uint32_t mask) {
  return static_cast<uint32_t>(__builtin_popcount(mask));
}

PQC_FORCE_INLINE uint32_t LowestBit(uint32_t mask) {
  return mask == 0 ? 32u : static_cast<uint32_t>(__builtin_ctz(mask));
}

PQC_FORCE_INLINE Words BitIndexes(uint32_t mask) {
  const uint16x8_t halves = vmovl_u8(vld1_u8(kBitIndexes.rows[mask]));
  return {vmovl_u16(vget_low_u16(halves)), vmovl_high_u16(halves)};
}

// Indices of bytes that move the lanes of a mask to the front.
struct ByteIndexes {
  uint8x16_t low;
  uint8x16_t high;
};

PQC_FORCE_INLINE ByteIndexes LaneBytes(uint32_t mask) {
  alignas(16) static constexpr uint8_t kLanes[32] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                                     2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5,
                                                     5, 5, 6, 6, 6, 6, 7, 7, 7, 7};
  const uint8x16_t bytes = vreinterpretq_u8_u32(vdupq_n_u32(0x03020100u));
  const uint8x8_t row = vld1_u8(kBitIndexes.rows[mask]);
  const uint8x16_t lanes = vshlq_n_u8(vcombine_u8(row, row), 2);
  return {vorrq_u8(vqtbl1q_u8(lanes, vld1q_u8(kLanes)), bytes),
          vorrq_u8(vqtbl1q_u8(lanes, vld1q_u8(kLanes + 16)), bytes)};
}

PQC_FORCE_INLINE Words CompressWords(Words x, uint32_t mask) {
  const uint8x16x2_t bytes = {{vreinterpretq_u8_u32(x.low), vreinterpretq_u8_u32(x.high)}};
  const ByteIndexes indexes = LaneBytes(mask);
  return {vreinterpretq_u32_u8(vqtbl2q_u8(bytes, indexes.low)),
          vreinterpretq_u32_u8(vqtbl2q_u8(bytes, indexes.high))};
}

PQC_FORCE_INLINE Floats CompressFloats(Floats x, uint32_t mask) {
  const Words words =
      CompressWords({vreinterpretq_u32_f32(x.low), vreinterpretq_u32_f32(x.high)}, mask);
  return {vreinterpretq_f32_u32(words.low), vreinterpretq_f32_u32(words.high)};
}

PQC_FORCE_INLINE void CompressBytes(const uint8_t* from, uint32_t mask, uint8_t* to) {
  vst1_u8(to, vtbl1_u8(vld1_u8(from), vld1_u8(kBitIndexes.rows[mask])));
}

PQC_FORCE_INLINE Lanes FirstLanes(size_t count) {
  alignas(32) static constexpr uint32_t kLanes[16] = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u,
                                                      0,   0,   0,   0,   0,   0,   0,   0};
  return LoadWords(kLanes + 8 - (count < 8 ? count : 8));
}

PQC_FORCE_INLINE uint32_t FirstBits(size_t count) { return count < 8 ? (1u << count) - 1u : 0xFFu; }

PQC_FORCE_INLINE Floats LoadFirst(const float* from, size_t count) {
  if (count >= 8) return Vec::Load(from);
  float rest[8] = {};
  __builtin_memcpy(rest, from, count * sizeof(float));
  return Vec::Load(rest);
}

PQC_FORCE_INLINE void StoreFirst(float* to, size_t count, Floats x) {
  if (count >= 8) return Vec::Store(to, x);
  float rest[8];
  Vec::Store(rest, x);
  __builtin_memcpy(to, rest, count * sizeof(float));
}

PQC_FORCE_INLINE void StoreWords(uint32_t* to, size_t room, Words x) {
  if (room >= 8) return StoreWords(to, x);
  uint32_t rest[8];
  StoreWords(rest, x);
  __builtin_memcpy(to, rest, room * sizeof(uint32_t));
}

#undef PQC_FORCE_INLINE

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_COMPRESS_NEON_H_
