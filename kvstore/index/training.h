// Training of one part of a codebook: the centroids of one sub-space of one kv head.
//
// Deterministic for a given seed and iteration count. Thread-safe.
#ifndef PQCACHED_KVSTORE_INDEX_TRAINING_H_
#define PQCACHED_KVSTORE_INDEX_TRAINING_H_

#include <cstdint>
#include <functional>
#include <span>

#include "kvstore/memory/arena.h"
#include "kvstore/read/layer_view.h"

namespace pqcached::kvstore {

struct TrainingArgs {
  LayerShape shape;
  kernels::PqGeometry geometry;  // that of the codebook
  uint32_t subspace = 0;
  // Rows of the kv head; contains only rows that may be trained on.
  std::span<const kernels::RowSpan> rows;
  uint32_t sample_tokens = 0;  // sample size; 0, or at least the number of rows: all rows
  uint32_t iterations = 0;
  uint64_t sample_seed = 0;  // same for all sub-spaces of a kv head
  uint64_t seed = 0;         // for the initial centroids
  // Initial centroids [2^b, key_dim / m]; empty: chosen by `seed`.
  std::span<const float> first = {};
  // Called before each iteration; false ends the training with the current centroids.
  std::function<bool()> keep_going;
  std::span<float> centroids;  // [2^b, key_dim / m], overwritten
};

struct TrainingResult {
  uint32_t trained_tokens = 0;
  // Iterations in effect. All of them on convergence, since further ones would not move a centroid.
  uint32_t iterations = 0;
  double inertia = 0;  // mean squared distance of a sample to its centroid, before the last move
};

// Trains `args.centroids` by k-means on a sample of the rows.
TrainingResult Train(const kernels::Exec& exec, const TrainingArgs& args, ScratchPool& scratch);

// Returns the mean squared distance of a sample of the rows to their nearest centroids, which are
// not changed; 0 without rows. Fields of `args` in use: shape, geometry, subspace, rows,
// sample_tokens, sample_seed, centroids.
double MeasureInertia(const kernels::Exec& exec, const TrainingArgs& args, ScratchPool& scratch);

// Returns a well-mixed 64-bit hash of a seed and a tag.
uint64_t MixSeed(uint64_t seed, uint64_t tag);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_INDEX_TRAINING_H_
