/* The example of reorder.h, compiled as C99. */
#include "pqcached/client.h"

pqc_status reorder_h_example(pqc_sequence** beams, const uint32_t* parents, uint32_t n);

// clang-format off
// [example]
static pqc_status reorder_beams(pqc_sequence** beams, const uint32_t* parents, uint32_t n) {
  return pqc_sequences_reorder(beams, n, parents, n, beams);
}
// [/example]
// clang-format on

pqc_status reorder_h_example(pqc_sequence** beams, const uint32_t* parents, uint32_t n) {
  return reorder_beams(beams, parents, n);
}
