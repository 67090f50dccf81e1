/* The example of query.h, compiled as C99. It is not run, because it needs a sidecar. */
#include "pqcached/client.h"

uint64_t query_h_example(pqc_sequence* sequence, const pqc_query* query,
                         const pqc_selection* selection, uint32_t* positions, uint64_t capacity);

/* Returns the number of elements that are needed when `capacity` is too small. */
// clang-format off
uint64_t query_h_example(pqc_sequence* sequence, const pqc_query* query,
                         const pqc_selection* selection, uint32_t* positions, uint64_t capacity) {
  // [example]
  pqc_positions best = PQC_INIT(pqc_positions);
  best.positions = positions;  // room for [kv_heads, k]
  best.capacity = capacity;
  pqc_status status = pqc_topk(sequence, query, selection, &best);
  if (status == PQC_OUT_OF_RANGE) {
    // best.kv_heads * best.count elements are needed.
  }
  // [/example]
  return status == PQC_OUT_OF_RANGE ? (uint64_t)best.kv_heads * best.count : 0;
}
// clang-format on
