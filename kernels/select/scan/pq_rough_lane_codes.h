// Codes and products that the lists of groups of heads share on every instruction set
// (pq_rough_lanes_*.cc). Everything is local to the including file.
#ifndef PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LANE_CODES_H_
#define PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LANE_CODES_H_

#include <cstdint>

#include "kernels/select/scan/pq_rough.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kBlockSlots = 1024;
constexpr uint32_t kTokensPerTile = 8;  // tokens whose products are in registers at the same time
constexpr uint32_t kMaxSubspaces = 16;

// Returns `count` codes, at most kTokensPerTile, and zeros behind them.
inline uint64_t LoadCodes(const uint8_t* plane, uint32_t count) {
  uint64_t word = 0;
  if (count == kTokensPerTile) {
    __builtin_memcpy(&word, plane, kTokensPerTile);
  } else {
    __builtin_memcpy(&word, plane, count);
  }
  return word;
}

// Joins the numbers of two sub-spaces.
template <LaneRule kRule, typename Vector>
inline Vector Combine(Vector a, Vector b) {
  return kRule == LaneRule::kMaxOfSums ? a + b : a * b;
}

// Expands nibbles to one byte per code.
inline void SplitNibbles(const RoughSlots& slots, uint32_t begin, uint32_t count,
                         uint8_t (*bytes)[kBlockSlots]) {
  for (uint32_t subspace = 0; subspace < slots.subspace_count; subspace += 2) {
    const uint8_t* plane = slots.planes + subspace / 2 * slots.plane_stride + begin;
    for (uint32_t i = 0; i < count; ++i) {
      bytes[subspace][i] = plane[i] & 15u;
      bytes[subspace + 1][i] = static_cast<uint8_t>(plane[i] >> 4u);
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LANE_CODES_H_
