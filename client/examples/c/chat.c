/* Two turns of a conversation with complete attention. Usage: chat ENDPOINT. The second turn
 * computes only the tokens that the first has not stored. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "pqcached/client.h"

enum { kLayers = 2, kHeads = 2, kQueryHeads = 4, kDim = 64 };
/* The model's config.json; an engine reads the file that comes with the weights. */
static const char kConfig[] =
    "{\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
    " \"head_dim\": 64, \"dtype\": \"float16\"}";

/* Stands for a model: returns rows [count, heads, kDim] of these tokens in a layer. The rows stay
 * until the next call for as many heads. */
static inline pqc_tensor Project(const uint32_t* tokens, uint64_t count, uint32_t layer,
                                 uint32_t heads) {
  static float memory[kQueryHeads + 1][1024 * kHeads * kDim];
  static uint64_t shapes[kQueryHeads + 1][3];
  float* row = memory[heads];
  uint64_t* const shape = shapes[heads];
  shape[0] = count, shape[1] = heads, shape[2] = kDim;
  for (uint64_t i = 0; i < count; ++i) {
    for (uint32_t column = 0; column < heads * kDim; ++column) {
      *row++ = (float)sin((double)((tokens[i] * 31 + column * 7 + layer) % 997));
    }
  }
  const pqc_tensor rows = {.ptr = memory[heads], .dtype = PQC_F32, .ndim = 3, .shape = shape};
  return rows;
}

/* Returns the row [heads, kDim] of one token. */
static inline pqc_tensor RowOf(uint32_t token, uint32_t layer, uint32_t heads) {
  pqc_tensor row = Project(&token, 1, layer, heads);
  row.ndim = 2;
  ++row.shape;
  return row;
}

/* Appends `length` tokens that a user has written to `count` tokens. Returns the new number. */
static inline uint32_t AddText(uint32_t* tokens, uint32_t count, uint32_t length) {
  for (uint32_t i = 0; i < length; ++i) tokens[count++] = i * i % 997;
  return count;
}

/* Returns the token that follows; a model samples it from its logits. */
static inline uint32_t NextToken(uint32_t token) { return (token * 5 + 1) % 997; }

/* Ends the program on an error: an example has no caller to report it to. */
static inline void Must(pqc_status status) {
  if (status == PQC_OK) return;
  fprintf(stderr, "%s: %s\n", pqc_status_name(status), pqc_last_error());
  exit(1);
}

/* clang-format off */
/* Prefills what is not stored of a prompt, and appends `length` tokens. Returns the new number. */
/* [example] */
static uint32_t Answer(pqc_cache* cache, uint32_t* tokens, uint32_t count, uint32_t length) {
  pqc_sequence* sequence; pqc_decoder* decoder; uint64_t stored; float out[kQueryHeads * kDim];
  pqc_sequence_options options = {sizeof options, .token_ids = tokens, .token_id_count = count,
      .has_live_index = 1, .sink_tokens = 16};
  Must(pqc_sequence_create_with(cache, &options, &sequence, &stored));
  if (stored == count) Must(pqc_sequence_truncate(sequence, --stored));
  Must(pqc_decoder_open(sequence, &(pqc_selection){sizeof(pqc_selection), .sink_tokens = 16,
      .window_tokens = 64, .budget = PQC_BUDGET_RATIO, .ratio = 0.1}, &decoder));
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const pqc_tensor rows = Project(tokens + stored, count - 1 - stored, layer, kHeads);
    Must(pqc_decoder_prefill(decoder, layer, &rows, &rows));
  }
  for (uint32_t* last = tokens + count - 1; last + 1 < tokens + count + length; ++last) {
    pqc_row_options name = {sizeof name, .names_begin = (uint64_t)(last - tokens),
        .token_ids = last, .token_id_count = 1};
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      pqc_tensor query = RowOf(*last, layer, kQueryHeads), row = RowOf(*last, layer, kHeads);
      Must(pqc_decoder_decode_with(decoder, layer, &query, &row, &row, &name, out, sizeof out / 4));
    }
    last[1] = NextToken(*last);
  }
  printf("%d of %u tokens were stored; attention[0] = %.3f\n", (int)stored, count, out[0]);
  Must(pqc_sequence_flush(sequence)); /* else the drop discards rows that are still being sent */
  pqc_decoder_close(decoder); Must(pqc_sequence_drop(sequence));
  return count + length;
}

int main(int argc, char** argv) {
  static uint32_t tokens[1024], count; pqc_client* client; pqc_model* model; pqc_cache* cache;
  pqc_client_options options = {sizeof options, .endpoint = argv[argc - 1]};
  Must(pqc_client_open(&options, &client));
  pqc_cache_spec spec = {sizeof spec, .name = "chat", .model_fingerprint = "chat-1"};
  Must(pqc_model_read(kConfig, NULL, &model));
  spec.groups = pqc_model_groups(model, &spec.group_count);
  Must(pqc_cache_open(client, &spec, &cache)); pqc_model_close(model);
  for (uint32_t turn = 0; turn < 2; ++turn)
    count = Answer(cache, tokens, AddText(tokens, count, turn == 0 ? 600 : 100), 60);
  pqc_cache_close(cache); pqc_client_close(client);
}
/* [example] */
