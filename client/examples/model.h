/* What the examples of a conversation share: a stand-in for a model, and the end of a program that
 * fails. */
#ifndef PQCACHED_CLIENT_EXAMPLES_MODEL_H_
#define PQCACHED_CLIENT_EXAMPLES_MODEL_H_

#include <math.h>
#include <stdint.h>
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

#endif /* PQCACHED_CLIENT_EXAMPLES_MODEL_H_ */
