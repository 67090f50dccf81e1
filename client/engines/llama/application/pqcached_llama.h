/* pqcached for applications that use llama.cpp: a prompt cache that outlives the process, and
 * sequences that are longer than the context (pqc_llama_offload).
 *
 * pqc_llama_save stores the keys and values of a sequence in the sidecar, under the ids of its
 * tokens. pqc_llama_restore loads the longest stored beginning of a prompt into a sequence, so that
 * only the rest has to be decoded: after a restart, in another process, and when only the first
 * tokens of two prompts are equal.
 *
 * The library finds llama.cpp's functions in the process, and needs those of its public llama.h
 * only. It was tested with the llama.cpp of llama-cpp-python 0.3.28 and 0.3.36 (ggml 0.13.1 and
 * 0.25.3). It reads and writes the state that llama_state_seq_get_data and llama_state_seq_set_data
 * have there, and checks every number of it; other formats are PQC_UNIMPLEMENTED.
 *
 * Conventions
 *  1. They are those of pqcached/client.h: structs begin with struct_size, every call returns a
 *     pqc_status with the meaning that pqcached/status.h lists, and no call throws or aborts.
 *  2. pqc_llama_last_error describes the calling thread's last failure of this library, in place of
 *     pqc_last_error.
 *  3. No call is needed for the application to go on: after every failure it decodes the prompt
 *     itself. The sidecar may be absent, may start later, and may restart: each call connects
 *     again.
 *  4. Calls on one cache may come from several threads; they run one after the other. As all calls
 *     of llama.cpp, those on one context must not run concurrently.
 *
 * Example, which prefills sequence 0 of an empty context:
 *
 *     pqc_llama_options options = PQC_INIT(pqc_llama_options);
 *     options.endpoint = "unix:///run/pqcached/pqcached.sock";
 *     options.model_name = "SmolLM2-135M-Instruct.Q4_1";
 *     pqc_llama_cache* cache = NULL;
 *     if (pqc_llama_cache_open(llama_get_model(context), &options, &cache) != PQC_OK) {
 *       fprintf(stderr, "prompts are not cached: %s\n", pqc_llama_last_error());
 *     }
 *     uint64_t restored = 0;
 *     if (cache != NULL) pqc_llama_restore(cache, context, 0, tokens, count, &restored);
 *     decode_tokens(context, tokens + restored, count - restored);
 *     if (cache != NULL) pqc_llama_save(cache, context, 0, tokens, count, NULL);
 *     // ...
 *     pqc_llama_cache_close(cache);
 */
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_PQCACHED_LLAMA_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_PQCACHED_LLAMA_H_

#include "pqcached/status.h"
#include "pqcached/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;
struct llama_model;

/* The prompts of one model. */
typedef struct pqc_llama_cache pqc_llama_cache;

typedef struct pqc_llama_options {
  size_t struct_size;
  const char* endpoint; /* of the sidecar: "unix:///run/pqcached/pqcached.sock" or "host:port" */
  /* 1 to 96 bytes. The caller promises that equal names mean equal weights, adapters (LoRA, control
   * vectors) and RoPE settings: everything that changes a token's key or value. Description, size,
   * shape and dtype of the model are compared as well: others find nothing. */
  const char* model_name;
  const char* tenant; /* as in pqc_client_options */
  /* type_k and type_v of the context's parameters, which are the same: GGML_TYPE_F16,
   * GGML_TYPE_BF16 or GGML_TYPE_F32. 0 = PQC_F16, llama.cpp's default. */
  pqc_dtype kv_dtype;
  /* Deadline of each request to the sidecar; 0 = 1000. A call of this library sends one request
   * for every 16 MiB of rows and about four others, and gives up after the first that is late. */
  uint32_t timeout_ms;
  uint32_t thread_count; /* threads that copy rows, as in pqc_client_options; 0 = all cores */
} pqc_llama_options;

/* Opens the prompts of a model, which must outlive the cache. Does not connect to the sidecar.
 * *cache is set on PQC_OK, and NULL otherwise.
 *
 * Errors: PQC_INVALID_ARGUMENT     endpoint, model_name, kv_dtype
 *         PQC_FAILED_PRECONDITION  the process has no llama.cpp, or one without a function that is
 *                                  needed (the message names it)
 *         PQC_UNIMPLEMENTED        models with window layers, recurrent or encoder layers, and head
 *                                  dims other than multiples of 8 in 32 to 256 */
PQC_API pqc_status pqc_llama_cache_open(const struct llama_model* model,
                                        const pqc_llama_options* options, pqc_llama_cache** cache);
/* Closes the cache. What was saved remains in the sidecar. NULL does nothing. */
PQC_API void pqc_llama_cache_close(pqc_llama_cache* cache);

/* Sets *stored to the number of tokens that pqc_llama_restore would restore of this prompt. Sends a
 * request, and copies no rows.
 *
 * Errors: PQC_INVALID_ARGUMENT  tokens
 *         and those of the sidecar, as in pqc_llama_restore */
PQC_API pqc_status pqc_llama_match(pqc_llama_cache* cache, const int32_t* tokens, uint64_t count,
                                   uint64_t* stored);

