// Ingest copies strided K and V tensors to rows `[key | value]` (KV entries) in one pass.
//
// The pass converts or quantises, checks for NaN and infinity, optionally computes a CRC32C of the
// written bytes, and stores non-temporally, because rows are written long before they are read.
//
// Stateless; thread-safe as long as targets are not shared.
#ifndef PQCACHED_KERNELS_ROWS_INGEST_H_
#define PQCACHED_KERNELS_ROWS_INGEST_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"

namespace pqcached::kernels {

// A [token, dim] slice of a tensor [tokens, heads, dim]: the elements of one head.
struct StridedTensor {
  const std::byte* data = nullptr;  // element [0, 0] of the head; any alignment
  DType dtype = DType::kF16;
  ptrdiff_t token_stride_bytes = 0;  // may be negative or 0
  ptrdiff_t element_stride_bytes =
      0;  // DTypeBytes(dtype): contiguous, the fast case; any value is allowed
};

struct IngestArgs {
  uint32_t token_count = 0;
  uint32_t key_dim = 0;    // multiple of 8, at most 256
  uint32_t value_dim = 0;  // likewise; 0: rows contain only keys and `value` is not read
  StridedTensor key;
  StridedTensor value;
  DType row_dtype = DType::kF16;
  size_t row_stride_bytes = 0;  // >= (key_dim + value_dim) * DTypeBytes(row_dtype)
  std::span<std::byte>
      rows;               // token_count rows (the last one may end with its value); any alignment
  uint32_t crc_seed = 0;  // 0, or IngestResult::crc of the bytes that precede
  bool with_crc = true;   // false: no checksum is computed
};

enum class IngestPart : uint8_t { kNone = 0, kKey = 1, kValue = 2 };

struct IngestResult {
  IngestPart bad_part = IngestPart::kNone;
  uint32_t bad_token = 0;  // 0-based in this call: first token with an element that is NaN or
                           // infinite *in the row's dtype*
  // CRC32C of the row bytes in order, without padding between rows; 0 when a token is bad or no
  // checksum was requested.
  uint32_t crc = 0;

  bool ok() const { return bad_part == IngestPart::kNone; }
};

// Writes the rows. Finite source values beyond the range of row_dtype count as infinite, because
// such tokens could not be stored correctly. Within a token the key is checked first. After a bad
// token, the rows from that token on are unspecified.
//
// Source and rows must not overlap. The source may change while it is read (a client can write
// staging memory): the checks and the checksum apply to the bytes that are written. Stores are
// fenced before return.
[[nodiscard]] IngestResult IngestRows(const Exec& exec, const IngestArgs& args);

// Writes int8 rows (kernels/rows/int8_row.h defines layout and rounding): row_dtype is not read,
// row_stride_bytes is at least Int8RowBytes, and every finite element is accepted. All instruction
// sets write the same bits.
[[nodiscard]] IngestResult IngestInt8Rows(const Exec& exec, const IngestArgs& args);

// Tensors [token, head, dim] of all kv heads of a layer. Dims and dtypes as in IngestArgs.
struct IngestHeadsArgs {
  uint32_t token_count = 0;
  uint32_t key_dim = 0;  // 0: rows are values alone
  uint32_t value_dim = 0;
  StridedTensor key;  // tensor of head 0
  ptrdiff_t key_head_stride_bytes = 0;
  StridedTensor value;
  ptrdiff_t value_head_stride_bytes = 0;
  DType row_dtype = DType::kF16;
  size_t row_stride_bytes = 0;
  std::span<std::byte* const> rows;  // rows of each head, token_count each
};

// Writes the rows of all heads as IngestRows does for each head, without a checksum. The reported
// bad token is the first one that is bad in any head, with the part of the lowest such head.
//
// When the heads of a token are closer together than the tokens of a head, the function reads token
// by token and then reaches the speed of a plain non-temporal copy; reading head by head is far
// slower. That speed requires keys and values that are whole cache lines of their rows; others are
// stored through the caches.
[[nodiscard]] IngestResult IngestHeads(const Exec& exec, const IngestHeadsArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ROWS_INGEST_H_
