// RotateRows, written once for every Vec: tiles of rows by outputs whose sums stay in registers.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_TRAIN_ROTATE_SIMD_H_
#define PQCACHED_KERNELS_TRAIN_ROTATE_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/train/rotate_internal.h"

namespace pqcached::kernels {
namespace {

// Computes the outputs [output, output + kVectors * kLanes) of kRows rows.
template <uint32_t kVectors, uint32_t kRows>
inline void RotateTile(const RotateBlock& block, uint32_t row, uint32_t output,
                       Vec::F (&sums)[kRows][kVectors]) {
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t v = 0; v < kVectors; ++v) sums[r][v] = Vec::Set(0.0f);
  }
  const float* rows = block.rows + size_t{row} * block.dim;
  const float* map = block.map + output;
  for (uint32_t i = 0; i < block.dim; ++i) {
    Vec::F part[kVectors];
    for (uint32_t v = 0; v < kVectors; ++v) part[v] = Vec::Load(map + v * Vec::kLanes);
    for (uint32_t r = 0; r < kRows; ++r) {
      const Vec::F number = Vec::Set(rows[size_t{r} * block.dim + i]);
      for (uint32_t v = 0; v < kVectors; ++v) sums[r][v] = Vec::MulAdd(part[v], number, sums[r][v]);
    }
    map += block.dim;
  }
}

// Writes `width` outputs of kRows rows from `output` on: all kVectors * kLanes of them, or fewer of
// one vector, which may begin earlier to end inside the map.
template <uint32_t kVectors, uint32_t kRows>
inline void RotateTo(const RotateBlock& block, uint32_t row, uint32_t output, uint32_t width) {
  const uint32_t last = block.dim - kVectors * Vec::kLanes;
  const uint32_t begin = output < last ? output : last;
  Vec::F sums[kRows][kVectors];
  RotateTile<kVectors, kRows>(block, row, begin, sums);
  for (uint32_t r = 0; r < kRows; ++r) {
    float* to =
        block.outputs + size_t{row + r} * block.output_count + (output - block.first_output);
    if (width == kVectors * Vec::kLanes) {
      for (uint32_t v = 0; v < kVectors; ++v) Vec::Store(to + v * Vec::kLanes, sums[r][v]);
      continue;
    }
    float lanes[kVectors * Vec::kLanes];
    for (uint32_t v = 0; v < kVectors; ++v) Vec::Store(lanes + v * Vec::kLanes, sums[r][v]);
    for (uint32_t i = 0; i < width; ++i) to[i] = lanes[output - begin + i];
  }
}

template <uint32_t kVectors, uint32_t kRows>
inline void RotateColumns(const RotateBlock& block, uint32_t output, uint32_t width) {
  uint32_t row = 0;
  for (; row + kRows <= block.row_count; row += kRows) {
    RotateTo<kVectors, kRows>(block, row, output, width);
  }
  for (; row < block.row_count; ++row) RotateTo<kVectors, 1>(block, row, output, width);
}

inline void RotateWithVec(const RotateBlock& block) {
  // 24 sums in 32 registers, or 12 in 16.
  constexpr uint32_t kVectors = Vec::kLanes < 16 ? 2 : 4;
  constexpr uint32_t kWide = kVectors * Vec::kLanes;
  const uint32_t end = block.first_output + block.output_count;
  for (uint32_t output = block.first_output; output < end;) {
    const uint32_t left = end - output;
    if (left >= kWide) {
      RotateColumns<kVectors, 6>(block, output, kWide);
      output += kWide;
    } else {
      const uint32_t width = left < Vec::kLanes ? left : Vec::kLanes;
      RotateColumns<1, 6>(block, output, width);
      output += width;
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_TRAIN_ROTATE_SIMD_H_
