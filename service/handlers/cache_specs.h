// CacheSpecs remembers the specification of the cache of each sequence, because a decode step needs
// one in every layer.
//
// Thread-safe. The store is not called under the lock.
#ifndef PQCACHED_SERVICE_HANDLERS_CACHE_SPECS_H_
#define PQCACHED_SERVICE_HANDLERS_CACHE_SPECS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvstore/mutex.h"
#include "kvstore/store.h"
#include "pqcached/v1/types.pb.h"
#include "service/handlers/caller.h"

namespace pqcached::service {

class CacheSpecs {
 public:
  using SharedSpec = std::shared_ptr<const kvstore::CacheSpec>;

  explicit CacheSpecs(kvstore::Store& store) : store_(store) {}

  // Returns the specification of the sequence's cache.
  //
  // Errors: kNotFound  the caller's tenant has no such sequence
  absl::StatusOr<SharedSpec> Of(const Caller& caller, uint64_t sequence_id);

  // Returns the requested index, or the default of the sequence's cache when the request names
  // none. Errors about the sequence are reported under `id_field`.
  absl::StatusOr<kvstore::IndexDescriptor> IndexOrDefault(const Caller& caller,
                                                          absl::string_view id_field,
                                                          uint64_t sequence_id, bool present,
                                                          const v1::IndexSpec& spec,
                                                          const std::string& field);

  // Frees what is remembered of a sequence that was dropped.
  void Forget(uint64_t sequence_id);

 private:
  struct Entry {
    std::string tenant;  // Of returns the entry to this tenant only
    SharedSpec spec;
  };

  kvstore::Store& store_;
  kvstore::Mutex mutex_;
  // By sequence id. Ids are never reused.
  absl::flat_hash_map<uint64_t, Entry> specs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_CACHE_SPECS_H_
