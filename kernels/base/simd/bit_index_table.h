// The indices of the bits of every byte: the order in which a compression takes the lanes of a
// mask, for instruction sets that have no instruction for it.
//
// Include only in instruction-set files; everything is local to the including file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_BIT_INDEX_TABLE_H_
#define PQCACHED_KERNELS_BASE_SIMD_BIT_INDEX_TABLE_H_

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

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_BIT_INDEX_TABLE_H_
