/* Two turns of a conversation with complete attention. Usage: chat ENDPOINT. The second turn
 * computes only the tokens that the first has not stored. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "pqcached/client.h"

enum { kLayers = 2, kHeads = 2, kQueryHeads = 4, kDim = 64 };

/* Computes rows [count, heads, kDim] of these tokens in a layer. */
static inline void Project(const uint32_t* tokens, uint64_t count, uint32_t layer, uint32_t heads,
                           float* rows) {
  for (uint64_t i = 0; i < count; ++i) {
    for (uint32_t column = 0; column < heads * kDim; ++column) {
      *rows++ = (float)sin((double)((tokens[i] * 31 + column * 7 + layer) % 997));
    }
  }
}

/* Returns token `i` of a text that a user writes. */
static inline uint32_t TextToken(uint32_t i) { return i * i % 997; }

/* Returns the token that follows; a model samples it from its logits. */
static inline uint32_t NextToken(uint32_t token) { return (token * 5 + 1) % 997; }

/* Ends the program on an error: an example has no caller to report it to. */
static inline void Must(pqc_status status) {
  if (status == PQC_OK) return;
  fprintf(stderr, "%s: %s\n", pqc_status_name(status), pqc_last_error());
  exit(1);
}

/* clang-format off */
/* [example] */
static float r[1024 * kHeads * kDim], q[kQueryHeads * kDim], attention[kQueryHeads * kDim];

/* Prefills what is not stored of a prompt, and appends `length` tokens. Returns the new number. */
static uint32_t Answer(pqc_cache* cache, uint32_t* tokens, uint32_t count, uint32_t length) {
  pqc_sequence* sequence; pqc_decoder* decoder; uint64_t stored;
  pqc_sequence_options options = {.struct_size = sizeof options, .token_ids = tokens,
      .token_id_count = count, .has_live_index = 1, .sink_tokens = 16};
  Must(pqc_sequence_create_with(cache, &options, &sequence, &stored));
  if (stored == count) Must(pqc_sequence_truncate(sequence, --stored));
  pqc_selection selection = {.struct_size = sizeof selection, .sink_tokens = 16,
      .window_tokens = 64, .budget = PQC_BUDGET_RATIO, .ratio = 0.1};
  Must(pqc_decoder_open(sequence, &selection, &decoder));
  const uint64_t rows[] = {count - 1 - stored, kHeads, kDim}, heads[] = {kQueryHeads, kDim};
  const pqc_tensor prefill = {.ptr = r, .dtype = PQC_F32, .ndim = 3, .shape = rows};
  const pqc_tensor query = {.ptr = q, .dtype = PQC_F32, .ndim = 2, .shape = heads};
  const pqc_tensor row = {.ptr = r, .dtype = PQC_F32, .ndim = 2, .shape = rows + 1};
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    Project(tokens + stored, rows[0], layer, kHeads, r);
    Must(pqc_decoder_prefill(decoder, layer, &prefill, &prefill));
  }
  uint32_t last = count - 1; /* the token that is decoded */
  for (; last + 1 < count + length; ++last, tokens[last] = NextToken(tokens[last - 1])) {
    pqc_row_options name = {.struct_size = sizeof name, .names_begin = last,
        .token_ids = tokens + last, .token_id_count = 1};
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      Project(tokens + last, 1, layer, kQueryHeads, q);
      Project(tokens + last, 1, layer, kHeads, r);
      Must(pqc_decoder_decode_with(decoder, layer, &query, &row, &row, &name, attention, kQueryHeads * kDim));
    }
  }
  printf("%d of %u tokens were stored; attention[0] = %.3f\n", (int)stored, count, attention[0]);
  Must(pqc_sequence_flush(sequence)); /* else the drop discards rows that are still being sent */
  pqc_decoder_close(decoder);
  Must(pqc_sequence_drop(sequence));
  return last + 1;
}

int main(int argc, char** argv) {
  static uint32_t tokens[1024], layers[kLayers] = {0, 1};
  pqc_client* client; pqc_cache* cache;
  pqc_client_options options = {.struct_size = sizeof options, .endpoint = argv[argc - 1]};
  Must(pqc_client_open(&options, &client));
  pqc_layer_group group = {.struct_size = sizeof group, .kind = PQC_LAYERS_SELECTED, .layers = layers,
      .layer_count = kLayers, .kv_heads = kHeads, .query_heads = kQueryHeads,
      .key_dim = kDim, .value_dim = kDim, .dtype = PQC_F16};
  pqc_cache_spec spec = {.struct_size = sizeof spec, .name = "chat", .model_fingerprint = "chat-1",
      .groups = &group, .group_count = 1, .capacity_bytes = 64 << 20};
  Must(pqc_cache_open(client, &spec, &cache));
  for (uint32_t turn = 0, count = 0; turn < 2; ++turn) {
    for (uint32_t i = 0; i < (turn == 0 ? 600u : 100u); ++i) tokens[count++] = TextToken(i);
    count = Answer(cache, tokens, count, 60);
  }
  pqc_cache_close(cache);
  pqc_client_close(client);
  return 0;
}
/* [example] */
