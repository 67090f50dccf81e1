// What ingest.cc and its instruction-set files share. Private to them.
#ifndef PQCACHED_KERNELS_INGEST_INTERNAL_H_
#define PQCACHED_KERNELS_INGEST_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

namespace pqcached::kernels::internal {

// Rows are built in a staging buffer, where they are summed up before they are streamed to memory:
// a few KiB when the source is read in order, more when it is scattered (the heads of a token lie
// side by side), because it is then read in columns of two lines, like rows in gather_simd.h.
// Shares of a plain non-temporal copy, fp16, 8 heads of 128, EPYC Zen 4, 2026-11-20: in order 0.8;
// scattered, token by token 0.26, in columns 0.40.
inline constexpr size_t kStagingBytes = 4096;
inline constexpr size_t kScatteredStagingBytes = 16384;
// Int8 rows made of staged ones: with their scales they are never larger, from 8 dims on.
inline constexpr size_t kInt8StagingBytes = kScatteredStagingBytes;
inline constexpr uint32_t kScatteredColumnBytes = 128;
inline constexpr uint32_t kPrefetchTokens = 24;
inline constexpr uint32_t kScatteredPrefetchTokens = 32;

// Keys or values of some tokens, on their way into staging.
struct StageCall {
  DType from;
  DType to;
  uint32_t dim;
  uint32_t token_count;
  uint32_t tokens_behind;  // tokens of the tensor that follow these: what may be prefetched
  const std::byte* source;
  ptrdiff_t token_stride_bytes;
  uint32_t prefetch_tokens;  // how far ahead
  uint32_t column_elements;  // a multiple of 8: what is read of each token before the next elements
                             // of any
  std::byte* staging;        // place of the first token's part
  size_t staging_stride_bytes;
};

struct StreamCall {
  const std::byte* staging;
  size_t row_bytes;
  uint32_t row_count;
  std::byte* target;
  size_t target_stride_bytes;
};

// Convert; false when an element is not finite in the row's dtype (then staging is unspecified).
bool StagePartAvx2(const StageCall& call);
bool StagePartAvx512(const StageCall& call);

// Copy staged rows to memory, non-temporally; FenceStreams makes them visible in order with later
// stores.
void StreamRowsAvx2(const StreamCall& call);
void StreamRowsAvx512(const StreamCall& call);
void FenceStreamsAvx2();
void FenceStreamsAvx512();

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_INGEST_INTERNAL_H_
