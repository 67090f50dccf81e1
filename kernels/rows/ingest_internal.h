// Declarations shared by ingest.cc and its instruction-set files, and private to them.
#ifndef PQCACHED_KERNELS_ROWS_INGEST_INTERNAL_H_
#define PQCACHED_KERNELS_ROWS_INGEST_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace pqcached::kernels::internal {

// Rows are built in a staging buffer, where their checksum is computed before they are streamed to
// memory. The buffer has a few KiB when the source is read in order. It is larger when the source
// is scattered (the heads of a token are adjacent), because the source is then read in columns of
// two lines, like rows in gather_simd.h. Speed as a share of a plain non-temporal copy, fp16, 8
// heads of 128, EPYC Zen 4, 2026-11-20: in order 0.8; scattered, token by token 0.26, in columns
// 0.40.
inline constexpr size_t kStagingBytes = 4096;
inline constexpr size_t kScatteredStagingBytes = 16384;
// Size of the int8 rows made from staged rows: with their scales they are never larger, from 8 dims
// on.
inline constexpr size_t kInt8StagingBytes = kScatteredStagingBytes;
inline constexpr uint32_t kScatteredColumnBytes = 128;
inline constexpr uint32_t kPrefetchTokens = 24;
inline constexpr uint32_t kScatteredPrefetchTokens = 32;

// Keys or values of some tokens that are copied into staging.
struct StageCall {
  DType from;
  DType to;
  uint32_t dim;
  uint32_t token_count;
  uint32_t tokens_after;  // number of tokens after these in the tensor, which may be prefetched
  const std::byte* source;
  ptrdiff_t token_stride_bytes;
  uint32_t prefetch_tokens;  // prefetch distance in tokens
  uint32_t column_elements;  // a multiple of 8: elements per token and column
  std::byte* staging;        // first token's part
  size_t staging_stride_bytes;
};

// Keys or values of all heads of a layer.
struct HeadsPart {
  DType from;
  uint32_t dim = 0;  // 0: there is no such part
  const std::byte* source;
  ptrdiff_t token_stride_bytes;
  ptrdiff_t head_stride_bytes;
  size_t begin_bytes;  // offset in a row
};

struct HeadsCall {
  HeadsPart key;
  HeadsPart value;
  DType to;
  uint32_t token_begin;
  uint32_t token_end;
  std::byte* const* rows;  // rows of each head
  uint32_t head_count;
  size_t row_stride_bytes;
};

// Convert and copy token by token, over all heads, with non-temporal stores where parts of rows are
// whole lines, and without a fence. Return the first token with an element that is not finite in
// the rows' dtype (its row is unspecified), or token_end.
uint32_t CopyHeadsAvx2(const HeadsCall& call);
uint32_t CopyHeadsAvx512(const HeadsCall& call);

// Convert and copy into staging. Return false when an element is not finite in the row's dtype
// (then staging is unspecified).
bool StagePartAvx2(const StageCall& call);
bool StagePartAvx512(const StageCall& call);

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_ROWS_INGEST_INTERNAL_H_
