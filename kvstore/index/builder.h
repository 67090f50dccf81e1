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
#include "kvstore/index/build.h"
#include "kvstore/index/live_index.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// Builds an index under the contract of Store::BuildIndex. The write lease is held only until the
// active segment is closed. Writers continue during the build; rows that they add are coded at its
// end. Layers become ready one by one, in ascending order as far as the workers allow. `live`
// completes an incremental index of the sequence, and pauses its work on the others.
absl::Status BuildSequenceIndex(const Cache& cache, IncrementalIndexer& live, WriteLease lease,
                                const BuildSpec& spec,
                                const std::function<bool(const BuildProgress&)>& progress,
                                const BuildClock& clock = SteadyTime::Now);

// Refuses (kAlreadyExists) a rebuild whose condition does not hold. Holds no lease: writers
// continue.
absl::Status CheckRebuildDue(const Cache& cache, const Sequence& sequence, const BuildSpec& spec,
                             const BuildClock& clock = SteadyTime::Now);

// Closes the prefill of a sequence under the contract of Store::ClosePrefill.
absl::Status CloseSequencePrefill(const Cache& cache, IncrementalIndexer& live,
                                  const std::shared_ptr<Sequence>& sequence);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_INDEX_BUILDER_H_
