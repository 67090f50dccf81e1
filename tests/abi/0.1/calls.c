/* A program of version 0.1: built from the headers in include/, it calls every function that 0.1
 * had, and runs with the client library of today. It checks what comes back, not only the statuses.
 * Usage: calls ENDPOINT local|remote */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pqcached/client.h"
#include "pqcached/gpu.h"

enum { kTokens = 1024, kHeads = 2, kQueryHeads = 4, kDim = 64, kRow = kHeads * kDim };
enum { kOut = kQueryHeads * kDim, kSink = 16, kWindow = 64, kSelected = 100, kLayers = 2 };

static float k[kTokens * kRow], v[kTokens * kRow], q[kOut], rows[kHeads * kTokens * kDim];
static float output[kOut], lse[kQueryHeads], other[kOut], other_lse[kQueryHeads];
static uint32_t positions[kHeads * kTokens], ids[kTokens];
static uint32_t progress_calls;

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (condition) break;                                                             \
    fprintf(stderr, "line %d: %s: %s (%s)\n", __LINE__, #condition, pqc_last_error(), \
            pqc_last_error_field());                                                  \
    exit(1);                                                                          \
  } while (0)
#define OK(call) CHECK((call) == PQC_OK)

static const uint64_t query_shape[] = {kQueryHeads, kDim};

/* `count` tokens of K or V from `first` on. `shape` is the caller's: [tokens, heads, dim]. */
static pqc_tensor Rows(float* all, uint64_t first, uint64_t count, uint64_t* shape) {
  pqc_tensor tensor = PQC_INIT(pqc_tensor);
  shape[0] = count, shape[1] = kHeads, shape[2] = kDim;
  tensor.ptr = all + first * kRow;
  tensor.dtype = PQC_F32;
  tensor.ndim = 3;
  tensor.shape = shape;
  return tensor;
}

static pqc_tensor Queries(void) {
  pqc_tensor tensor = PQC_INIT(pqc_tensor);
  tensor.ptr = q;
  tensor.dtype = PQC_F32;
  tensor.ndim = 2;
  tensor.shape = query_shape;
  return tensor;
}

static pqc_query QueryAt(uint64_t position) {
  pqc_query query = PQC_INIT(pqc_query);
  query.query_position = position;
  query.queries = Queries();
  return query;
}

static pqc_selection Select(void) {
  pqc_selection selection = PQC_INIT(pqc_selection);
  selection.sink_tokens = kSink;
  selection.window_tokens = kWindow;
  selection.budget = PQC_BUDGET_COUNT;
  selection.token_count = kSink + kWindow + kSelected;
  return selection;
}

static void IngestAll(pqc_sequence* sequence, uint64_t first, uint64_t count) {
  uint64_t shape[3];
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const pqc_tensor keys = Rows(k, first, count, shape), values = Rows(v, first, count, shape);
    OK(pqc_ingest(sequence, layer, first, &keys, &values));
  }
}

/* Rows of one token for both layers. */
static void LayerRows(uint64_t first, uint64_t* shape, pqc_layer_rows* layers) {
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    layers[layer].struct_size = sizeof layers[layer];
    layers[layer].layer = layer;
    layers[layer].keys = Rows(k, first, 1, shape);
    layers[layer].values = Rows(v, first, 1, shape);
  }
}

static int OnProgress(void* context, const pqc_build_progress* progress) {
  CHECK(context == &progress_calls && progress->struct_size >= sizeof *progress);
  CHECK(progress->layer_count == kLayers && progress->layers_done <= kLayers);
  ++progress_calls;
  return 1;
}

static void RunOnCaller(void* hook, uint32_t count, void (*body)(void*, uint32_t), void* context) {
  ++*(uint32_t*)hook;
  for (uint32_t i = 0; i < count; ++i) body(context, i);
}

