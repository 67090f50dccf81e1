/* The example of gpu.h, compiled as C99. It is not run, because it needs a sidecar and a GPU. */
#include "pqcached/gpu.h"

/* query, rows: tensors with device PQC_CUDA; output, lse: device memory; stream: a cudaStream_t. */
pqc_status gpu_h_example(pqc_cache* cache, pqc_sequence* sequence, uint64_t position,
                         const pqc_tensor* query, const pqc_layer_rows* rows, float* output,
                         float* lse, void* stream);

// clang-format off
pqc_status gpu_h_example(pqc_cache* cache, pqc_sequence* sequence, uint64_t position,
                         const pqc_tensor* query, const pqc_layer_rows* rows, float* output,
                         float* lse, void* stream) {
  // [example]
  pqc_gpu_options gpu_options = PQC_INIT(pqc_gpu_options);
  gpu_options.token_capacity = 131072;
  pqc_gpu* gpu = NULL;
  pqc_status status = pqc_gpu_open(cache, &gpu_options, &gpu);
  if (status != PQC_OK) return status;  // no device: pqc_step_begin and host memory

  pqc_step_item item = PQC_INIT(pqc_step_item);
  item.sequence = sequence;
  item.query_position = position;
  pqc_selection selection = PQC_INIT(pqc_selection);
  selection.sink_tokens = 16;
  selection.window_tokens = 64;
  selection.ratio = 0.1;
  pqc_step_options options = PQC_INIT(pqc_step_options);
  options.selection = &selection;
  pqc_step* step = NULL;
  status = pqc_gpu_step_begin(gpu, &item, 1, &options, stream, &step);

  pqc_step_attention attention = PQC_INIT(pqc_step_attention);
  attention.output = output;  // [query_heads, value_dim]
  attention.output_capacity = 32 * 128;
  attention.lse = lse;  // [query_heads]
  attention.lse_capacity = 32;
  if (status == PQC_OK) status = pqc_step_attend(step, 0, query, NULL, &attention);
  if (status == PQC_OK) {
    status = pqc_step_end(step, rows, 1, NULL);
  } else {
    pqc_step_abandon(step);
  }
  pqc_gpu_close(gpu);  // engines keep it
  // [/example]
  return status;
}
