// LayerBuild: trains the codebook and computes the codes of one layer, from rows that no longer
// change. BuildIndex, incremental indexes and merges use it.
//
// Work runs on the building arena, one training task of a kv head at a time. Results depend on
// rows, seed and iterations, never on the number of threads.
//
// Thread-safe as long as outputs are not shared.
#ifndef PQCACHED_KVSTORE_INDEX_LAYER_BUILD_H_
#define PQCACHED_KVSTORE_INDEX_LAYER_BUILD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/query_samples.h"
#include "kvstore/sequence/segment.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// Tokens of one segment, by absolute position; all of them are ingested.
struct SegmentTokens {
  std::shared_ptr<const SegmentRows> rows;
  PositionRange tokens;
};

struct LayerTraining {
  uint32_t layer_slot = 0;
  IndexDescriptor index;
  std::span<const SegmentTokens> segments;  // training data
  uint32_t sink_tokens = 0;                 // positions below it are not trained on
  uint32_t sample_tokens = 0;               // rows per kv head; 0 = all
  uint32_t iterations = 0;
  uint64_t seed = 0;
  // Start from it. Null, or it does not fit: by the seed.
  const Codebook* first = nullptr;
  // Of the layer, where the index type needs them and there is no `first`.
  std::shared_ptr<const QuerySamples> samples = nullptr;
  std::function<bool()> keep_going;  // called between iterations, from several threads; false stops
};

// Returns the iterations of k-means that fit into the time which the engine takes for the prefill
// of these tokens in one layer (PQCache, section 3.3), at most kMaxAdaptiveIterations; these when
// the time is not known. `sample_tokens`: rows per kv head that are trained on.
inline constexpr uint32_t kMaxAdaptiveIterations = 10;
uint32_t AdaptiveIterations(const Cache& cache, uint32_t layer_slot, const IndexDescriptor& index,
                            PositionRange tokens, uint32_t sample_tokens);

// Prepares the training of one kv head (BuiltIndexType::PrepareTraining), and runs one task of it,
// with scratch of the cache.
void PrepareHead(const Cache& cache, const TrainingArgs& args);
TrainingResult Train(const Cache& cache, const TrainingArgs& args);

// Trains `codebook` and fills its header.
void TrainLayer(const Cache& cache, const LayerTraining& training, Codebook& codebook);

// Returns the mean squared distance of a sample of the segments' keys (at most 2048 rows per kv
// head) to their centroids of `codebook`, summed over sub-spaces, averaged over kv heads. It is
// comparable with CodebookHeader::inertia. `training`: first, iterations and keep_going are
// ignored.
double MeasureLayer(const Cache& cache, const LayerTraining& training, const Codebook& codebook);

// Allocates the index data of one layer of a segment, codes its slots [0, slot_end), and counts and
// lists those after the sink tokens. The segment is closed, or full in this layer.
//
// Errors: kResourceExhausted with the shortfall; kCancelled after `keep_going` has returned false,
// which only types ask that close segments later.
absl::StatusOr<SegmentIndex::Layer> CodeLayer(const Cache& cache, uint32_t layer_slot,
                                              const SegmentRows& rows, uint32_t slot_end,
                                              uint32_t sink_tokens,
                                              std::shared_ptr<const Codebook> codebook,
                                              const std::function<bool()>& keep_going = {});

// Does the same for slots of the active segment, without counts and lists, which are written when
// it is closed.
absl::StatusOr<SegmentIndex::Layer> CodeOpenLayer(const Cache& cache, uint32_t layer_slot,
                                                  const SegmentRows& rows, uint32_t slot_end,
                                                  std::shared_ptr<const Codebook> codebook);

// Codes the slots [0, slot_end) of index data whose content may be anything but whose header fits,
// and counts and lists those from their counted_begin on. Errors: kCancelled, as above.
//
// REQUIRES: nothing else reads the data yet.
absl::StatusOr<SegmentIndex::Layer> CodeLayerAgain(const Cache& cache, uint32_t layer_slot,
                                                   const SegmentRows& rows, uint32_t slot_end,
                                                   SegmentIndex::Layer data,
                                                   const std::function<bool()>& keep_going);

// Allocates a codebook for one layer, with unspecified centroids. Errors: kResourceExhausted.
absl::StatusOr<std::shared_ptr<Codebook>> NewCodebook(const Cache& cache, uint32_t layer_slot,
                                                      const IndexDescriptor& index,
                                                      uint32_t codebook_generation);

// Returns the training rows of one kv head, in the form that the kernels read.
std::vector<kernels::RowSpan> TrainingRows(const StoredLayers::Layer& layer, uint32_t kv_head,
                                           std::span<const SegmentTokens> segments,
                                           uint32_t sink_tokens);

// Refuses (kInvalidArgument, `field`) an index that needs no build, as flat does.
absl::Status CheckNeedsBuild(const IndexDescriptor& index, std::string_view field);

// Checks that a build of the index has the query samples that it needs. `has_first`: layers that
// have a codebook of the index start from it. Errors: kFailedPrecondition (`field`), naming the
// first layer without samples.
absl::Status CheckSamples(const Cache& cache, const Snapshot& snapshot,
                          const IndexDescriptor& index, bool has_first, std::string_view field);

// Checks that an index fits all layers that indexes have. Errors: kInvalidArgument (`field`);
// kFailedPrecondition (`field`): the cache has no such layer.
absl::Status CheckIndexOf(const Cache& cache, const IndexDescriptor& index, std::string_view field);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_INDEX_LAYER_BUILD_H_
