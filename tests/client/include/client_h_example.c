/* The example of client.h, compiled as C99. It is not run, because it needs a sidecar. */
#include "pqcached/client.h"

/* keys, values: [4096, 8, 128]; query, output: [32, 128]; key, value: [8, 128]. */
pqc_status client_h_example(float* keys, float* values, float* query, float* key, float* value,
                            float* output);

// clang-format off
pqc_status client_h_example(float* keys, float* values, float* query, float* key, float* value,
                            float* output) {
  // [example]
  pqc_client* client = NULL;
  pqc_cache* cache = NULL;
  pqc_sequence* sequence = NULL;
  pqc_decoder* decoder = NULL;
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
  if (status == PQC_OK) status = pqc_cache_open(client, &spec, &cache);
  if (status == PQC_OK) status = pqc_sequence_create(cache, &sequence);

  pqc_selection selection = PQC_INIT(pqc_selection);
  selection.sink_tokens = 16;
  selection.window_tokens = 64;
  selection.ratio = 0.1;  // 409 of 4097 tokens: 16 sink + 64 window + 329 selected
  if (status == PQC_OK) status = pqc_decoder_open(sequence, &selection, &decoder);

  const uint64_t kv_shape[] = {4096, 8, 128};  // [tokens, kv_heads, dim]
  pqc_tensor k = PQC_INIT(pqc_tensor);
  k.ptr = keys;
  k.dtype = PQC_F32;
  k.ndim = 3;
  k.shape = kv_shape;
  pqc_tensor v = k;
  v.ptr = values;
  if (status == PQC_OK) status = pqc_decoder_prefill(decoder, 0, &k, &v);

  const uint64_t query_shape[] = {32, 128};  // [query_heads, key_dim]
  pqc_tensor q = PQC_INIT(pqc_tensor);
  q.ptr = query;
  q.dtype = PQC_F32;
  q.ndim = 2;
  q.shape = query_shape;
  k.ptr = key;  // of the next token, at position 4096
  v.ptr = value;
  k.ndim = v.ndim = 2;
  k.shape = v.shape = &kv_shape[1];
  if (status == PQC_OK) status = pqc_decoder_decode(decoder, 0, &q, &k, &v, output, 32 * 128);

  pqc_decoder_close(decoder);
  pqc_sequence_drop(sequence);
  pqc_cache_close(cache);
  pqc_client_close(client);
  // [/example]
  return status;
}
