// EvictedIds: the ids of the most recently evicted sequences, with their tenants.
#ifndef PQCACHED_KVSTORE_SEQUENCE_EVICTED_IDS_H_
#define PQCACHED_KVSTORE_SEQUENCE_EVICTED_IDS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>

#include "kvstore/mutex.h"

namespace pqcached::kvstore {

// Thread-safe.
class EvictedIds {
 public:
  static constexpr size_t kMaxIds = 1 << 16;

  void Add(uint64_t sequence_id, std::string_view tenant);
  // Returns whether the sequence was evicted from a cache of this tenant, or, for kAllTenants, of
  // any.
  bool Contains(uint64_t sequence_id, std::string_view tenant) const;

 private:
  mutable Mutex mutex_;
  std::deque<uint64_t> order_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, std::string> tenants_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_EVICTED_IDS_H_
