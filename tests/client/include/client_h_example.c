/* The example of client.h, compiled as C99. It is not run, because it needs a sidecar. */
#include "pqcached/client.h"

/* keys, values: [4096, 8, 128]; query, output: [32, 128]; lse: [32]. */
pqc_status client_h_example(float* keys, float* values, float* query, float* output, float* lse);

// clang-format off
pqc_status client_h_example(float* keys, float* values, float* query, float* output, float* lse) {
  // [example]
  pqc_client* client = NULL;
  pqc_cache* cache = NULL;
  pqc_sequence* sequence = NULL;
  pqc_client_options options = PQC_INIT(pqc_client_options);
  options.endpoint = "unix:///run/pqcached/pqcached.sock";
  pqc_status status = pqc_client_open(&options, &client);

  const uint32_t layers[] = {0};
  pqc_layer_group group = PQC_INIT(pqc_layer_group);
  group.kind = PQC_LAYERS_SELECTED;
  group.layers = layers;
  group.layer_count = 1;
  group.kv_heads = 8;
  group.query_heads = 32;  // groups of 4 query heads per kv head
  group.key_dim = group.value_dim = 128;
  group.dtype = PQC_F16;
  pqc_cache_spec spec = PQC_INIT(pqc_cache_spec);
  spec.name = "demo";
  spec.model_fingerprint = "demo-1";
  spec.groups = &group;
  spec.group_count = 1;
  spec.capacity_bytes = 64u << 20;
  if (status == PQC_OK) status = pqc_cache_open(client, &spec, &cache);
  if (status == PQC_OK) status = pqc_sequence_create(cache, &sequence);

  const uint64_t kv_shape[] = {4096, 8, 128};  // [tokens, kv_heads, dim]
  pqc_tensor k = PQC_INIT(pqc_tensor);
  k.ptr = keys;
  k.dtype = PQC_F32;
  k.ndim = 3;
  k.shape = kv_shape;
  pqc_tensor v = k;
  v.ptr = values;
  if (status == PQC_OK) status = pqc_ingest(sequence, 0, 0, &k, &v);

  pqc_build_options build = PQC_INIT(pqc_build_options);
  build.sink_tokens = 16;
  if (status == PQC_OK) status = pqc_build_index(sequence, &build);

  const uint64_t query_shape[] = {32, 128};  // [query_heads, key_dim]
  pqc_query q = PQC_INIT(pqc_query);
  q.query_position = 4095;
  q.queries.ptr = query;
  q.queries.dtype = PQC_F32;
  q.queries.ndim = 2;
  q.queries.shape = query_shape;
  pqc_selection selection = PQC_INIT(pqc_selection);
  selection.sink_tokens = 16;
  selection.window_tokens = 64;
  selection.budget = PQC_BUDGET_RATIO;
  selection.ratio = 0.1;  // 409 of 4096 tokens: 16 sink + 64 window + 329 selected
  pqc_attention attention = PQC_INIT(pqc_attention);
  attention.output = output;
  attention.output_capacity = 32 * 128;
  attention.lse = lse;
  attention.lse_capacity = 32;
  if (status == PQC_OK) status = pqc_attend(sequence, &q, &selection, &attention);
  // The engine attends sink and window itself, and adds its part with pqc_merge.

  pqc_sequence_drop(sequence);
  pqc_cache_close(cache);
  pqc_client_close(client);
  // [/example]
  return status;
}
