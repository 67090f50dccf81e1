// Merge replaces neighbouring closed segments by one. Rows and codes are copied. A layer is
// re-encoded if the segments have different codebooks, and it gets a fresh codebook if its keys
// have drifted away from the newest one.
#ifndef PQCACHED_KVSTORE_INDEX_MERGE_H_
#define PQCACHED_KVSTORE_INDEX_MERGE_H_

#include <cstdint>
#include <functional>
#include <span>

#include "absl/status/statusor.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/segment.h"

namespace pqcached::kvstore {

struct MergeSpec {
  // Neighbouring closed segments with the same indexes, which are ready in all layers.
  std::span<const SegmentEntry> run;
  uint32_t sink_tokens = 0;
  uint32_t sample_tokens = 0;  // sample size for a fresh codebook and for measuring drift
  uint32_t iterations = 0;     // of k-means, for a fresh codebook
  uint64_t seed = 0;
  uint32_t new_generation = 0;  // codebook generation of fresh codebooks
  double drift_ratio = 1;
  std::function<bool()> keep_going;  // returns false to cancel the merge
};

// Builds the segment that can replace the run (Sequence::ReplaceSegments).
//
// Errors: kResourceExhausted  the pool is full (names the shortfall)
//         kCancelled          keep_going returned false
absl::StatusOr<SegmentEntry> MergeSegments(const Cache& cache, const MergeSpec& spec);

// Copies the tokens of a closed segment, and its codes, into a segment that has room for no more of
// them. REQUIRES: the indexes of the segment are ready in all layers.
//
// Errors: kResourceExhausted  the pool is full (names the shortfall)
absl::StatusOr<SegmentEntry> CopySegment(const Cache& cache, const SegmentEntry& entry);

// Returns whether keys with this `inertia` under a codebook have drifted away from the keys that it
// was trained on.
bool HasDrifted(double inertia, const Codebook& codebook, double drift_ratio);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_INDEX_MERGE_H_
