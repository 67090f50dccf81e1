/* The example of pages.h, compiled as C99. */
#include "pqcached/client.h"

pqc_status pages_h_example(pqc_step* step, const pqc_tensor* query, int32_t* pages);

// clang-format off
pqc_status pages_h_example(pqc_step* step, const pqc_tensor* query, int32_t* pages) {
  pqc_status status = PQC_OK;
  // [example]
  pqc_page_options options = PQC_INIT(pqc_page_options);
  options.page_tokens = 16;
  options.heads = PQC_HEADS_SUM;
  options.flags = PQC_PAGES_WITH_SINK | PQC_PAGES_WITH_WINDOW;
  uint32_t length = 0;
  pqc_step_pages selected = PQC_INIT(pqc_step_pages);
  selected.pages = pages;  // [512]
  selected.capacity = 512;
  selected.lengths = &length;
  status = pqc_step_topk_pages(step, 0, query, NULL, &options, &selected);
  // [/example]
  return status;
}
// clang-format on
