// Shrink replaces a closed segment by a copy that has room for no more than its tokens.
//
// A prefill whose tokens have no names opens a segment with segment_tokens slots, because the
// length of the prompt is not known. When the prompt is short, most of these slots stay unused.
#ifndef PQCACHED_KVSTORE_INDEX_SHRINK_H_
#define PQCACHED_KVSTORE_INDEX_SHRINK_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// Shrinks the first closed segment of which more than an eighth is unused: its indexes are ready in
// all layers, no other sequence has it, and the pool has room for the copy without an eviction.
// Returns whether there was one. Writers and readers continue concurrently.
//
// Errors: those of Sequence::ReplaceSegments
absl::StatusOr<bool> ShrinkSegment(const Cache& cache, Sequence& sequence,
                                   const Snapshot& snapshot);
// Shrinks all such segments, unless a writer has the sequence.
void ShrinkSegments(const Cache& cache, const std::shared_ptr<Sequence>& sequence);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_INDEX_SHRINK_H_
