#include "kernels/rows/int8_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/rows/int8_row_internal.h"

namespace pqcached::kernels {
namespace {

// The specification.
void DequantizeReference(const internal::Int8Call& call) {
  for (uint32_t row = 0; row < call.row_count; ++row) {
    const std::byte* part = call.part + row * call.row_stride_bytes;
    float scale = 0.0f;
    std::memcpy(&scale, part + call.scale_offset, sizeof(scale));
    for (uint32_t i = 0; i < call.dim; ++i) {
      const float element = static_cast<float>(static_cast<int8_t>(part[i]));
      StoreElement(call.dtype, call.other + row * call.other_stride_bytes, i, element * scale);
    }
  }
}

void Dequantize(Level level, const internal::Int8Call& call) {
#ifdef PQCACHED_X86
  if (level >= Level::kAvx512) return internal::DequantizeAvx512(call);
  if (level == Level::kAvx2) return internal::DequantizeAvx2(call);
#else
  static_cast<void>(level);
#endif
  DequantizeReference(call);
}

}  // namespace

float QuantizeInt8(std::span<const float> from, std::span<int8_t> to) {
  float most = 0.0f;
  for (const float value : from) most = std::max(most, std::abs(value));
  const bool zero = most < internal::kInt8MinMagnitude;
  const float factor = zero ? 0.0f : internal::kInt8Max / most;
  for (size_t i = 0; i < from.size(); ++i) {
    to[i] = static_cast<int8_t>(std::nearbyint(from[i] * factor));
  }
  return zero ? 0.0f : most / internal::kInt8Max;
}

void DequantizeRows(const Exec& exec, const DequantizeArgs& args) {
  const size_t element_bytes = DTypeBytes(args.target_dtype);
  const size_t target_bytes = (args.key_dim + args.value_dim) * element_bytes;
  const size_t row_bytes = Int8RowBytes(args.key_dim, args.value_dim);
  PQC_CHECK(args.key_dim % 8 == 0 && args.key_dim > 0 && args.value_dim % 8 == 0);
  PQC_CHECK(args.row_stride_bytes >= row_bytes && args.target_stride_bytes >= target_bytes);
  if (args.row_count == 0) return;
  PQC_CHECK(args.rows.size() >= (args.row_count - 1) * args.row_stride_bytes + row_bytes);
  PQC_CHECK(args.target.size() >= (args.row_count - 1) * args.target_stride_bytes + target_bytes);
  internal::Int8Call call{.dtype = args.target_dtype,
                          .dim = args.key_dim,
                          .row_count = args.row_count,
                          .part = const_cast<std::byte*>(args.rows.data()),  // not written
                          .scale_offset = size_t{args.key_dim} + args.value_dim,
                          .row_stride_bytes = args.row_stride_bytes,
                          .other = args.target.data(),
                          .other_stride_bytes = args.target_stride_bytes};
  Dequantize(exec.level, call);
  if (args.value_dim == 0) return;
  call.dim = args.value_dim;
  call.part += args.key_dim;
  call.scale_offset = args.value_dim + sizeof(float);
  call.other += args.key_dim * element_bytes;
  Dequantize(exec.level, call);
}

}  // namespace pqcached::kernels
