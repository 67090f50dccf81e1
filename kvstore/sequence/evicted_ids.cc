#include "kvstore/sequence/evicted_ids.h"

namespace pqcached::kvstore {

void EvictedIds::Add(uint64_t sequence_id) {
  const MutexLock lock(&mutex_);
  if (!ids_.insert(sequence_id).second) return;
  order_.push_back(sequence_id);
  if (order_.size() <= kMaxIds) return;
  ids_.erase(order_.front());
  order_.pop_front();
}

bool EvictedIds::Contains(uint64_t sequence_id) const {
  const MutexLock lock(&mutex_);
  return ids_.contains(sequence_id);
}

}  // namespace pqcached::kvstore
