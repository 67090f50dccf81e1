// Ingest copy: strided K and V tensors -> rows `[key | value]`, in one pass.
//
// The pass converts or quantises, looks for NaN and infinity, sums up a CRC32C of what it writes if
// asked to, and stores non-temporally, because rows are written long before they are read.
//
// Stateless; thread-safe as long as targets are not shared.
#ifndef PQCACHED_KERNELS_INGEST_H_
#define PQCACHED_KERNELS_INGEST_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dtype.h"
#include "kernels/exec.h"

namespace pqcached::kernels {

// A [token, dim] slice of a tensor [tokens, heads, dim]: one head of it.
struct StridedTensor {
  const std::byte* data = nullptr;  // element [0, 0] of the head; any alignment
  DType dtype = DType::kF16;
  ptrdiff_t token_stride_bytes = 0;  // may be negative or 0
  ptrdiff_t element_stride_bytes =
      0;  // DTypeBytes(dtype): contiguous, the fast case; may be anything
};

struct IngestArgs {
  uint32_t token_count = 0;
  uint32_t key_dim = 0;    // multiple of 8, at most 256
  uint32_t value_dim = 0;  // likewise; 0: rows hold keys alone and `value` is not read
  StridedTensor key;
  StridedTensor value;
  DType row_dtype = DType::kF16;
  size_t row_stride_bytes = 0;  // >= (key_dim + value_dim) * DTypeBytes(row_dtype)
  std::span<std::byte>
      rows;               // token_count rows (the last one may end with its value); any alignment
  uint32_t crc_seed = 0;  // CRC32C of what precedes: 0, or IngestResult::crc of the call before
  bool with_crc = true;   // false: nothing is summed up
};

enum class IngestPart : uint8_t { kNone = 0, kKey = 1, kValue = 2 };

struct IngestResult {
  IngestPart bad_part = IngestPart::kNone;
  uint32_t bad_token = 0;  // 0-based in this call: first token with an element that is NaN or
                           // infinite *in the row's dtype*
  // CRC32C over the row bytes in order, without padding between rows; 0 when bad, or not asked for.
  uint32_t crc = 0;

  bool ok() const { return bad_part == IngestPart::kNone; }
};

// Writes the rows. Finite source values beyond the range of row_dtype count as infinite: such
// tokens could not be stored truly. Of one token the key is looked at first. On a bad token the
// rows from it on are unspecified.
//
// Source and rows must not overlap. The source may change while it is read (a client can write
// staging memory): what is checked and summed up is what is written. Stores are fenced before
// return.
[[nodiscard]] IngestResult IngestRows(const Exec& exec, const IngestArgs& args);

// The same into int8 rows (kernels/int8_row.h, which states layout and rounding): row_dtype is not
// read, row_stride_bytes is at least Int8RowBytes, and what is finite counts as good. All levels
// write the same bits.
[[nodiscard]] IngestResult IngestInt8Rows(const Exec& exec, const IngestArgs& args);

// Tensors [token, head, dim] of all kv heads of a layer. Dims and dtypes as in IngestArgs.
struct IngestHeadsArgs {
  uint32_t token_count = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  StridedTensor key;  // of head 0
  ptrdiff_t key_head_stride_bytes = 0;
  StridedTensor value;
  ptrdiff_t value_head_stride_bytes = 0;
  DType row_dtype = DType::kF16;
  size_t row_stride_bytes = 0;
  std::span<std::byte* const> rows;  // of each head, token_count rows
};

// As IngestRows of each head, without a checksum; what is bad is the first token that is bad in any head,
// and of that token the lowest head. Where the heads of a token lie closer together than the tokens
// of a head, it reads token by token: source and rows then go by at the speed of a plain
// non-temporal copy, which reading head by head does not reach by far. That speed takes keys and values
// that are whole lines of their rows; others are stored through the caches.
[[nodiscard]] IngestResult IngestHeads(const Exec& exec, const IngestHeadsArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_INGEST_H_
