// BuildIndex: trains codebooks on the rows of a sequence and codes the rows with them.
// ClosePrefill: passes the last rows of a prefill to an incremental index.
#ifndef PQCACHED_KVSTORE_INDEX_BUILDER_H_
#define PQCACHED_KVSTORE_INDEX_BUILDER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kvstore/clock.h"
#include "kvstore/index/live_index.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// Codebook generation: a range of segments that share one codebook per layer and index.
struct CodebookGeneration {
  size_t segment_begin = 0;
  size_t segment_end = 0;
  PositionRange tokens;
};

// Returns the minimum number of tokens of a codebook generation for a build that covers
// `token_count` tokens: a quarter of them, and at least `least`. A selection computes score tables
// and a threshold per codebook, so generations of a fixed length would slow selection down as the
// context grows, and shorter ones did not improve quality (tests/FIGURES.md).
uint32_t MinGenerationTokens(uint32_t token_count, uint32_t least);

// Cuts segments into codebook generations of at least `codebook_tokens`; the remainder at the end
// joins the last one. `segment_ends` holds the end position (exclusive) of each segment.
std::vector<CodebookGeneration> SplitGenerations(const std::vector<uint32_t>& segment_ends,
                                                 uint32_t codebook_tokens);

using BuildClock = std::function<SteadyTime()>;

// Builds an index under the contract of Store::BuildIndex. The write lease is held only until the
// active segment is closed. Writers continue during the build; rows that they add are coded at its
// end. Layers become ready one by one, in ascending order as far as the workers allow. `live`
// completes an incremental index of the sequence, and pauses its work on the others.
absl::Status BuildSequenceIndex(const Cache& cache, IncrementalIndexer& live, WriteLease lease,
                                const BuildSpec& spec,
                                const std::function<bool(const BuildProgress&)>& progress,
                                const BuildClock& clock = SteadyTime::Now);

// Closes the prefill of a sequence under the contract of Store::ClosePrefill.
absl::Status CloseSequencePrefill(const Cache& cache, IncrementalIndexer& live,
                                  const std::shared_ptr<Sequence>& sequence);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_INDEX_BUILDER_H_
