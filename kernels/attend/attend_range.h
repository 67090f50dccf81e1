// Attention of a tile of queries over all rows (KV entries) of one kv head, causal by position.
//
// One call serves up to kMaxRangeHeads query heads that share the kv head: some tokens of a chunk,
// each with the group's heads. Each row is read once per call. The result is a *partial* attention
// (output, log-sum-exp); MergePartials (kernels/attend/merge.h) merges several.
//
// A few heads (decoding) stream the rows as AttendAllRows does. More heads (prefill over stored
// rows) multiply tiles of rows and queries with an online softmax: there the products are the
// limit, not memory.
//
// Stateless; thread-safe as long as outputs and scratch are not shared.
#ifndef PQCACHED_KERNELS_ATTEND_ATTEND_RANGE_H_
#define PQCACHED_KERNELS_ATTEND_ATTEND_RANGE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"
#include "kernels/base/row_span.h"

namespace pqcached::kernels {

// A multiple of the queries that each instruction set computes together, so that full tiles waste
// no lane.
inline constexpr uint32_t kMaxRangeHeads = 240;

// Shape of one call.
struct AttendRangeShape {
  DType dtype = DType::kF16;    // dtype of the rows
  uint32_t key_dim = 0;         // 32..256, multiple of 8
  uint32_t value_dim = 0;       // 32..256, multiple of 8; the value directly follows the key
  size_t row_stride_bytes = 0;  // >= (key_dim + value_dim) * DTypeBytes(dtype)
  uint32_t group_size = 1;      // G: query heads of this kv head
  uint32_t token_count = 1;     // n: query tokens; n * G is 1..kMaxRangeHeads
};

struct AttendRangeArgs {
  AttendRangeShape shape;
  float scale = 1.0f;              // logit = scale * q.k
  float softcap = 0.0f;            // > 0: logit = softcap * tanh(scale * q.k / softcap); 0: off
  uint32_t query_position = 0;     // of query token 0; token i sees rows up to query_position + i
  std::span<const float> queries;  // [n, G, key_dim]
  std::span<const RowSpan> spans;  // ascending positions
  std::span<float> output;         // [n, G, value_dim], overwritten
  std::span<float> lse;            // [n, G], overwritten: natural log of sum exp(logit)
  std::span<std::byte> scratch;    // at least AttendRangeScratchBytes(shape), any alignment
};

// Returns the scratch size in bytes for the shape, enough for every instruction set; below 2 MiB.
size_t AttendRangeScratchBytes(const AttendRangeShape& shape);

// Sets output = sum_t softmax(logit)_t value_t and lse over the rows that each query token sees.
//
// A query that sees no row, or whose logits are all -infinity, gets output = 0 and lse = -infinity.
// Logits above the largest float count as the largest float. NaN in a query makes the output of
// this query unspecified; NaN or infinity in a row makes all outputs of the call unspecified, also
// those of queries that do not see the row.
//
// Products and sums are fp32, except on kAvx512Bf16 with bf16 rows: queries that are not bf16
// numbers are split into two bf16 parts (q.k keeps about 16 bits of the query), and the weights of
// the value sum are rounded to bf16 after the softmax and normalised by the sum of the rounded
// weights. The tolerances are those of AttendRows (kernels/attend/attend.h).
void AttendRange(const Exec& exec, const AttendRangeArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ATTEND_ATTEND_RANGE_H_
