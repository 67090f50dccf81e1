// PoolMove moves the pool of a cache to new memory while a process recovers the cache.
//
// A client of an earlier process that keeps its connection open may map the old memory for ever.
// Extents that it may read cannot be allocated again there, but they can in the copy.
//
// Kept memory names each step (CacheRecord), so that a process that is killed in the middle leaves
// the old pool or the complete copy:
//
//   planned    move-N, pool-N
//   copied     moved-N, pool-N     the plan is dropped before the copy begins, so that a copy that
//                                  kills its process is not tried again
//   finished   pool-N              the copy
#ifndef PQCACHED_KVSTORE_STORE_POOL_MOVE_H_
#define PQCACHED_KVSTORE_STORE_POOL_MOVE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kvstore/limits/memory_ledger.h"
#include "kvstore/memory/extent_ledger.h"
#include "kvstore/memory/keeper.h"
#include "kvstore/records/root_records.h"
#include "kvstore/values.h"

namespace pqcached::kvstore {

class PoolMove {
 public:
  struct Parts {
    const CacheRecord& record;
    const ExtentLedger& table;  // names the units in use, which are copied
    MemoryLedger& ledger;       // grants the memory of the copy
  };

  // The keeper outlives the object.
  PoolMove(DescriptorKeeper& keeper, uint64_t cache_id);

  // Plans the move for the next process. Errors: see Store::PlanPoolMove.
  absl::Status Plan(bool strict);
  // Moves the pool if that was planned, or finishes a move that an earlier process has begun; adds
  // the cache to report.moved_caches. When the copy is refused, the pool stays where it is, and
  // report.refused_moves has the reason.
  //
  // Errors: those of the keeper; the next process may finish the move
  absl::Status Run(const Parts& parts, RecoveryReport& report);

 private:
  // Copies the units in use to new memory, and keeps it as the complete copy.
  absl::Status Copy(const Parts& parts);
  // Replaces the pool by the complete copy.
  absl::Status Finish(const FileDescriptor& copy);

  DescriptorKeeper& keeper_;
  CacheRecord names_;  // has only the id
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_POOL_MOVE_H_
