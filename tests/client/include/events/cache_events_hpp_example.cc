// The example of cache_events.hpp, compiled. It is not run, because it needs a sidecar.
#include "pqcached/cache_events.hpp"

#include <set>
#include <string>

pqcached::Status CacheEventsHppExample(pqcached::Cache& cache, std::set<std::string>& keys);

// clang-format off
pqcached::Status CacheEventsHppExample(pqcached::Cache& cache, std::set<std::string>& keys) {
  // [example]
  auto events = pqcached::CacheEvents::Open(cache);
  if (!events.ok()) return events.status();
  while (true) {
    auto next = events->Next(1000);
    if (!next.ok()) return next.status();
    for (const pqc_cache_event& event : *next) {
      const std::string key(pqcached::BytesOf(event.key));
      if (event.kind == PQC_CACHE_CLEARED) keys.clear();
      if (event.kind == PQC_CACHE_STORED) keys.insert(key);
      if (event.kind == PQC_CACHE_REMOVED) keys.erase(key);
    }
  }
  // [/example]
}
// clang-format on
