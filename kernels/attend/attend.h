// Attention of a few queries over rows (KV entries) of one kv head, without copying the rows.
//
// One call serves all query heads that share the kv head (the *group*) and up to
// kMaxAttendQueryLength decode positions, so that each row is read once. The result is a *partial*
// attention (output, log-sum-exp); MergePartials (kernels/attend/merge.h) merges several. There is
// no causal mask: every query attends to every given row. In a step of several tokens this is
// correct for the selected rows, which all tokens of the step may see; the engine attends to its
// own local window, where the mask matters, and merges.
//
// Stateless; thread-safe as long as outputs and scratch are not shared.
#ifndef PQCACHED_KERNELS_ATTEND_ATTEND_H_
#define PQCACHED_KERNELS_ATTEND_ATTEND_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"
#include "kernels/base/row_span.h"

namespace pqcached::kernels {

inline constexpr uint32_t kMaxAttendQueryLength = 8;
inline constexpr uint32_t kMaxAttendDim = 256;

// Shape of one call.
struct AttendShape {
  DType dtype = DType::kF16;    // dtype of the rows
  uint32_t key_dim = 0;         // 32..256, multiple of 8; AttendScored: also 0, rows of values
  uint32_t value_dim = 0;       // 32..256, multiple of 8
  size_t row_stride_bytes = 0;  // >= key_dim + value_dim elements, or the larger of the two
  uint32_t group_size = 1;      // G: query heads of this kv head, 1..1024
  uint32_t query_length = 1;    // L: 1..kMaxAttendQueryLength
  // Distance from a key to its value; 0: the value directly follows the key. Keys and values in two
  // arrays of the same row stride have the distance of these arrays.
  ptrdiff_t value_offset_bytes = 0;
};

struct AttendArgs {
  AttendShape shape;
  float scale = 1.0f;    // logit = scale * q.k
  float softcap = 0.0f;  // > 0: logit = softcap * tanh(scale * q.k / softcap); 0: off
  std::span<const float> queries = {};  // [L, G, key_dim]
  std::span<const RowSpan> spans;       // ascending positions
  std::span<const uint32_t> positions;  // not AttendAllRows: ascending, each inside a span
  std::span<float> output;              // [L, G, value_dim], overwritten
  std::span<float> lse;                 // [L, G], overwritten: natural log of sum exp(logit)
  std::span<std::byte> scratch;         // at least AttendScratchBytes(shape), any alignment
  // AttendScored only: [L, G, positions], scaled and softcapped.
  std::span<const float> logits = {};
};

// Returns the scratch size in bytes for the shape, enough for every instruction set; below 1 MiB
// for L * G <= 64.
size_t AttendScratchBytes(const AttendShape& shape);

// Sets output = sum_t softmax(logit)_t value_t and lse over the rows of `positions`.
//
// Without rows, and when every logit is -infinity: output = 0, lse = -infinity. Logits above the
// largest float count as the largest float (several such rows have equal weights). NaN in queries
// or rows makes the output of the affected queries unspecified, and no other output.
//
// Products and sums are fp32, except on kAvx512Bf16 with bf16 rows: queries that are not bf16
// numbers are split into two bf16 parts (q.k keeps about 16 bits of the query), and the weights of
// the value sum are rounded to bf16 after the softmax and normalised by the sum of the rounded
// weights. kReference computes in double. The tests require these tolerances, with v = max |value|
// and logits of magnitude up to 30:
//   output  2e-5 * v; with bf16 dot products 5e-3 * v at worst and 5e-4 * v in the mean
//   lse     5e-5; with bf16 dot products 1e-3
void AttendRows(const Exec& exec, const AttendArgs& args);

// Attends as AttendRows to rows whose logits are given. Reads the values only: neither the keys nor
// `queries`, `scale` and `softcap`.
void AttendScored(const Exec& exec, const AttendArgs& args);

// Attends to every row of every span (full attention, streaming); `positions` is ignored.
void AttendAllRows(const Exec& exec, const AttendArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ATTEND_ATTEND_H_
