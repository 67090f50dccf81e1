// Quantisation of rows to int8 and back, written once for every Vec.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_ROWS_INT8_ROW_SIMD_H_
#define PQCACHED_KERNELS_ROWS_INT8_ROW_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/rows/int8_row_internal.h"

namespace pqcached::kernels {
namespace {

using internal::Int8Call;

template <DType kFrom>
PQC_INLINE void QuantizePart(const std::byte* from, uint32_t dim, std::byte* to,
                             std::byte* scale_to) {
  using F = Vec::F;
  F magnitudes = Vec::Set(0.0f);
  uint32_t i = 0;
  for (; i + Vec::kLanes <= dim; i += Vec::kLanes) {
    magnitudes = Vec::Max(magnitudes, Vec::Abs(Vec::LoadRow<kFrom>(from, i)));
  }
  if (i < dim) magnitudes = Vec::Max(magnitudes, Vec::Abs(Vec::LoadRowHalf<kFrom>(from, i)));
  const float most = Vec::Largest(magnitudes);
  const bool zero = most < internal::kInt8MinMagnitude;
  const F factor = Vec::Set(zero ? 0.0f : internal::kInt8Max / most);
  for (i = 0; i + Vec::kLanes <= dim; i += Vec::kLanes) {
    Vec::StoreInt8(to + i, Vec::LoadRow<kFrom>(from, i) * factor);
  }
  if (i < dim) Vec::StoreInt8Half(to + i, Vec::LoadRowHalf<kFrom>(from, i) * factor);
  const float scale = zero ? 0.0f : most / internal::kInt8Max;
  __builtin_memcpy(scale_to, &scale, sizeof(scale));
}

template <DType kFrom>
void QuantizeFrom(const Int8Call& call) {
  for (uint32_t row = 0; row < call.row_count; ++row) {
    std::byte* part = call.part + row * call.row_stride_bytes;
    QuantizePart<kFrom>(call.other + row * call.other_stride_bytes, call.dim, part,
                        part + call.scale_offset);
  }
}

inline void Quantize(const Int8Call& call) {
  switch (call.dtype) {
    case DType::kF16:
      return QuantizeFrom<DType::kF16>(call);
    case DType::kBf16:
      return QuantizeFrom<DType::kBf16>(call);
    case DType::kF32:
      return QuantizeFrom<DType::kF32>(call);
  }
}

template <DType kTo>
void DequantizeTo(const Int8Call& call) {
  for (uint32_t row = 0; row < call.row_count; ++row) {
    const std::byte* part = call.part + row * call.row_stride_bytes;
    std::byte* to = call.other + row * call.other_stride_bytes;
    float scale;
    __builtin_memcpy(&scale, part + call.scale_offset, sizeof(scale));
    uint32_t i = 0;
    for (; i + Vec::kLanes <= call.dim; i += Vec::kLanes) {
      Vec::StoreRow<kTo>(to, i, Vec::LoadInt8(part + i) * Vec::Set(scale));
    }
    if (i < call.dim) {
      Vec::StoreRowHalf<kTo>(to, i, Vec::LoadInt8Half(part + i) * Vec::Set(scale));
    }
  }
}

inline void Dequantize(const Int8Call& call) {
  switch (call.dtype) {
    case DType::kF16:
      return DequantizeTo<DType::kF16>(call);
    case DType::kBf16:
      return DequantizeTo<DType::kBf16>(call);
    case DType::kF32:
      return DequantizeTo<DType::kF32>(call);
  }
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ROWS_INT8_ROW_SIMD_H_
