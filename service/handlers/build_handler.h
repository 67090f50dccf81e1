// BuildHandler answers BuildIndex: a long call that reports its progress.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_HANDLERS_BUILD_HANDLER_H_
#define PQCACHED_SERVICE_HANDLERS_BUILD_HANDLER_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/store.h"
#include "pqcached/v1/kv_cache.pb.h"
#include "service/handlers/cache_specs.h"
#include "service/handlers/caller.h"

namespace pqcached::service {

class Log;

class BuildHandler {
 public:
  using Report = std::function<void(const kvstore::BuildProgress& progress)>;

  BuildHandler(kvstore::Store& store, CacheSpecs& specs, Log& log)
      : store_(store), specs_(specs), log_(log) {}

  // Builds an index until its end, the caller's deadline or its cancellation. Calls `report` after
  // each (layer, codebook generation), one call at a time.
  absl::Status BuildIndex(const Caller& caller, const v1::BuildIndexRequest& request,
                          const Report& report);

 private:
  absl::StatusOr<kvstore::BuildSpec> SpecOf(const Caller& caller,
                                            const v1::BuildIndexRequest& request);

  kvstore::Store& store_;
  CacheSpecs& specs_;
  Log& log_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_BUILD_HANDLER_H_
