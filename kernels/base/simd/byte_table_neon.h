// The functions of byte_table_avx2.h in NEON, whose look-ups take tables of 64 bytes in four
// registers: 2^b bytes take 2^(b - 6) look-ups of 16 codes. Indices from 64 on give zero, or leave
// what an earlier look-up found.
//
// Include only in files of this instruction set; the anonymous namespace keeps every copy local to
// its file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_BYTE_TABLE_NEON_H_
#define PQCACHED_KERNELS_BASE_SIMD_BYTE_TABLE_NEON_H_

#include <arm_neon.h>

#include <cstdint>

namespace pqcached::kernels {
namespace {

#define PQC_FORCE_INLINE [[gnu::always_inline]] inline

using Bytes = uint8x16_t;
constexpr uint32_t kByteLanes = 16;
constexpr uint32_t kByteParts = 64 / kByteLanes;

struct Bytes64 {
  Bytes part[kByteParts];
};

PQC_FORCE_INLINE Bytes LoadBytes(const uint8_t* from) { return vld1q_u8(from); }

PQC_FORCE_INLINE void StoreBytes(uint8_t* to, Bytes bytes) { vst1q_u8(to, bytes); }

PQC_FORCE_INLINE Bytes64 LoadBytes64(const uint8_t* from) {
  return {{vld1q_u8(from), vld1q_u8(from + 16), vld1q_u8(from + 32), vld1q_u8(from + 48)}};
}

PQC_FORCE_INLINE Bytes SetBytes(uint32_t byte) { return vdupq_n_u8(static_cast<uint8_t>(byte)); }

PQC_FORCE_INLINE Bytes AndBytes(Bytes a, Bytes b) { return vandq_u8(a, b); }

PQC_FORCE_INLINE Bytes AddSaturating(Bytes a, Bytes b) { return vqaddq_u8(a, b); }

template <uint32_t kShift>
PQC_FORCE_INLINE Bytes HighBits(Bytes x) {
  return vshrq_n_u8(x, kShift);
}

PQC_FORCE_INLINE Bytes EqualBytes(Bytes a, Bytes b) { return vceqq_u8(a, b); }

PQC_FORCE_INLINE Bytes LargerBytes(Bytes a, Bytes b) { return vcgtq_u8(a, b); }

PQC_FORCE_INLINE Bytes HasBit(Bytes bytes, Bytes code) {
  const int8x16_t shift = vreinterpretq_s8_u8(vandq_u8(code, vdupq_n_u8(7)));
  return vtstq_u8(bytes, vshlq_u8(vdupq_n_u8(1), shift));
}

template <uint32_t kBit>
PQC_FORCE_INLINE Bytes ChooseByBit(Bytes code, Bytes low, Bytes high) {
  return vbslq_u8(vtstq_u8(code, vdupq_n_u8(1u << kBit)), high, low);
}

// Returns the bit of its index in every group of eight bytes.
PQC_FORCE_INLINE Bytes BitOfIndex() {
  return vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
}

PQC_FORCE_INLINE uint64_t JoinBits(const Bytes64& x) {
  const Bytes bits = BitOfIndex();
  const Bytes low = vpaddq_u8(vandq_u8(x.part[0], bits), vandq_u8(x.part[1], bits));
  const Bytes high = vpaddq_u8(vandq_u8(x.part[2], bits), vandq_u8(x.part[3], bits));
  const Bytes sums = vpaddq_u8(low, high);
  return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sums, sums)), 0);
}

PQC_FORCE_INLINE uint32_t AtMostBits(const uint8_t* from, Bytes bound) {
  const Bytes bits = BitOfIndex();
  const Bytes low = vandq_u8(vcleq_u8(vld1q_u8(from), bound), bits);
  const Bytes high = vandq_u8(vcleq_u8(vld1q_u8(from + 16), bound), bits);
  Bytes sums = vpaddq_u8(low, high);
  sums = vpaddq_u8(sums, sums);
  return vgetq_lane_u32(vreinterpretq_u32_u8(vpaddq_u8(sums, sums)), 0);
}

PQC_FORCE_INLINE uint32_t LowestBit64(uint64_t mask) {
  return mask == 0 ? 64u : static_cast<uint32_t>(__builtin_ctzll(mask));
}

// Returns the bytes of codes below 2^kBits in a table of as many bytes.
template <uint32_t kBits>
PQC_FORCE_INLINE Bytes64 FindBytes(const uint8_t* table, const Bytes64& code) {
  Bytes64 found;
  if constexpr (kBits == 4) {
    const uint8x16_t bytes = vld1q_u8(table);
    for (uint32_t i = 0; i < kByteParts; ++i) found.part[i] = vqtbl1q_u8(bytes, code.part[i]);
  } else if constexpr (kBits == 5) {
    const uint8x16x2_t bytes = vld1q_u8_x2(table);
    for (uint32_t i = 0; i < kByteParts; ++i) found.part[i] = vqtbl2q_u8(bytes, code.part[i]);
  } else {
    const uint8x16x4_t bytes = vld1q_u8_x4(table);
    for (uint32_t i = 0; i < kByteParts; ++i) found.part[i] = vqtbl4q_u8(bytes, code.part[i]);
    for (uint32_t first = 64; first < 1u << kBits; first += 64) {
      const uint8x16x4_t more = vld1q_u8_x4(table + first);
      for (uint32_t i = 0; i < kByteParts; ++i) {
        const uint8x16_t index = vsubq_u8(code.part[i], SetBytes(first));
        found.part[i] = vqtbx4q_u8(found.part[i], more, index);
      }
    }
  }
  return found;
}

#undef PQC_FORCE_INLINE

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_BYTE_TABLE_NEON_H_
