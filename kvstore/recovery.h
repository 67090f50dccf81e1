// Recovery: from what an earlier process wrote down of a cache to its sequences (sequence_record.h).
//
// Nothing is trusted: records have checksums, what they name is checked against the shape of the cache and
// against each other, and no two of them get the same bytes of the pool. A sequence comes back as it was
// acknowledged, or is dropped and counted. An index that rotted, or that BuildIndex had not finished, is
// dropped alone; a live one goes on.
//
// Records are only read, and emptied at the end where nobody needs them: a process that is killed in
// between leaves the same work to the next one.
#ifndef PQCACHED_KVSTORE_RECOVERY_H_
#define PQCACHED_KVSTORE_RECOVERY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kvstore/cache.h"
#include "kvstore/sequence_record.h"

namespace pqcached::kvstore {

struct RecoveredSequence {
  SequenceIdentity identity;
  std::shared_ptr<Sequence> sequence;
  std::shared_ptr<NamedTokens> names;
};

struct RecoveredCache {
  std::vector<RecoveredSequence> sequences;
  uint32_t segments = 0;
  uint32_t dropped_records = 0;
};

// REQUIRES: cache.records is an opened table; nothing was allocated from the pool yet. Whatever of the
// pool is in use and comes back in no sequence is in quarantine afterwards.
RecoveredCache RecoverSequences(const Cache& cache);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_RECOVERY_H_
