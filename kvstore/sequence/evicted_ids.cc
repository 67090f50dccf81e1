#include "kvstore/sequence/evicted_ids.h"

#include "kvstore/values.h"

namespace pqcached::kvstore {

void EvictedIds::Add(uint64_t sequence_id, std::string_view tenant) {
  const MutexLock lock(&mutex_);
  if (!tenants_.emplace(sequence_id, tenant).second) return;
  order_.push_back(sequence_id);
  if (order_.size() <= kMaxIds) return;
  tenants_.erase(order_.front());
  order_.pop_front();
}

bool EvictedIds::Contains(uint64_t sequence_id, std::string_view tenant) const {
  const MutexLock lock(&mutex_);
  const auto found = tenants_.find(sequence_id);
  return found != tenants_.end() && (tenant == kAllTenants || found->second == tenant);
}

}  // namespace pqcached::kvstore
