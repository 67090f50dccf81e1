/* The smallest engine in C: stores one layer's keys and values in a running pqcached and attends to
 * a tenth of them. Usage: attend ENDPOINT, for example unix:///run/pqcached/pqcached.sock. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "pqcached/client.h"

enum { kTokens = 4096, kSink = 16, kWindow = 64, kEnds = kSink + kWindow };
enum { kHeads = 2, kQueryHeads = 8, kDim = 64, kRow = kHeads * kDim, kOut = kQueryHeads * kDim };

static float k[kTokens * kRow], v[kTokens * kRow], q[kOut];
static float output[kOut], lse[kQueryHeads], own[kOut], own_lse[kQueryHeads];
static uint32_t ends[kHeads][kEnds];

static void Must(pqc_status status) { /* Ends the program on an error. */
  if (status == PQC_OK) return;
  fprintf(stderr, "%s: %s\n", pqc_status_name(status), pqc_last_error());
  exit(1);
}

/* clang-format off */
int main(int argc, char** argv) {
  for (uint64_t i = 0; i < kTokens * kRow; ++i) {
    const float number = (float)(i * i % 9973);
    k[i] = sinf(number), v[i] = sinf(0.3f * number);
    if (i < kOut) q[i] = sinf(0.7f * number);
  }
  pqc_client* client;
  pqc_client_options options = {.struct_size = sizeof options, .endpoint = argv[argc - 1]};
  Must(pqc_client_open(&options, &client));

  const uint32_t layer = 0;
  pqc_layer_group group = {.struct_size = sizeof group, .kind = PQC_LAYERS_SELECTED,
      .layers = &layer, .layer_count = 1, .kv_heads = kHeads, .query_heads = kQueryHeads,
      .key_dim = kDim, .value_dim = kDim, .dtype = PQC_F16};
  pqc_cache_spec spec = {.struct_size = sizeof spec, .name = "demo", .model_fingerprint = "demo-1",
      .groups = &group, .group_count = 1, .capacity_bytes = 64 << 20};
  pqc_cache* cache;
  Must(pqc_cache_open(client, &spec, &cache));

  const uint64_t shape[] = {kTokens, kHeads, kDim}, query_shape[] = {kQueryHeads, kDim};
  const pqc_tensor keys = {.ptr = k, .dtype = PQC_F32, .ndim = 3, .shape = shape};
  const pqc_tensor values = {.ptr = v, .dtype = PQC_F32, .ndim = 3, .shape = shape};
  pqc_sequence* sequence;
  Must(pqc_sequence_create(cache, &sequence));
  Must(pqc_ingest(sequence, layer, 0, &keys, &values));
  pqc_build_options build = {.struct_size = sizeof build, .sink_tokens = kSink};
  Must(pqc_build_index(sequence, &build));

  pqc_query query = {.struct_size = sizeof query, .layer = layer, .query_position = kTokens - 1,
      .queries = {.ptr = q, .dtype = PQC_F32, .ndim = 2, .shape = query_shape}};
  pqc_selection selection = {.struct_size = sizeof selection, .sink_tokens = kSink,
      .window_tokens = kWindow, .budget = PQC_BUDGET_RATIO, .ratio = 0.1};
  pqc_attention attention = {.struct_size = sizeof attention, .output = output,
      .output_capacity = kOut, .lse = lse, .lse_capacity = kQueryHeads};
  Must(pqc_attend(sequence, &query, &selection, &attention));
  const uint32_t selected = attention.selected.count;

  /* An engine attends to its own sink and window; this one keeps no rows, and requests them. */
  for (uint32_t i = 0; i < kHeads * kEnds; ++i)
    ends[i / kEnds][i % kEnds] = i % kEnds < kSink ? i % kEnds : kTokens - kEnds + i % kEnds;
  attention.output = own, attention.lse = own_lse;
  Must(pqc_attend_positions(sequence, &query, &ends[0][0], kEnds, &attention));
  Must(pqc_merge(kQueryHeads, kDim, output, lse, own, own_lse));
  printf("attended %d sink + %d window + %u selected of %d tokens; output[0] = %.4f\n", kSink,
         kWindow, selected, kTokens, output[0]);

  Must(pqc_sequence_drop(sequence));
  pqc_cache_close(cache);
  pqc_client_close(client);
  return 0;
}
