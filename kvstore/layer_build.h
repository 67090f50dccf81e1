// LayerBuild: codebook and codes of one layer, from rows that no longer change. What BuildIndex, live
// indexes and merges have in common.
//
// Work runs on the building arena, one task per kv head and sub-space. Results depend on rows, seed
// and iterations, never on the number of threads.
//
// Thread-safe as long as outputs are not shared.
#ifndef PQCACHED_KVSTORE_LAYER_BUILD_H_
#define PQCACHED_KVSTORE_LAYER_BUILD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/cache.h"
#include "kvstore/segment.h"

namespace pqcached::kvstore {

// Tokens of one segment: absolute positions, all of them ingested.
struct SegmentTokens {
  std::shared_ptr<const SegmentRows> rows;
  PositionRange tokens;
};

struct LayerTraining {
  uint32_t layer_slot = 0;
  IndexDescriptor index;
  std::span<const SegmentTokens> segments;  // to train on
  uint32_t sink_tokens = 0;                 // positions below it are not trained on
  uint32_t sample_tokens = 0;               // per kv head; 0 = all
  uint32_t iterations = 0;
  uint64_t seed = 0;
  const Codebook* first = nullptr;  // begin with its centroids; null: with drawn ones
  std::function<bool()> go_on;      // asked between iterations, from several threads
};

// Fills centroids and header of `codebook`.
void TrainLayer(const Cache& cache, const LayerTraining& training, Codebook& codebook);

// Mean squared distance of a sample of the segments' keys (2048 rows at most) to their centroids of
// `codebook`, summed over sub-spaces, mean over kv heads: to be compared with CodebookHeader::inertia.
// `training`: without first, iterations and go_on.
double MeasureLayer(const Cache& cache, const LayerTraining& training, const Codebook& codebook);

// Allocates index data of one layer of a segment, codes its slots [0, slot_end), counts and lists
// those from the sink on. The segment is closed, or full in this layer.
//
// Errors: kResourceExhausted with the shortfall.
absl::StatusOr<SegmentIndex::Layer> CodeLayer(const Cache& cache, uint32_t layer_slot,
                                              const SegmentRows& rows, uint32_t slot_end,
                                              uint32_t sink_tokens,
                                              std::shared_ptr<const Codebook> codebook);

// The same for slots of an open tail: neither counted nor listed before it is closed.
absl::StatusOr<SegmentIndex::Layer> CodeOpenLayer(const Cache& cache, uint32_t layer_slot,
                                                  const SegmentRows& rows, uint32_t slot_end,
                                                  std::shared_ptr<const Codebook> codebook);

// A codebook for one layer, its centroids still to be filled. Errors: kResourceExhausted.
absl::StatusOr<std::shared_ptr<Codebook>> NewCodebook(const Cache& cache, uint32_t layer_slot,
                                                      const IndexDescriptor& index, uint32_t epoch);

// The rows of one kv head that may be trained on, as the kernels want them.
std::vector<kernels::RowSpan> TrainingRows(const StoredLayers::Layer& layer, uint32_t kv_head,
                                           std::span<const SegmentTokens> segments,
                                           uint32_t sink_tokens);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_LAYER_BUILD_H_
