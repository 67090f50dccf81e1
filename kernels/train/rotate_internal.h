// The variants of RotateRows. Included by rotate.cc and the instruction-set files only.
#ifndef PQCACHED_KERNELS_TRAIN_ROTATE_INTERNAL_H_
#define PQCACHED_KERNELS_TRAIN_ROTATE_INTERNAL_H_

#include <cstdint>

namespace pqcached::kernels {

struct RotateBlock {
  const float* map;   // [dim, dim]
  const float* rows;  // [row_count, dim]
  uint32_t row_count;
  uint32_t dim;  // at least 32
  uint32_t first_output;
  uint32_t output_count;
  float* outputs;  // [row_count, output_count]
};

using RotateFn = void (*)(const RotateBlock& block);

extern const RotateFn kRotatePortable;
extern const RotateFn kRotateAvx2;
extern const RotateFn kRotateAvx512;

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_TRAIN_ROTATE_INTERNAL_H_
