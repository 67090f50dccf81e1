/* pqcached client: names of tokens, by which later sequences share rows. Included by client.h.
 *
 * Example, which appends a generated token with its id, for the next turn of the conversation:
 *
 *     pqc_row_options options = PQC_INIT(pqc_row_options);
 *     options.names_begin = position;
 *     options.token_ids = &token_id;
 *     options.token_id_count = 1;
 *     status = pqc_append_with(sequence, position, layers, layer_count, &options, NULL);
 */
/* Before the guard: client.h includes this header at its end, with the types that it needs. */
#include "pqcached/client.h"

#ifndef PQCACHED_NAMES_H_
#define PQCACHED_NAMES_H_

#ifdef __cplusplus
extern "C" {
#endif

/* Options of calls that write rows: the names of tokens, which are their ids or content keys.
 *
 * Later sequences whose prompts begin with the same names share the rows that are stored under
 * them (pqc_sequence_create_with), in steps of 128 tokens. With the ids of the generated tokens,
 * the second turn of a conversation shares all of the first.
 *
 * The names of a sequence are a run from position 0 on. Those of a call begin anywhere in it or at
 * its end, and continue it; positions that have names must get the same ones. Tokens may be named
 * with their rows, after them, or before (at most 2^22 tokens ahead). All names of a sequence are
 * of one kind. A call that removes tokens (pqc_sequence_truncate, a step's roll-back) removes their
 * names, and a content key with the first of its 128 tokens; a fork has the names of the tokens
 * that it shares. In a rank group every rank names the tokens of its own sequence.
 *
 * Errors that name `options`: PQC_INVALID_ARGUMENT, for a gap behind the names so far, other names
 * at the same positions, the other kind of names, or too many of them. The call then stores no
 * rows. */
typedef struct pqc_row_options {
  size_t struct_size;
  uint64_t names_begin;      /* position of the first named token; a multiple of 128 for
                                content_keys */
  const uint32_t* token_ids; /* [token_id_count], at most 2^22 */
  uint64_t token_id_count;
  const pqc_content_key* content_keys; /* [content_key_count], at most 2^15; one for each 128
                                          tokens */
  uint64_t content_key_count;
} pqc_row_options;

/* Names tokens without storing rows.
 *
 * Errors: PQC_INVALID_ARGUMENT  options (pqc_row_options)
 *         PQC_ABORTED           another call changes the sequence, or a step has it: repeat */
PQC_API pqc_status pqc_sequence_name_tokens(pqc_sequence* sequence, const pqc_row_options* options);

/* pqc_match_prefix for a prompt with the token_ids or content_keys, and the extra_key, of `prompt`;
 * its other fields must be 0.
 *
 * Errors: PQC_INVALID_ARGUMENT  a field of `prompt` */
PQC_API pqc_status pqc_match_prefix_with(pqc_cache* cache, const pqc_sequence_options* prompt,
                                         uint64_t* token_count);

/* pqc_ingest with options (NULL = none). Names need to be given with one layer only. Errors: those
 * of pqc_ingest and of pqc_row_options. */
PQC_API pqc_status pqc_ingest_with(pqc_sequence* sequence, uint32_t layer, uint64_t first_position,
                                   const pqc_tensor* keys, const pqc_tensor* values,
                                   const pqc_row_options* options);

/* pqc_append with options (NULL = none). Errors: those of pqc_append and of pqc_row_options. */
PQC_API pqc_status pqc_append_with(pqc_sequence* sequence, uint64_t first_position,
                                   const pqc_layer_rows* layers, uint32_t layer_count,
                                   const pqc_row_options* options, uint64_t* token_count);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_NAMES_H_ */
