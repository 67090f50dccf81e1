// Recovery: restores a cache's sequences from the records of an earlier process
// (sequence/sequence_record.h).
//
// Nothing is trusted: records have checksums, their contents are checked against the shape of the
// cache and against each other, and no two of them get the same bytes of the pool. A sequence is
// recovered in its acknowledged state, or dropped and counted. A corrupt index, or one that
// BuildIndex had not finished, is dropped without its sequence; an incremental index continues.
//
// Records are only read until the end, when the unused ones are emptied: if the process is killed
// before that, the next one finds the same records.
#ifndef PQCACHED_KVSTORE_STORE_RECOVERY_H_
#define PQCACHED_KVSTORE_STORE_RECOVERY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence_record.h"

namespace pqcached::kvstore {

struct RecoveredSequence {
  SequenceIdentity identity;
  std::shared_ptr<Sequence> sequence;
  std::shared_ptr<NamedTokens> names;
};

struct RecoveredCache {
  std::vector<RecoveredSequence> sequences;
  uint32_t segments = 0;
  std::vector<std::string> dropped;  // what was dropped and why, one text for each broken record
};

// Recovers the sequences. Extents that are marked as used and belong to no recovered sequence are
// quarantined afterwards.
//
// REQUIRES: cache.records is an opened table; nothing was allocated from the pool yet.
RecoveredCache RecoverSequences(const Cache& cache);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_RECOVERY_H_