/* Stores the first `count` tokens of sequence `seq` of a context, as far as the sidecar does not
 * have them yet, in whole steps of 128 tokens. They remain after the process has ended, until the
 * sidecar needs their memory or ends (its option pool_directory). *stored (may be NULL) receives
 * the tokens of the prompt that are stored afterwards.
 *
 * tokens [count], at most 2^22, are the ids that were decoded at the positions 0 to count - 1; the
 * sequence may have more. The rows must be those that decoding these tokens gives: do not save a
 * sequence after a context shift (llama_memory_seq_add, llama_memory_seq_div) or with embeddings in
 * place of tokens. Needs memory for the state of the sequence, 2 x layers x kv_heads x head_dim
 * numbers per token, and nothing when all is stored. The sequence does not change.
 *
 * Errors: PQC_INVALID_ARGUMENT     seq; tokens: NULL, a negative id, more than the sequence has or
 *                                  than 2^22; a context of another model
 *         PQC_FAILED_PRECONDITION  the sequence's positions are not 0 to n - 1; the context's KV
 *                                  cache has not the kv_dtype of the options
 *         PQC_UNIMPLEMENTED        flash attention is off, so that V is transposed; a quantised KV
 *                                  cache; a state of another format
 *         PQC_RESOURCE_EXHAUSTED   the sidecar is full, or this process has no memory
 *         PQC_UNAVAILABLE          no sidecar listens at the endpoint, or its worker has ended
 *         PQC_DEADLINE_EXCEEDED    the sidecar does not answer
 *         and others of the sidecar. Steps of 128 tokens that were complete by then remain stored
 */
PQC_API pqc_status pqc_llama_save(pqc_llama_cache* cache, struct llama_context* context,
                                  int32_t seq, const int32_t* tokens, uint64_t count,
                                  uint64_t* stored);

/* Loads the longest stored beginning of a prompt into the empty sequence `seq` of a context.
 * *restored receives its tokens, which may be 0: a multiple of 128, or count - 1, because the last
 * token has to be decoded for its logits. The sequence then has the positions 0 to *restored - 1,
 * and the application decodes the tokens from *restored on. The logits are those that decoding all
 * of it would give, up to the rounding of batches of another size.
 *
 * After an error *restored is 0, and the sequence is empty, or as it was if it was not empty. Needs
 * memory as pqc_llama_save does.
 *
 * Errors: PQC_INVALID_ARGUMENT     seq; tokens: NULL, a negative id, more than the context's cells
 *                                  or than 2^22; a context of another model
 *         PQC_FAILED_PRECONDITION  the sequence is not empty; llama.cpp refuses the rows, and has
 *                                  logged the reason: too few free cells, flash attention is off,
 *                                  or the KV cache has not the kv_dtype of the options
 *         PQC_UNIMPLEMENTED        a state of another format
 *         PQC_RESOURCE_EXHAUSTED   the sidecar's limits, or this process has no memory
 *         PQC_UNAVAILABLE          no sidecar listens at the endpoint, or its worker has ended
 *         PQC_DEADLINE_EXCEEDED    the sidecar does not answer
 *         and others of the sidecar */
PQC_API pqc_status pqc_llama_restore(pqc_llama_cache* cache, struct llama_context* context,
                                     int32_t seq, const int32_t* tokens, uint64_t count,
                                     uint64_t* restored);

/* Offloads the older tokens of sequence `seq`, so that the context needs cells for a part of its
 * tokens only: with n_ctx of 4,096, a sequence may have a million. Needs the plug-in of this
 * project (libggml-pqcached.so) with the word offload in PQCACHED_LLAMA, whose sink_tokens and
 * window_tokens say which tokens keep their cells. All between are offloaded: the call waits until
 * the sidecar has their keys and values, and frees their cells (llama_memory_seq_rm). Positions go
 * on, and the plug-in attends to the offloaded tokens as to all others.
 *
 * To be called after llama_decode, on the thread that has made that call, with a batch that the
 * sequence was a part of. The sequence must have been decoded from position 0 on, by batches only:
 * not restored, copied or shifted. Sequences of sink and window only remain as they are.
 *
 * Afterwards llama_decode returns an error where the offloaded tokens cannot be read within
 * deadline_ms, and where sequences with such tokens were copied or shifted, or lack others; the
 * result is never that of other tokens. Roll-backs (llama_memory_seq_rm of the last tokens) may
 * reach to the window's first token.
 *
 * Errors: PQC_INVALID_ARGUMENT     seq: it is empty, or its first position is not 0
 *         PQC_FAILED_PRECONDITION  no plug-in, no word offload, a model that the plug-in does not
 *                                  attend to; the sequence's tokens are not all known; several
 *                                  sequences have as many tokens: call again after the next batch
 *         PQC_DEADLINE_EXCEEDED    the sidecar has not stored the rows within deadline_ms: call
 *                                  again. No cells are freed */
PQC_API pqc_status pqc_llama_offload(struct llama_context* context, int32_t seq);

/* Loads the plug-in where GGML_BACKEND_PATH has no effect, because ggml was built without
 * GGML_BACKEND_DL: in a program that is linked with ggml statically, for example, which then needs
 * the linker's -rdynamic. To be called before a model is loaded. path: of libggml-pqcached.so;
 * NULL = as the dynamic linker finds it. A plug-in that is loaded already is no error.
 *
 * Errors: PQC_NOT_FOUND            path: it cannot be loaded
 *         PQC_INVALID_ARGUMENT     path: another library
 *         PQC_FAILED_PRECONDITION  the process shows no ggml, or the plug-in refuses its version or
 *                                  the settings in PQCACHED_LLAMA, and has logged the reason */
PQC_API pqc_status pqc_llama_register(const char* path);

/* Returns the message of the calling thread's last failure of this library, "" when its last call
 * succeeded. Valid until the thread's next call. Never fails. */
PQC_API const char* pqc_llama_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_PQCACHED_LLAMA_H_ */
