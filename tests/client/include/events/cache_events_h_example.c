/* The example of cache_events.h, compiled as C99. It is not run, because it needs a sidecar. */
#include "pqcached/cache_events.h"

void forget_all_keys(void);
void add_key(pqc_prefix_key key);
void remove_key(pqc_prefix_key key);
pqc_status cache_events_h_example(pqc_cache* cache);

// clang-format off
pqc_status cache_events_h_example(pqc_cache* cache) {
  // [example]
  pqc_cache_event events[256];
  uint32_t count = 0;
  pqc_cache_events* stream = NULL;
  pqc_status status = pqc_cache_events_open(cache, 0, 0, &stream);
  while (status == PQC_OK) {
    status = pqc_cache_events_next(stream, 1000, events, 256, &count);
    for (uint32_t i = 0; status == PQC_OK && i < count; ++i) {
      if (events[i].kind == PQC_CACHE_CLEARED) forget_all_keys();
      if (events[i].kind == PQC_CACHE_STORED) add_key(events[i].key);
      if (events[i].kind == PQC_CACHE_REMOVED) remove_key(events[i].key);
    }
  }
  pqc_cache_events_close(stream);
  // [/example]
  return status;
}
// clang-format on