static pqc_cache* OpenCache(pqc_client* client) {
  static const uint32_t numbers[kLayers] = {0, 1};
  pqc_layer_group group = PQC_INIT(pqc_layer_group);
  pqc_cache_spec spec = PQC_INIT(pqc_cache_spec);
  pqc_cache* cache = NULL;
  group.kind = PQC_LAYERS_SELECTED;
  group.layers = numbers;
  group.layer_count = kLayers;
  group.kv_heads = kHeads;
  group.query_heads = kQueryHeads;
  group.key_dim = group.value_dim = kDim;
  group.dtype = PQC_F32;
  spec.name = "abi-0.1";
  spec.model_fingerprint = "abi-0.1";
  spec.groups = &group;
  spec.group_count = 1;
  spec.capacity_bytes = 64 << 20;
  spec.default_index.kind = PQC_INDEX_PQ;
  spec.default_index.subspaces = 2;
  spec.default_index.bits = 6;
  OK(pqc_cache_open(client, &spec, &cache));
  return cache;
}

static void Admission(pqc_cache* cache) {
  pqc_admission admission = PQC_INIT(pqc_admission);
  OK(pqc_admit(cache, kTokens, 16, &admission));
  CHECK(admission.verdict == PQC_FITS_NOW && admission.needed_bytes > 0);
}

static void Reads(pqc_sequence* sequence) {
  const pqc_query query = QueryAt(kTokens - 1);
  const pqc_selection selection = Select();
  const pqc_token_range range = {10, 20};
  pqc_positions best = PQC_INIT(pqc_positions);
  pqc_attention attention = PQC_INIT(pqc_attention);
  float max[kQueryHeads], sum[kQueryHeads], logits[kQueryHeads * 10];
  best.positions = positions;
  best.capacity = kHeads * kTokens;
  OK(pqc_topk(sequence, &query, &selection, &best));
  CHECK(best.count == kSelected && best.kv_heads == kHeads && best.window_tokens == kWindow);
  for (uint32_t i = 0; i < kSelected; ++i) {
    CHECK(positions[i] >= kSink && positions[i] < kTokens - kWindow);
  }

  OK(pqc_fetch_blocks(sequence, 1, range, PQC_KEY, rows, sizeof rows));
  for (uint32_t d = 0; d < kDim; ++d) CHECK(rows[d] == k[10 * kRow + d]);
  OK(pqc_fetch_tokens(sequence, 1, positions, kSelected, PQC_VALUE, rows, sizeof rows));
  for (uint32_t d = 0; d < kDim; ++d) CHECK(rows[d] == v[positions[0] * kRow + d]);

  OK(pqc_score(sequence, &query, NULL, range, logits, kQueryHeads * 10, max, sum));
  for (uint32_t i = 0; i < 10; ++i) CHECK(logits[i] <= max[0] && sum[0] >= 1);

  attention.output = output;
  attention.output_capacity = kOut;
  attention.lse = lse;
  attention.lse_capacity = kQueryHeads;
  OK(pqc_attend(sequence, &query, &selection, &attention));
  CHECK(attention.selected.count == kSelected);
  attention.output = other;
  attention.lse = other_lse;
  OK(pqc_attend_positions(sequence, &query, positions, kSelected, &attention));
  for (uint32_t i = 0; i < kOut; ++i) CHECK(fabsf(output[i] - other[i]) < 1e-4f);
  OK(pqc_merge(kQueryHeads, kDim, output, lse, other, other_lse));
  CHECK(fabsf(lse[0] - other_lse[0] - logf(2)) < 1e-4f);
}

