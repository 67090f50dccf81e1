// Conversions of `count` elements at any alignment, on raw pointers so that the instruction-set
// file needs no standard headers.
//
// Included by sample_load.cc and the instruction-set file only.
#ifndef PQCACHED_KERNELS_BASE_SAMPLE_CONVERT_H_
#define PQCACHED_KERNELS_BASE_SAMPLE_CONVERT_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {

void WidenF16Avx2(const uint16_t* source, size_t count, float* target);
void WidenBf16Avx2(const uint16_t* source, size_t count, float* target);
void NarrowBf16Avx2(const float* source, size_t count, uint16_t* target);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SAMPLE_CONVERT_H_
