// Admission: whether a request fits, before it is admitted.
#ifndef PQCACHED_KVSTORE_EVICT_ADMISSION_H_
#define PQCACHED_KVSTORE_EVICT_ADMISSION_H_

#include "absl/status/statusor.h"
#include "kvstore/evict/evictor.h"
#include "kvstore/sequence/cache.h"

namespace pqcached::kvstore {

// Implements Store::Admit, with its errors. `growable_bytes`: by which the pool may still grow.
absl::StatusOr<Admission> Admit(const Cache& cache, const AdmitSpec& spec, const Evictor& evictor,
                                size_t growable_bytes);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_EVICT_ADMISSION_H_