static void Steps(pqc_client* client, pqc_sequence* sequence, uint64_t position) {
  const pqc_selection selection = Select();
  pqc_step_item item = PQC_INIT(pqc_step_item);
  pqc_step_options options = PQC_INIT(pqc_step_options);
  pqc_step_positions best = PQC_INIT(pqc_step_positions);
  pqc_step_attention attention = PQC_INIT(pqc_step_attention);
  const pqc_tensor queries = Queries();
  pqc_layer_rows layers[kLayers];
  uint64_t offsets[1], shape[3];
  uint32_t counts[1], attended[1];
  pqc_step* step = NULL;
  item.sequence = sequence;
  item.query_position = position;
  options.selection = &selection;
  OK(pqc_step_begin(client, &item, 1, &options, &step));
  best.positions = positions;
  best.capacity = kHeads * kTokens;
  best.offsets = offsets;
  best.counts = counts;
  OK(pqc_step_topk(step, 0, &queries, NULL, &best));
  CHECK(counts[0] == kSelected && best.count == kHeads * kSelected && offsets[0] == 0);
  attention.output = output;
  attention.output_capacity = kOut;
  attention.lse = lse;
  attention.lse_capacity = kQueryHeads;
  attention.counts = attended;
  OK(pqc_step_attend(step, 0, &queries, NULL, &attention));
  CHECK(attended[0] == kSelected);
  attention.output = other;
  attention.lse = other_lse;
  OK(pqc_step_attend_begin(step, 0, &queries, NULL, &attention));
  OK(pqc_step_attend_wait(step));
  CHECK(memcmp(output, other, sizeof output) == 0 && memcmp(lse, other_lse, sizeof lse) == 0);
  LayerRows(position, shape, layers);
  OK(pqc_step_end(step, layers, kLayers, NULL));
  OK(pqc_sequence_flush(sequence));
  OK(pqc_step_begin(client, &item, 1, NULL, &step));
  pqc_step_abandon(step);
}

static void Decode(pqc_cache* cache) {
  const pqc_selection selection = Select();
  const pqc_tensor query = Queries();
  static const uint64_t one[] = {kHeads, kDim};
  pqc_sequence* sequence = NULL;
  pqc_decoder* decoder = NULL;
  uint64_t shape[3];
  OK(pqc_sequence_create(cache, &sequence));
  OK(pqc_decoder_open(sequence, &selection, &decoder));
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const pqc_tensor keys = Rows(k, 0, 512, shape), values = Rows(v, 0, 512, shape);
    OK(pqc_decoder_prefill(decoder, layer, &keys, &values));
  }
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    pqc_tensor key = Rows(k, 512, 1, shape), value = Rows(v, 512, 1, shape);
    key.ndim = value.ndim = 2;
    key.shape = value.shape = one;
    memset(output, 0, sizeof output);
    OK(pqc_decoder_decode(decoder, layer, &query, &key, &value, output, kOut));
    CHECK(output[0] != 0);
  }
  pqc_decoder_close(decoder);
  OK(pqc_sequence_drop(sequence));
}

static void Gpu(pqc_cache* cache) { /* On a machine without a device, or with one. */
  pqc_gpu_options options = PQC_INIT(pqc_gpu_options);
  pqc_gpu_counts counts = PQC_INIT(pqc_gpu_counts);
  pqc_gpu* gpu = NULL;
  options.token_capacity = 4096;
  if (pqc_gpu_open(cache, &options, &gpu) == PQC_OK) OK(pqc_gpu_count(gpu, &counts));
  pqc_gpu_close(gpu);
  CHECK(pqc_gpu_count(NULL, &counts) == PQC_INVALID_ARGUMENT);
  CHECK(pqc_gpu_ingest(NULL, NULL, 0, 0, NULL, NULL, NULL) == PQC_INVALID_ARGUMENT);
  CHECK(pqc_gpu_step_begin(NULL, NULL, 0, NULL, NULL, NULL) == PQC_INVALID_ARGUMENT);
  CHECK(pqc_gpu_step_topk(NULL, 0, NULL, NULL) == PQC_INVALID_ARGUMENT);
}

