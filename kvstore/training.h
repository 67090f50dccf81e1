// Training of one codebook part: the centroids of one sub-space of one kv head.
//
// Deterministic under a seed and an iteration count. Thread-safe.
#ifndef PQCACHED_KVSTORE_TRAINING_H_
#define PQCACHED_KVSTORE_TRAINING_H_

#include <cstdint>
#include <functional>
#include <span>

#include "kvstore/arena.h"
#include "kvstore/read/layer_view.h"

namespace pqcached::kvstore {

struct TrainingArgs {
  LayerShape shape;
  IndexDescriptor index;
  uint32_t subspace = 0;
  std::span<const kernels::RowSpan>
      rows;                    // of the kv head: exactly the rows that may be trained on
  uint32_t sample_tokens = 0;  // 0, or at least as many as there are: all
  uint32_t iterations = 0;
  uint64_t sample_seed = 0;           // the same for all sub-spaces of a kv head
  uint64_t seed = 0;                  // of the initial centroids
  std::span<const float> first = {};  // begin with these centroids instead; [2^b, key_dim / m]
  // Asked before each iteration; false ends the training with the centroids as they are.
  std::function<bool()> go_on;
  std::span<float> centroids;  // [2^b, key_dim / m], overwritten
};

struct TrainingResult {
  uint32_t trained_tokens = 0;
  uint32_t iterations = 0;  // in effect: further ones would not have moved a centroid
  double inertia = 0;  // mean squared distance of a sample to its centroid, before the last move
};

TrainingResult Train(const kernels::Exec& exec, const TrainingArgs& args, ScratchPool& scratch);

// Mean squared distance of a sample of the rows to their nearest centroid, which stay as they are.
// Of `args`: shape, index, subspace, rows, sample_tokens, sample_seed, centroids. 0 without rows.
double MeasureInertia(const kernels::Exec& exec, const TrainingArgs& args, ScratchPool& scratch);

// A well mixed 64-bit value of a seed and a tag.
uint64_t MixSeed(uint64_t seed, uint64_t tag);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_TRAINING_H_
