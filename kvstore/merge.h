// Merge: neighbouring closed segments become one. Rows and codes are copied; a layer is coded anew where
// the segments have different codebooks, under a fresh codebook where their keys have drifted away
// from the newest one.
#ifndef PQCACHED_KVSTORE_MERGE_H_
#define PQCACHED_KVSTORE_MERGE_H_

#include <cstdint>
#include <functional>
#include <span>

#include "absl/status/statusor.h"
#include "kvstore/cache.h"
#include "kvstore/segment.h"

namespace pqcached::kvstore {

struct MergeSpec {
  // Closed neighbours with the same indexes, ready in all layers.
  std::span<const SegmentEntry> run;
  uint32_t sink_tokens = 0;
  uint32_t sample_tokens = 0;  // of a fresh codebook, and to measure drift
  uint32_t iterations = 0;     // of a fresh codebook
  uint64_t seed = 0;
  uint32_t new_epoch = 0;  // ordinal of fresh codebooks
  double drift_ratio = 1;
  std::function<bool()> go_on;  // false: give up
};

// Makes the segment that may take the place of the run (Sequence::ReplaceSegments).
//
// Errors: kResourceExhausted with the shortfall; kCancelled when go_on said so.
absl::StatusOr<SegmentEntry> MergeSegments(const Cache& cache, const MergeSpec& spec);

// Whether new keys, measured under a codebook, have drifted away from what it was trained on.
bool HasDrifted(double inertia, const Codebook& codebook, double drift_ratio);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MERGE_H_
