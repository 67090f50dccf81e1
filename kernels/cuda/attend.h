// Partial attention on the device, and the merge of partial results: all kv heads of a layer and a
// batch of sequences in one call, split over the rows of each lane.
//
// The definitions are those of kernels/attend/attend.h and kernels/attend/merge.h, with the same
// tolerances for products in fp32. A query token attends to all rows of its lane, or to a range of
// them; without rows it has output = 0 and lse = -infinity.
#ifndef PQCACHED_KERNELS_CUDA_ATTEND_H_
#define PQCACHED_KERNELS_CUDA_ATTEND_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/status.h"
#include "kernels/cuda/step/seats.h"

namespace pqcached::kernels::cuda {

struct AttendShape {
  DType dtype = DType::kF16;   // dtype of the rows
  uint32_t key_dim = 0;        // 32..256, multiple of 8
  uint32_t value_dim = 0;      // likewise; the value directly follows the key in a row
  uint32_t group_size = 1;     // G, query heads per kv head
  uint32_t query_length = 1;   // L, 1..8; L * G at most 64
  uint32_t lane_capacity = 0;  // at most 65535
  uint32_t row_capacity = 0;   // rows of the largest lane
  uint32_t split_count = 1;    // number of parts that a lane's rows are cut into; 1..1024
};

// Scaled and softcapped logits of the lanes' rows in a tensor of the engine, [tokens, kv_heads * G,
// rows], with strides in elements and seats as ArrangeQueries (kernels/cuda/step/seats.h) has them.
// Logits above the largest float count as the largest float; -infinity leaves a row out.
struct GivenLogits {
  const std::byte* data = nullptr;  // aligned for its type; null: there are none
  DType dtype = DType::kF32;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 1;
  const SeatItem* seats = nullptr;  // [lane / kv_heads], in device memory
  uint32_t kv_heads = 1;
};

struct AttendArgs {
  AttendShape shape;
  float scale = 1.0f;
  float softcap = 0.0f;            // > 0: logit = softcap * tanh(scale * q.k / softcap)
  const float* queries = nullptr;  // [lane, L, G, key_dim]
  GivenLogits logits = {};         // in place of queries and keys, neither of which is then read
  const std::byte* const* addresses = nullptr;  // [lane, address_stride]: rows, aligned to 16 bytes
  size_t address_stride = 0;
  const uint32_t* row_counts = nullptr;  // [lane], at most row_capacity
  // [lane, L, 2], in device memory: query token t attends to the lane's rows [begin, end) only.
  // Null: to all rows.
  const uint32_t* row_ranges = nullptr;
  float* output = nullptr;  // [lane, L, G, value_dim], overwritten
  float* lse = nullptr;     // [lane, L, G], overwritten
  void* scratch = nullptr;  // AttendScratchBytes, 16-byte aligned
  size_t scratch_bytes = 0;
};

// Returns 0 when split_count is 1.
size_t AttendScratchBytes(const AttendShape& shape);

// Returns the number of splits that fills a device of `multiprocessor_count` multiprocessors with
// `lane_count` lanes of `row_count` rows.
uint32_t ChooseSplitCount(uint32_t multiprocessor_count, uint32_t lane_count, uint32_t row_count);

// Attends with the queries of each lane to the lane's rows: one launch, and one more that merges
// the splits.
//
// Errors: those of the launches; cudaErrorInvalidValue when a number is out of range or the scratch
// is too small.
KernelStatus AttendRows(const AttendArgs& args, Stream stream);

inline constexpr uint32_t kMaxPartials = 8;

struct MergePartialsArgs {
  uint32_t query_count = 0;
  uint32_t value_dim = 0;
  uint32_t partial_count = 0;               // 0..kMaxPartials
  const float* outputs[kMaxPartials] = {};  // each [query_count, value_dim]
  const float* lses[kMaxPartials] = {};     // each [query_count]; -infinity: the output is not read
  float* output = nullptr;                  // [query_count, value_dim]; may be outputs[0]
  float* lse = nullptr;                     // [query_count]; may be lses[0]
};

// Merges partials like kernels::MergePartials. Errors: as above.
KernelStatus MergePartials(const MergePartialsArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_ATTEND_H_
