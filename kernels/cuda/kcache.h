// KCache on the device: exact logits over keys that are in device memory, and the weighted sum of
// the values of the tokens that ScoreSelect (kernels/cuda/select/select.h) selected by them.
//
// A lane is one sequence under one kv head. Values are read in place: addresses may point into
// device memory (layers that keep their values) or into the page-locked mapping.
#ifndef PQCACHED_KERNELS_CUDA_KCACHE_H_
#define PQCACHED_KERNELS_CUDA_KCACHE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/status.h"

namespace pqcached::kernels::cuda {

struct KeyLane {
  const std::byte* keys = nullptr;  // row of token 0, aligned to 16 bytes; rows start with the key
  const float* queries = nullptr;   // [G, key_dim]
  float* scores = nullptr;          // [G, score_stride]; [g, t] is overwritten for t < token_count
  uint32_t token_count = 0;         // at most token_capacity
};

struct ExactScoresArgs {
  DType dtype = DType::kF16;
  uint32_t key_dim = 0;         // 32..256, multiple of 8
  size_t row_stride_bytes = 0;  // a multiple of 16
  uint32_t group_size = 1;      // G, 1..64
  float scale = 1.0f;
  size_t score_stride = 0;     // >= token_count, in floats
  uint32_t lane_capacity = 0;  // at most 65535
  uint32_t token_capacity = 0;
  const KeyLane* lanes = nullptr;  // [lane_capacity], in device memory
};

// Computes the logits of kernels::ExactScores for all lanes in one launch.
//
// Errors: those of the launch; cudaErrorInvalidValue when a number is out of range.
KernelStatus ExactScores(const ExactScoresArgs& args, Stream stream);

struct WeightedValuesArgs {
  DType dtype = DType::kF16;
  uint32_t value_dim = 0;          // 32..256, multiple of 8
  uint32_t group_size = 1;         // G, 1..64
  uint32_t lane_capacity = 0;      // at most 65535
  const KeyLane* lanes = nullptr;  // [lane_capacity]: scores are read
  size_t score_stride = 0;
  const float* lse =
      nullptr;  // [lane, G]: log of the sum of exp(score) over all keys (ScoreSelect)
  const uint32_t* tokens = nullptr;  // [lane, token_stride]: selected tokens, indices into scores
  size_t token_stride = 0;
  const uint32_t* counts = nullptr;             // [lane]
  const std::byte* const* addresses = nullptr;  // [lane, token_stride]: addresses of their values
  // False: weights are those of the softmax over all keys and do not sum to 1. True: weights are
  // divided by their sum, as in a softmax over the selected tokens only.
  bool renormalise = false;
  float* output = nullptr;  // [lane, G, value_dim], overwritten; 0 without tokens
};

// Sets output = sum over selected t of exp(score[t] - lse) value_t, optionally renormalised.
//
// Errors: as above.
KernelStatus WeightedValues(const WeightedValuesArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_KCACHE_H_
