/* Stands for the parts of an engine that chat.c does not show: a model of two layers, its tokens,
 * and the end of the program on an error. */
#ifndef PQCACHED_CLIENT_EXAMPLES_C_CHAT_MODEL_H_
#define PQCACHED_CLIENT_EXAMPLES_C_CHAT_MODEL_H_

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "pqcached/client.h"

enum { kLayers = 2, kHeads = 2, kQueryHeads = 4, kDim = 64 };
/* The model's config.json; an engine reads the file that comes with the weights. */
static const char kConfig[] =
    "{\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
    " \"head_dim\": 64, \"dtype\": \"float16\"}";

/* Returns the rows [count, heads, kDim] of these tokens in a layer; a model projects them. The rows
 * stay until the next call for as many heads. */
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

#endif /* PQCACHED_CLIENT_EXAMPLES_C_CHAT_MODEL_H_ */
