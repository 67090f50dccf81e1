#include "kvstore/read/attention.h"

namespace pqcached::kvstore {

using kernels::DType;
using kernels::DTypeBytes;

LayerQuery LayerQuery::Slice(uint32_t begin, uint32_t end) const {
  LayerQuery slice = *this;
  slice.query_position += begin;
  slice.query_length = end - begin;
  slice.data += static_cast<ptrdiff_t>(begin) * strides_bytes[0];
  return slice;
}

void LayerQuery::Copy(uint32_t token, uint32_t head, uint32_t count, float* to) const {
  const std::byte* from = data + static_cast<ptrdiff_t>(token) * strides_bytes[0] +
                          static_cast<ptrdiff_t>(head) * strides_bytes[1];
  if (strides_bytes[2] == static_cast<ptrdiff_t>(DTypeBytes(dtype))) {
    kernels::ConvertElements(dtype, from, DType::kF32, reinterpret_cast<std::byte*>(to), count);
    return;
  }
  for (uint32_t i = 0; i < count; ++i) {
    to[i] = kernels::LoadElement(dtype, from + static_cast<ptrdiff_t>(i) * strides_bytes[2], 0);
  }
}

float* LayerQuery::CopyGroup(uint32_t kv_head, uint32_t group_size, uint32_t count,
                             float* to) const {
  for (uint32_t token = 0; token < query_length; ++token) {
    for (uint32_t i = 0; i < group_size; ++i, to += count) {
      Copy(token, kv_head * group_size + i, count, to);
    }
  }
  return to;
}

AttentionOut AttentionOut::Packed(float* output, float* lse, uint32_t query_heads,
                                  uint32_t value_dim) {
  constexpr ptrdiff_t kFloat = sizeof(float);
  return {.output = reinterpret_cast<std::byte*>(output),
          .output_strides_bytes = {kFloat * query_heads * value_dim, kFloat * value_dim, kFloat},
          .lse = reinterpret_cast<std::byte*>(lse),
          .lse_strides_bytes = {kFloat * query_heads, kFloat}};
}

AttentionOut AttentionOut::From(uint64_t tokens) const {
  AttentionOut rest = *this;
  rest.output += static_cast<ptrdiff_t>(tokens) * output_strides_bytes[0];
  rest.lse += static_cast<ptrdiff_t>(tokens) * lse_strides_bytes[0];
  return rest;
}

void AttentionOut::Store(uint64_t token, uint32_t head, const float* values, uint32_t value_dim,
                         float lse_value) const {
  std::byte* to = output + static_cast<ptrdiff_t>(token) * output_strides_bytes[0] +
                  static_cast<ptrdiff_t>(head) * output_strides_bytes[1];
  if (output_strides_bytes[2] == static_cast<ptrdiff_t>(DTypeBytes(output_dtype))) {
    kernels::ConvertElements(DType::kF32, reinterpret_cast<const std::byte*>(values), output_dtype,
                             to, value_dim);
  } else {
    for (uint32_t i = 0; i < value_dim; ++i) {
      kernels::StoreElement(output_dtype, to + static_cast<ptrdiff_t>(i) * output_strides_bytes[2],
                            0, values[i]);
    }
  }
  kernels::StoreElement(lse_dtype,
                        lse + static_cast<ptrdiff_t>(token) * lse_strides_bytes[0] +
                            static_cast<ptrdiff_t>(head) * lse_strides_bytes[1],
                        0, InBase(lse_base, lse_value));
}

}  // namespace pqcached::kvstore
