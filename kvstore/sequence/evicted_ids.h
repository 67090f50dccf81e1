// EvictedIds: the ids of the most recently evicted sequences.
#ifndef PQCACHED_KVSTORE_SEQUENCE_EVICTED_IDS_H_
#define PQCACHED_KVSTORE_SEQUENCE_EVICTED_IDS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_set>

#include "kvstore/mutex.h"

namespace pqcached::kvstore {

// Thread-safe.
class EvictedIds {
 public:
  static constexpr size_t kMaxIds = 1 << 16;

  void Add(uint64_t sequence_id);
  bool Contains(uint64_t sequence_id) const;

 private:
  mutable Mutex mutex_;
  std::deque<uint64_t> order_ ABSL_GUARDED_BY(mutex_);
  std::unordered_set<uint64_t> ids_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_EVICTED_IDS_H_
