// Serialised form of a cache's spec, for the records that the next process reads.
//
// Pure; thread-safe.
#ifndef PQCACHED_KVSTORE_RECORDS_CACHE_IMAGE_H_
#define PQCACHED_KVSTORE_RECORDS_CACHE_IMAGE_H_

#include <optional>

#include "kvstore/model.h"
#include "kvstore/records/record_bytes.h"

namespace pqcached::kvstore {

void WriteSpec(const CacheSpec& spec, RecordWriter& writer);
// Returns nothing unless the bytes are a spec that ValidateCacheSpec accepts.
std::optional<CacheSpec> ReadSpec(RecordReader& reader);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_RECORDS_CACHE_IMAGE_H_
