// Rules for the specs of caches that are open together.
#ifndef PQCACHED_KVSTORE_STORE_CACHE_RULES_H_
#define PQCACHED_KVSTORE_STORE_CACHE_RULES_H_

#include <string>

#include "kvstore/values.h"

namespace pqcached::kvstore {

// Returns the first field in which the specs differ; empty if they agree. Capacities and
// default indexes are not compared: an open cache keeps its own.
std::string FindDifference(const CacheSpec& a, const CacheSpec& b);

// Returns the first field in which two ranks of a group are incompatible; empty if there is none.
// Ranks may hold different layers, or different kv heads of a layer. Paths of groups are those of
// `b`.
std::string FindIncompatibleField(const CacheSpec& a, const CacheSpec& b);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_CACHE_RULES_H_
