// A query of one layer and the place of its attention, as callers have them: tensors of any dtype
// and strides.
//
// Thread-safe as far as outputs are not shared.
#ifndef PQCACHED_KVSTORE_READ_ATTENTION_H_
#define PQCACHED_KVSTORE_READ_ATTENTION_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kvstore/read/layer_view.h"

namespace pqcached::kvstore {

// Borrowed queries [query_length, query_heads, key_dim] of one layer. REQUIRES: the shape fits the
// layer, and all elements may be read.
struct LayerQuery {
  uint32_t layer = 0;
  uint64_t query_position = 0;  // of the first query token
  uint32_t query_length = 1;
  const std::byte* data = nullptr;
  kernels::DType dtype = kernels::DType::kF32;
  ptrdiff_t strides_bytes[3] = {};
  // Of an attention over positions that its caller has scored: the elements are scaled and
  // softcapped logits of the positions, [query_length, query_heads, positions of the kv head], in
  // place of queries. -infinity leaves a position out for one query head.
  bool has_logits = false;

  // Returns query tokens [begin, end).
  LayerQuery Slice(uint32_t begin, uint32_t end) const;

  // Copies the first `count` elements of one token and head as floats.
  void Copy(uint32_t token, uint32_t head, uint32_t count, float* to) const;
  // Copies the first `count` elements of all tokens and of one kv head's group of query heads, to
  // [query_length, group_size, count]. Returns the end.
  float* CopyGroup(uint32_t kv_head, uint32_t group_size, uint32_t count, float* to) const;
};

// Logarithm of log-sum-exps.
enum class LogBase : uint8_t { kNatural = 0, kTwo = 1 };

// Memory of a partial attention, of any dtypes and strides. REQUIRES: all elements may be written,
// and no two are the same.
struct AttentionOut {
  // Returns the place of contiguous floats with natural logarithms.
  static AttentionOut Packed(float* output, float* lse, uint32_t query_heads, uint32_t value_dim);

  // Returns the same memory without the first `tokens` query tokens.
  AttentionOut From(uint64_t tokens) const;

  // Stores a float output of `value_dim` elements, and an lse with natural logarithm.
  void Store(uint64_t token, uint32_t head, const float* values, uint32_t value_dim,
             float lse_value) const;

  std::byte* output = nullptr;  // [query_length, query_heads, value_dim]
  kernels::DType output_dtype = kernels::DType::kF32;
  ptrdiff_t output_strides_bytes[3] = {};
  std::byte* lse = nullptr;  // [query_length, query_heads]
  kernels::DType lse_dtype = kernels::DType::kF32;
  ptrdiff_t lse_strides_bytes[2] = {};
  LogBase lse_base = LogBase::kNatural;
};

// Returns an lse in another base, from one with natural logarithm; and the reverse.
inline float InBase(LogBase base, float lse) {
  return base == LogBase::kTwo ? lse * 1.44269504f : lse;
}
inline float FromBase(LogBase base, float lse) {
  return base == LogBase::kTwo ? lse * 0.693147181f : lse;
}

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_ATTENTION_H_
