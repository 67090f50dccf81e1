// RowSpan is a run of consecutive tokens whose rows are stored one after the other.
//
// A row is the KV entry of one token, one layer and one kv head: `[key | value]`, adjacent and in
// one dtype. A sequence is a list of spans; kernels that read rows take such a list and absolute
// token positions.
#ifndef PQCACHED_KERNELS_BASE_ROW_SPAN_H_
#define PQCACHED_KERNELS_BASE_ROW_SPAN_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {

// Tokens [first_position, first_position + token_count). A list of spans is ascending and does not
// overlap; it may have gaps. `rows` needs no alignment (cache-line alignment is faster).
struct RowSpan {
  const std::byte* rows =
      nullptr;  // row of token first_position; further rows follow at the kernel's row stride
  uint32_t token_count = 0;
  uint32_t first_position = 0;
};

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_ROW_SPAN_H_
