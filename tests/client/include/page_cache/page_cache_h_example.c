/* The example of page_cache.h, compiled as C99. It is not run, because it needs a sidecar. */
#include "pqcached/page_cache.h"

void use_page(const void* page, uint64_t page_bytes);
pqc_status page_cache_h_example(pqc_page_cache* cache, const void* key, uint64_t key_bytes,
                                const void* data, uint64_t data_bytes, void* buffer,
                                uint64_t buffer_bytes);

// clang-format off
pqc_status page_cache_h_example(pqc_page_cache* cache, const void* key, uint64_t key_bytes,
                                const void* data, uint64_t data_bytes, void* buffer,
                                uint64_t buffer_bytes) {
  // [example]
  pqc_page_source source = PQC_INIT(pqc_page_source);
  source.key = key;
  source.key_bytes = key_bytes;
  source.data = data;
  source.data_bytes = data_bytes;
  pqc_status status = pqc_page_put(cache, &source, 1);
  pqc_page_target target = PQC_INIT(pqc_page_target);
  target.key = key;
  target.key_bytes = key_bytes;
  target.data = buffer;
  target.capacity_bytes = buffer_bytes;
  if (status == PQC_OK) status = pqc_page_get(cache, &target, 1);
  if (target.outcome == PQC_PAGE_FOUND) use_page(buffer, target.size_bytes);
  // [/example]
  return status;
}
// clang-format on
