/* The interface of an index that the sidecar loads from a shared library.
 *
 * A library in the directory of the configuration key `index_plugins`, whose name ends with ".so",
 * exports one function, pqcached_index_plugin, which returns the description below. The index then
 * is a type like pq: it is listed by ListIndexTypes, named by its name and parameters, built, kept
 * up to date, recovered, and searched. kvstore/plugins/example/ has a complete one to copy.
 *
 * Keys and queries are fp32 rows without gaps, [count, key_dim], of one kv head. The sidecar
 * converts them, stores codebooks and codes, selects the best tokens by the logits of `score`, and
 * attends to their exact rows. A codebook holds what `train` makes of many keys, codes are made of
 * one key each.
 *
 * Functions are called by several threads at once, and must depend on their arguments only. They
 * run in the sidecar's worker as trusted code. When they crash, or throw, the worker starts again;
 * after three crashes in a minute the index is switched off until its library is replaced. A call
 * that does not return keeps its thread, and a build its call, until the worker ends.
 */
#ifndef PQCACHED_INDEX_PLUGIN_H_
#define PQCACHED_INDEX_PLUGIN_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this interface. The sidecar refuses libraries of later versions at its start, by their
 * names, and reads the description of an earlier one up to the fields of that version.
 *   1  first
 *   2  needs_queries, train_on_queries */
#define PQCACHED_INDEX_PLUGIN_VERSION 2u

#define PQCACHED_INDEX_PLUGIN_PARAMETERS 4u           /* most parameters */
#define PQCACHED_INDEX_PLUGIN_VALUE 65535u            /* largest value of a parameter */
#define PQCACHED_INDEX_PLUGIN_CODE_BYTES 1024u        /* most bytes of the codes of one token */
#define PQCACHED_INDEX_PLUGIN_CODEBOOK_BYTES 4194304u /* most bytes of a codebook of one kv head */
#define PQCACHED_INDEX_PLUGIN_TRAIN_KEYS 32768u       /* most keys of one training */
#define PQCACHED_INDEX_PLUGIN_TRAIN_QUERIES 32768u    /* most queries of one training */

/* A parameter of the index: a whole number in [least, most]. */
typedef struct pqcached_index_plugin_parameter {
  const char* name; /* [a-z0-9_]{1,32} */
  const char* text; /* the meaning, for people */
  uint32_t least;
  uint32_t most;
  uint32_t default_value;
} pqcached_index_plugin_parameter;

/* The use that an index is made for. */
typedef struct pqcached_index_plugin_shape {
  uint32_t key_dim;       /* a multiple of 8 in [32, 256] */
  const uint32_t* values; /* of the parameters, in their order */
} pqcached_index_plugin_shape;

typedef struct pqcached_index_plugin_description {
  uint32_t version;      /* PQCACHED_INDEX_PLUGIN_VERSION */
  uint32_t data_version; /* of codebooks and codes: those of another version are not read */
  const char* name;      /* [a-z0-9_]{1,12} */
  const char* text;      /* the method, for people */
  const pqcached_index_plugin_parameter* parameters;
  uint32_t parameter_count;

  /* Returns why the index does not suit the shape, or NULL. May be NULL itself: it suits all. */
  const char* (*check)(const pqcached_index_plugin_shape* shape);
  /* Returns the bytes of the codebook of one kv head; 0: none. */
  size_t (*codebook_bytes)(const pqcached_index_plugin_shape* shape);
  /* Returns the bytes of the codes of one token; at least 1. */
  size_t (*code_bytes)(const pqcached_index_plugin_shape* shape);
  /* Fills a codebook, whose bytes are undefined before. There may be no keys. The same keys and
   * seed must give the same codebook. */
  void (*train)(const pqcached_index_plugin_shape* shape, const float* keys, uint32_t count,
                uint64_t seed, void* codebook);
  /* Writes the codes of each key, [count, code_bytes]. */
  void (*encode)(const pqcached_index_plugin_shape* shape, const void* codebook, const float* keys,
                 uint32_t count, uint8_t* codes);
  /* Writes an estimate of the inner product of each query with each of the tokens whose codes are
   * given: query i and token j at logits[i * stride + j]. The softmax's scale is applied later. */
  void (*score)(const pqcached_index_plugin_shape* shape, const void* codebook,
                const float* queries, uint32_t query_count, const uint8_t* codes, uint32_t count,
                float* logits, size_t stride);

  /* Returns 1 when the index is trained on queries of the model, by train_on_queries, else 0. May
   * be NULL: no index is. Since version 2. */
  uint32_t (*needs_queries)(const pqcached_index_plugin_shape* shape);
  /* Is called in place of train, with queries of the prompt's tokens, [query_count, key_dim], of
   * the query heads that attend to the keys. Builds without queries are refused; only when an index
   * is trained again after a restart of the worker, query_count may be 0. NULL: none. Since
   * version 2. */
  void (*train_on_queries)(const pqcached_index_plugin_shape* shape, const float* keys,
                           uint32_t count, const float* queries, uint32_t query_count,
                           uint64_t seed, void* codebook);
} pqcached_index_plugin_description;

/* The function that a library exports. The description stays valid. */
const pqcached_index_plugin_description* pqcached_index_plugin(void);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_INDEX_PLUGIN_H_ */