static void Sequences(pqc_client* client, pqc_cache* cache) {
  pqc_sequence_options options = PQC_INIT(pqc_sequence_options);
  pqc_build_options build = PQC_INIT(pqc_build_options);
  pqc_sequence_info info = PQC_INIT(pqc_sequence_info);
  pqc_sequence *sequence = NULL, *child = NULL, *empty = NULL;
  pqc_layer_rows layers[kLayers];
  uint64_t shape[3], count = 99, matched = 99;
  OK(pqc_match_prefix(cache, ids, kTokens, NULL, 0, &matched));
  CHECK(matched == 0);
  options.token_ids = ids;
  options.token_id_count = kTokens;
  OK(pqc_sequence_create_with(cache, &options, &sequence, &count));
  CHECK(count == 0 && pqc_sequence_id(sequence) != 0);
  IngestAll(sequence, 0, kTokens - 1);
  LayerRows(kTokens - 1, shape, layers);
  OK(pqc_append(sequence, kTokens - 1, layers, kLayers, &count));
  CHECK(count == kTokens);
  build.sink_tokens = kSink;
  build.callback = OnProgress;
  build.callback_context = &progress_calls;
  OK(pqc_build_index(sequence, &build));
  CHECK(progress_calls >= kLayers);
  OK(pqc_sequence_describe(sequence, &info));
  CHECK(info.token_count == kTokens && info.index_count == 1 && info.row_bytes > 0);
  OK(pqc_sequence_pin(sequence, 1000));
  Reads(sequence);

  OK(pqc_sequence_fork(sequence, 0, &child));
  OK(pqc_sequence_truncate(child, kTokens - 1));
  Steps(client, child, kTokens - 1);
  OK(pqc_sequence_suspend(child));
  OK(pqc_sequence_resume(child, &count));
  CHECK(count == kTokens);
  OK(pqc_sequence_create(cache, &empty));
  OK(pqc_sequence_drop(empty));
  OK(pqc_sequence_drop(child));
  OK(pqc_sequence_drop(sequence));
}

int main(int argc, char** argv) {
  pqc_client_options options = PQC_INIT(pqc_client_options);
  pqc_client_counts counts = PQC_INIT(pqc_client_counts);
  pqc_client* client = NULL;
  pqc_cache* cache;
  char* answer = NULL;
  uint32_t loops = 0;
  if (argc != 3) return 2;
  for (uint32_t i = 0; i < kTokens * kRow; ++i) {
    k[i] = sinf((float)(i % 9973) * (float)(i % 101));
    v[i] = cosf((float)(i % 9973));
    if (i < kOut) q[i] = sinf(0.7f * (float)i);
    if (i < kTokens) ids[i] = i * 7;
  }
  CHECK(pqc_abi_version() == PQC_ABI_VERSION);
  CHECK(strcmp(pqc_status_name(PQC_DATA_LOSS), "DATA_LOSS") == 0);
  CHECK(pqc_client_open(&options, &client) == PQC_INVALID_ARGUMENT);
  CHECK(strcmp(pqc_last_error_field(), "options.endpoint") == 0);
  CHECK(pqc_last_error()[0] && pqc_last_error_retry_ms() == 0);

  const int is_local = strcmp(argv[2], "local") == 0;
  options.endpoint = argv[1];
  options.path = is_local ? PQC_PATH_ONLY_LOCAL : PQC_PATH_ONLY_REMOTE;
  options.parallel_for = RunOnCaller;
  options.parallel_for_context = &loops;
  OK(pqc_client_open(&options, &client));
  CHECK(pqc_client_path(client) == (is_local ? PQC_PATH_LOCAL : PQC_PATH_REMOTE));
  cache = OpenCache(client);
  Admission(cache);
  Sequences(client, cache);
  Decode(cache);
  Gpu(cache);
  OK(pqc_client_count(client, &counts));
  CHECK(counts.rpcs > 0);
  OK(pqc_admin_json(client, "ListSequences", NULL, &answer));
  CHECK(answer && answer[0] == '{');
  pqc_free(answer);
  pqc_cache_close(cache);
  pqc_client_close(client);
  printf("0.1 called everything, %s\n", argv[2]);
  return 0;
}
