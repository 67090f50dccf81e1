/* The example of positions.h, compiled as C99. */
#include "pqcached/client.h"

pqc_status positions_h_example(pqc_step* step, const pqc_tensor* query, const int32_t* selected,
                               float* output, float* lse);

// clang-format off
pqc_status positions_h_example(pqc_step* step, const pqc_tensor* query, const int32_t* selected,
                               float* output, float* lse) {
  pqc_status status = PQC_OK;
  // [example]
  pqc_position_lists lists = PQC_INIT(pqc_position_lists);
  lists.positions = selected;  // [2048]: positions, then -1
  lists.list_count = 1;
  lists.capacity = 2048;
  pqc_step_attention attention = PQC_INIT(pqc_step_attention);
  attention.output = output;  // [query_heads, value_dim]
  attention.output_capacity = 32 * 128;
  attention.lse = lse;  // [query_heads]
  attention.lse_capacity = 32;
  status = pqc_step_attend_positions(step, 0, query, &lists, &attention);
  // [/example]
  return status;
}
// clang-format on
