/* pqcached client: C ABI.
 *
 * Conventions
 *  1. Handles are opaque. What pqc_X_open or pqc_X_create returned goes back through pqc_X_close or
 *     pqc_X_drop, once. Caches and sequences may outlive their client's handle: their calls then
 *     give PQC_FAILED_PRECONDITION.
 *  2. Every struct begins with `struct_size`: set it with PQC_INIT(type) or to sizeof. Fields are
 *     only ever added at the end; bytes that this version does not know must be zero and give
 *     PQC_UNIMPLEMENTED otherwise. A smaller struct than this version's is PQC_INVALID_ARGUMENT. In
 *     arrays of structs the first one's struct_size is the distance of all. Structs that are
 *     members of others (pqc_tensor, pqc_index, pqc_positions) never grow, and their struct_size
 *     may be 0.
 *  3. Every call returns a pqc_status, whose numbers are gRPC's. pqc_last_error() tells the calling
 *     thread why its last call failed: the field and its limit.
 *  4. Outputs are the caller's memory. A capacity that is too small gives PQC_OUT_OF_RANGE, with
 *     the needed size in the message and in the `count` field where there is one.
 *  5. Positions are absolute token positions; those beyond the stored tokens give PQC_OUT_OF_RANGE.
 *     Token counts, heads and dims are counts, not bytes, unless named `_bytes`.
 *  6. A client and its caches and sequences may be used from several threads at once. Calls that
 *     change one sequence exclude each other: the second one gets PQC_ABORTED. Handles must not be
 *     closed while a call uses them.
 *  7. Every call ends within its deadline: `timeout_ms` of the client, or of the call's options.
 *     After PQC_UNAVAILABLE the client repeats, within the deadline, only what is harmless to
 *     repeat (reads; rows, since positions make a repeat a no-op).
 *     When the sidecar's worker ends, calls and steps under way give PQC_UNAVAILABLE; the next call
 *     goes on with the next worker, within its deadline: handles and what was acknowledged stay,
 *     unacknowledged rows of steps are sent again, a build under way has to be begun anew. Once the
 *     sidecar does not know the session any more, every call gives PQC_UNAVAILABLE ("the session is
 *     lost"), and a new client is needed.
 *  8. No call throws, aborts, installs signal handlers, or touches the environment; callbacks must
 *     not throw. The library needs libc, libm, libstdc++ and libdl; gRPC is loaded apart
 *     (libpqcached_rpc) so that it never meets a protobuf of the engine's. A process that forks
 *     must not use in the child a client opened before.
 */
#ifndef PQCACHED_CLIENT_H_
#define PQCACHED_CLIENT_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PQC_API __attribute__((visibility("default")))
#else
#define PQC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define PQC_ABI_VERSION 1u

/* pqc_selection s = PQC_INIT(pqc_selection); clears s and sets its size. */
#ifdef __cplusplus
#define PQC_INIT(type)                         \
  ([] {                                        \
    type pqc_init_value{};                     \
    pqc_init_value.struct_size = sizeof(type); \
    return pqc_init_value;                     \
  }())
#else
#define PQC_INIT(type) \
  { .struct_size = sizeof(type) }
#endif

typedef enum pqc_status {
  PQC_OK = 0,
  PQC_CANCELLED = 1,
  PQC_UNKNOWN = 2,
  PQC_INVALID_ARGUMENT = 3,
  PQC_DEADLINE_EXCEEDED = 4,
  PQC_NOT_FOUND = 5,
  PQC_ALREADY_EXISTS = 6,
  PQC_PERMISSION_DENIED = 7,
  PQC_RESOURCE_EXHAUSTED = 8,
  PQC_FAILED_PRECONDITION = 9,
  PQC_ABORTED = 10,
  PQC_OUT_OF_RANGE = 11,
  PQC_UNIMPLEMENTED = 12,
  PQC_INTERNAL = 13,
  PQC_UNAVAILABLE = 14,
  PQC_DATA_LOSS = 15,
  PQC_UNAUTHENTICATED = 16
} pqc_status;

PQC_API uint32_t pqc_abi_version(void);
/* "OK", "INVALID_ARGUMENT", ... */
PQC_API const char* pqc_status_name(pqc_status status);
/* Why the calling thread's last call failed; "" when it did not. Valid until the thread's next
 * call. */
PQC_API const char* pqc_last_error(void);

/* Returns the path of the refused field of the calling thread's last failed call, in the words of
 * this header: "selection.token_ratio", "items[2].query_position". Returns "" when the failure is
 * about no field, and after a call that succeeded. Valid until the thread's next call. */
PQC_API const char* pqc_last_error_field(void);

/* Returns the time in milliseconds after which a repetition of the calling thread's last failed call
 * may succeed; 0 when repeating it is not worthwhile. */
PQC_API uint32_t pqc_last_error_retry_ms(void);

/* ---- Tensors */

typedef enum pqc_dtype { PQC_F16 = 1, PQC_BF16 = 2, PQC_F32 = 3 } pqc_dtype;
/* PQC_CUDA is for prefill and steps on a GPU (gpu.h), and PQC_UNIMPLEMENTED elsewhere. */
typedef enum pqc_device { PQC_CPU = 0, PQC_CUDA = 1 } pqc_device;

/* Rows of a paged engine: token t lives in block blocks[t / block_tokens], at index t %
 * block_tokens of a block. The tensor is then the engine's whole block memory, its K or its V part:
 * shape and strides are [blocks, block_tokens, heads, dim], whatever the order in memory (vLLM's
 * [blocks, 2, tokens, heads, dim] and [blocks, heads, tokens, dim], llama.cpp's transposed V with a
 * token stride of 1), and the tokens of a call are the first `token_count` of the table. */
typedef struct pqc_block_table {
  size_t struct_size;
  const uint32_t* blocks;
  uint64_t block_count;
  uint32_t block_tokens;
  uint64_t token_count;
} pqc_block_table;

/* A borrowed array. `strides` are in elements; NULL = contiguous, last index fastest. */
typedef struct pqc_tensor {
  size_t struct_size;
  void* ptr;
  pqc_device device;
  pqc_dtype dtype;
  uint32_t ndim; /* at most 4 */
  const uint64_t* shape;
  const int64_t* strides;
  const pqc_block_table* block_table;
  void* stream; /* of the device; must be NULL on PQC_CPU */
  uint64_t reserved[2];
} pqc_tensor;

/* ---- Client */

typedef struct pqc_client pqc_client;

/* Runs body(context, i) for each i in [0, count), in any order, on any threads, and returns when
 * all are done. */
typedef void (*pqc_parallel_for)(void* hook_context, uint32_t count,
                                 void (*body)(void* context, uint32_t index), void* context);

typedef enum pqc_path_choice {
  PQC_PATH_ANY = 0,         /* local where the sidecar's broker answers, else remote */
  PQC_PATH_ONLY_REMOTE = 1, /* by RPC alone */
  PQC_PATH_ONLY_LOCAL = 2   /* PQC_UNAVAILABLE, with the reason, where there is no broker */
} pqc_path_choice;

typedef struct pqc_client_options {
  size_t struct_size;
  const char* endpoint;    /* "unix:///run/pqcached/pqcached.sock" or "host:port" on the loopback */
  const char* tenant;      /* NULL = what the broker knows the process's user by, or "default" */
  const char* client_name; /* for people; NULL = the program's name */
  uint32_t timeout_ms;     /* of each call but pqc_build_index; 0 = 10000 */
  /* For the kernels that run in this process (PQC_PATH_LOCAL); the remote path has no use for them.
   * NULL = a small pool of the client's own, of thread_count threads (0 = all cores). */
  pqc_parallel_for parallel_for;
  void* parallel_for_context;
  uint32_t thread_count;
  /* NULL = libpqcached_rpc.so beside libpqcached_client.so, then the loader's search path. */
  const char* rpc_library_path;
  pqc_path_choice path;
  /* Ring of memory that rows pass through on the local path: slot_count slots of slot_bytes, both 0 =
   * the client's default. slot_bytes is a multiple of 1 MiB. */
  uint64_t staging_slot_bytes;
  uint32_t staging_slot_count;
} pqc_client_options;

/* Connects and opens a session. The session, and with it the client's sequences, ends with
 * pqc_client_close.
 * Errors: PQC_INVALID_ARGUMENT (endpoint, tenant), PQC_UNAVAILABLE (nobody listens),
 *         PQC_DEADLINE_EXCEEDED (somebody listens and does not answer),
 *         PQC_FAILED_PRECONDITION (libpqcached_rpc cannot be loaded, or is of another version),
 *         PQC_UNIMPLEMENTED (an endpoint beyond this host) */
PQC_API pqc_status pqc_client_open(const pqc_client_options* options, pqc_client** client);
PQC_API void pqc_client_close(pqc_client* client); /* NULL is fine */

typedef enum pqc_path { PQC_PATH_REMOTE = 0, PQC_PATH_LOCAL = 1 } pqc_path;
/* How this client reaches the rows: by RPC, or in mapped memory. */
PQC_API pqc_path pqc_client_path(const pqc_client* client);

typedef struct pqc_client_counts {
  size_t struct_size;
  uint64_t rpcs;            /* that a call of this client waited for */
  uint64_t background_rpcs; /* that none waited for: rows of finished steps */
  uint64_t mapped_bytes;    /* of pools */
  uint64_t lease_count;
} pqc_client_counts;
PQC_API pqc_status pqc_client_count(const pqc_client* client, pqc_client_counts* counts);

/* Any unary Admin RPC, or Admit, by name, for tools: request and answer as JSON (protobuf's mapping). *answer
 * is freed with pqc_free. */
PQC_API pqc_status pqc_admin_json(pqc_client* client, const char* method, const char* request,
                                  char** answer);
PQC_API void pqc_free(void* memory);

/* ---- Caches */

typedef struct pqc_cache pqc_cache;

typedef enum pqc_layer_kind {
  PQC_LAYERS_SELECTED = 1,
  PQC_LAYERS_FULL = 2,   /* PQC_UNIMPLEMENTED in this version */
  PQC_LAYERS_WINDOW = 3, /* PQC_UNIMPLEMENTED in this version */
  PQC_LAYERS_NONE = 4    /* nothing is stored */
} pqc_layer_kind;

typedef enum pqc_rope_layout {
  PQC_ROPE_UNKNOWN = 0,
  PQC_ROPE_NONE = 1,
  PQC_ROPE_HALF = 2,
  PQC_ROPE_INTERLEAVED = 3
} pqc_rope_layout;

typedef struct pqc_layer_group {
  size_t struct_size;
  pqc_layer_kind kind;
  const uint32_t* layers; /* absolute layer numbers, ascending, < 1024 */
  uint32_t layer_count;
  uint32_t kv_heads;    /* 1..256; at most 64 query heads each */
  uint32_t query_heads; /* a multiple of kv_heads, at most 1024; query head h reads kv head h /
                           (query_heads / kv_heads) */
  uint32_t key_dim;     /* 32..256, a multiple of 8 */
  uint32_t value_dim;   /* likewise */
  pqc_dtype dtype;      /* of the stored rows */
  float softmax_scale;  /* 0 = 1 / sqrt(key_dim) */
  float softcap;        /* 0 = none */
  pqc_rope_layout rope_layout;
  double rope_theta;
  uint32_t rotary_dim;
  uint32_t values_alias_keys; /* must be 0 in this version */
  uint32_t window_tokens;     /* PQC_LAYERS_WINDOW only */
} pqc_layer_group;

typedef enum pqc_index_kind {
  PQC_INDEX_DEFAULT = 0,
  PQC_INDEX_PQ = 1,
  PQC_INDEX_FLAT = 2
} pqc_index_kind;

typedef struct pqc_index {
  size_t struct_size;
  pqc_index_kind kind;
  uint32_t subspaces;   /* pq: m in 1, 2, 4, 8, 16; divides key_dim */
  uint32_t bits;        /* pq: b in 4..8 */
  uint32_t reserved[5]; /* parameters of later kinds */
} pqc_index;

typedef struct pqc_cache_spec {
  size_t struct_size;
  const char* name;              /* 1..128 bytes */
  const char* model_fingerprint; /* 1..256 bytes: all that makes K and V differ */
  const pqc_layer_group* groups;
  uint32_t group_count;
  uint64_t capacity_bytes;
  pqc_index default_index; /* PQC_INDEX_DEFAULT = pq m=2 b=6 */
  /* Ranks of one model: NULL and zeros for a single process. Each rank opens the cache of the same
   * name with its own layers and kv heads; layer_begin and kv_head_begin say which of the model they
   * are. */
  const char* rank_group;
  uint32_t rank;
  uint32_t rank_count;
  uint32_t kv_head_begin;
  uint32_t layer_begin;
  int32_t numa_node;
} pqc_cache_spec;

/* Opens the tenant's cache of this name, or joins it when its fingerprint and shape agree
 * (PQC_FAILED_PRECONDITION otherwise). */
PQC_API pqc_status pqc_cache_open(pqc_client* client, const pqc_cache_spec* spec,
                                  pqc_cache** cache);
PQC_API void pqc_cache_close(pqc_cache* cache); /* the handle; the cache lives on in the sidecar */

/* ---- Sequences */

typedef struct pqc_sequence pqc_sequence;

PQC_API pqc_status pqc_sequence_create(pqc_cache* cache, pqc_sequence** sequence);
/* Drops the sequence in the sidecar and closes the handle, whatever the status says. NULL is fine.
 */
PQC_API pqc_status pqc_sequence_drop(pqc_sequence* sequence);
PQC_API uint64_t pqc_sequence_id(const pqc_sequence* sequence);
/* Forgets the tokens from `token_count` on; with the last one the indexes, but a live one begins anew. */
PQC_API pqc_status pqc_sequence_truncate(pqc_sequence* sequence, uint64_t token_count);

/* Of sequences that share prefixes, or whose index is kept up while rows arrive. */
typedef struct pqc_sequence_options {
  size_t struct_size;
  /* Of the prompt, as far as known: the sequence begins with the longest stored prefix of them, in
   * steps of 128 tokens, and others may share what it stores under them. */
  const uint32_t* token_ids;
  uint64_t token_id_count;
  const void* extra_key; /* of the prefix (images, ...): at most 256 bytes */
  uint64_t extra_key_bytes;
  /* Live index: prefill segments are indexed in the background as they fill; the last one when the
   * first step begins or the first token is appended, or by pqc_build_index with the same index, which
   * waits for all of it. */
  uint32_t live;       /* 0 or 1 */
  uint32_t iterations; /* of k-means; 0 = what the sidecar's cost model finds */
  pqc_index index;
  uint64_t seed;
  uint64_t train_tokens; /* 0 = the sidecar's default */
  uint64_t sink_tokens;  /* not trained on */
  /* Of a cache with a rank_group: what all ranks call the one sequence of their group that this is a part
   * of; at most 64 bytes, none = tied to no other. All ranks get the *token_count of the first rank's
   * call, and are evicted and pinned together, or none of them; forks are not tied. When the sequences of
   * all ranks have ended, the key may be used again. PQC_ALREADY_EXISTS: the rank has, or had, a sequence
   * under it, and not all have ended; PQC_FAILED_PRECONDITION: another prompt than the first rank's, or
   * the sidecar has begun anew since its call: drop the sequences and begin the key anew on all ranks. */
  const void* group_key;
  uint64_t group_key_bytes;
} pqc_sequence_options;

/* *token_count (may be NULL) gets the tokens of the shared prefix: the next position to ingest. A prompt
 * that is stored as a whole is shared as a whole; an engine that needs the logits of its last token
 * truncates by one and hands in that token's rows again. */
PQC_API pqc_status pqc_sequence_create_with(pqc_cache* cache, const pqc_sequence_options* options,
                                            pqc_sequence** sequence, uint64_t* token_count);
/* A new sequence that shares the first `token_count` tokens (0 = all) and their indexes,
 * copy-on-write. */
PQC_API pqc_status pqc_sequence_fork(pqc_sequence* parent, uint64_t token_count,
                                     pqc_sequence** child);
/* How many tokens of a prompt are stored under these ids: a multiple of 128. */
PQC_API pqc_status pqc_match_prefix(pqc_cache* cache, const uint32_t* token_ids,
                                    uint64_t token_id_count, const void* extra_key,
                                    uint64_t extra_key_bytes, uint64_t* token_count);
/* Will a request fit? By what allocation will take; nothing is reserved. */
typedef enum pqc_verdict {
  PQC_FITS_NOW = 1,
  PQC_FITS_AFTER_EVICTION = 2, /* of what nobody uses */
  PQC_FITS_LATER = 3,          /* when others have let go of what they hold */
  PQC_FITS_NEVER = 4           /* more than the cache may hold */
} pqc_verdict;

typedef struct pqc_admission {
  size_t struct_size;
  pqc_verdict verdict;
  uint64_t needed_bytes;
  uint64_t evicted_bytes;   /* after eviction: that would have to go */
  uint64_t shortfall_bytes; /* later, never: what is missing */
  uint64_t limit_bytes;     /* that the cache may hold */
  uint64_t retry_after_ms;  /* later */
} pqc_admission;

/* token_count: of the prefill, without those that pqc_match_prefix found; output_token_count: expected. The
 * index is the cache's default one. */
PQC_API pqc_status pqc_admit(pqc_cache* cache, uint64_t token_count, uint64_t output_token_count,
                             pqc_admission* admission);
/* Keeps the sequence from being evicted for so long (at most 30 days), and what is retained of it when it ends;
 * 0 = no longer. */
PQC_API pqc_status pqc_sequence_pin(pqc_sequence* sequence, uint64_t ttl_ms);
/* Preemption: until it is resumed, every other call on the sequence but describe and drop gives
 * PQC_FAILED_PRECONDITION. *token_count may be NULL. */
PQC_API pqc_status pqc_sequence_suspend(pqc_sequence* sequence);
PQC_API pqc_status pqc_sequence_resume(pqc_sequence* sequence, uint64_t* token_count);

typedef struct pqc_sequence_info {
  size_t struct_size;
  uint64_t token_count;    /* complete over all stored layers */
  uint64_t row_bytes;      /* content of the stored rows */
  uint64_t index_bytes;    /* codes and counts */
  uint64_t codebook_bytes; /* centroids */
  uint64_t used_bytes;     /* held in the pool */
  uint32_t segment_count;
  uint32_t index_count;
} pqc_sequence_info;
PQC_API pqc_status pqc_sequence_describe(pqc_sequence* sequence, pqc_sequence_info* info);

/* ---- Rows in */

/* Stores K [tokens, kv_heads, key_dim] and V [tokens, kv_heads, value_dim] of consecutive prefill
 * tokens of one layer, from any strides or block tables: all or nothing. (Below a sidecar that does
 * not tell when it is done with a slot of staging, on the local path, of a call larger than a slot
 * the slots before a failure are stored.) A range that is stored already is acknowledged, so that a
 * failed call can be repeated; a gap is PQC_INVALID_ARGUMENT. NaN and infinity are refused. After pqc_build_index, new rows come by
 * pqc_append. */
PQC_API pqc_status pqc_ingest(pqc_sequence* sequence, uint32_t layer, uint64_t first_position,
                              const pqc_tensor* keys, const pqc_tensor* values);

typedef struct pqc_layer_rows {
  size_t struct_size;
  uint32_t layer;
  pqc_tensor keys;   /* [tokens, kv_heads, key_dim] */
  pqc_tensor values; /* [tokens, kv_heads, value_dim] */
} pqc_layer_rows;

/* Appends new tokens to all stored layers at once. A repeat is acknowledged, a gap refused; the
 * codes of their nearest centroids are there when the call returns. *token_count (may be NULL) gets
 * the sequence's tokens. */
PQC_API pqc_status pqc_append(pqc_sequence* sequence, uint64_t first_position,
                              const pqc_layer_rows* layers, uint32_t layer_count,
                              uint64_t* token_count);

/* ---- Index */

typedef struct pqc_build_progress {
  size_t struct_size;
  uint32_t layer;
  uint32_t layers_done;
  uint32_t layer_count;
  uint32_t epoch;
  uint32_t epoch_count;
  uint32_t iterations;
  double inertia;          /* mean squared distance key - centroids */
  double seconds;          /* since the build began */
  uint64_t index_bytes;    /* of this layer */
  uint64_t codebook_bytes; /* of this layer */
} pqc_build_progress;

/* Returns nonzero to go on, 0 to cancel. After the last layer it is too late to cancel. */
typedef int (*pqc_build_callback)(void* context, const pqc_build_progress* progress);

typedef struct pqc_build_options {
  size_t struct_size;
  pqc_index index;
  uint32_t iterations;         /* of k-means; 0 = 10 */
  uint64_t seed;               /* same rows, iterations and seed: same index */
  uint64_t train_tokens;       /* sample per epoch; 0 = all */
  uint64_t sink_tokens;        /* first tokens that are not trained on */
  uint32_t timeout_ms;         /* 0 = what the sidecar allows (its max_timeout) */
  pqc_build_callback callback; /* may be NULL; on the calling thread */
  void* callback_context;
} pqc_build_options;

/* Closes the prefill and builds the index of all layers. A cancelled or failed build leaves no
 * index (the tail stays closed), unless the cancellation came too late, which pqc_sequence_describe
 * tells. Rows may come meanwhile; another build of this index gives PQC_ABORTED while one is under
 * way, also a cancelled one that is still being wound up, and PQC_ALREADY_EXISTS after it. */
PQC_API pqc_status pqc_build_index(pqc_sequence* sequence, const pqc_build_options* options);

/* ---- Rank, fetch, attend */

typedef enum pqc_group_rule {
  PQC_SUM_SOFTMAX = 0, /* default: sum over the query heads of softmax over all candidates */
  PQC_MAX_SOFTMAX = 1,
  PQC_MEAN_LOGIT = 2,
  PQC_MAX_LOGIT = 3
} pqc_group_rule;

typedef struct pqc_token_range {
  uint64_t begin;
  uint64_t end;
} pqc_token_range;

typedef enum pqc_budget_kind {
  PQC_BUDGET_RATIO = 0,
  PQC_BUDGET_COUNT = 1,
  PQC_BUDGET_MASS = 2 /* PQC_UNIMPLEMENTED */
} pqc_budget_kind;

/* With n = query_position + 1 tokens of context, the engine itself attends to the sink [0,
 * sink_tokens) and the window [n - window_tokens, n); k of the rest, less the excluded ranges, are
 * selected. The budget counts all three. */
typedef struct pqc_selection {
  size_t struct_size;
  pqc_index index;
  pqc_group_rule rule;
  uint64_t sink_tokens;
  uint64_t window_tokens;
  /* Ascending, disjoint, at most 16: masked, neither attended nor counted. */
  const pqc_token_range* excluded;
  uint32_t excluded_count;
  pqc_budget_kind budget;
  double ratio;         /* PQC_BUDGET_RATIO: in (0, 1], of n */
  uint64_t token_count; /* PQC_BUDGET_COUNT: in [sink + window + 1, all that may be attended] */
} pqc_selection;

/* A query of one layer. queries: [query_length, query_heads, key_dim] or, for one token,
 * [query_heads, key_dim]. The tokens of a speculation (query_length 2..8) share one selection, over
 * the group's heads of all of them: group size x query_length is at most 64. */
typedef struct pqc_query {
  size_t struct_size;
  uint32_t layer;
  uint64_t query_position; /* absolute, of the first query token */
  pqc_tensor queries;
} pqc_query;

/* positions[kv_head * count + i], ascending per kv head. */
typedef struct pqc_positions {
  size_t struct_size;
  uint32_t* positions;    /* may be NULL to ask for the count only */
  uint64_t capacity;      /* of `positions`, in elements */
  uint32_t kv_heads;      /* out */
  uint32_t count;         /* out: k, per kv head */
  uint64_t sink_tokens;   /* out: what the engine attends by itself */
  uint64_t window_tokens; /* out */
} pqc_positions;

PQC_API pqc_status pqc_select(pqc_sequence* sequence, const pqc_query* query,
                              const pqc_selection* selection, pqc_positions* out);

/* Logits of the tokens of a range under an index: logits[query_heads * tokens], and per query head
 * max and sum of exp(logit - max) (each may be NULL). */
PQC_API pqc_status pqc_score(pqc_sequence* sequence, const pqc_query* query, const pqc_index* index,
                             pqc_token_range tokens, float* logits, uint64_t logit_capacity,
                             float* max, float* sum_exp);

typedef enum pqc_row_part { PQC_ROW = 0, PQC_KEY = 1, PQC_VALUE = 2 } pqc_row_part;

/* Rows of a token range: out [kv_heads, tokens, dim] of the cache's dtype, dim = key_dim +
 * value_dim, key_dim or value_dim. */
PQC_API pqc_status pqc_fetch_range(pqc_sequence* sequence, uint32_t layer, pqc_token_range tokens,
                                   pqc_row_part part, void* out, uint64_t out_bytes);
/* Rows by position: positions [kv_heads, count], out [kv_heads, count, dim]. */
PQC_API pqc_status pqc_fetch_tokens(pqc_sequence* sequence, uint32_t layer,
                                    const uint32_t* positions, uint32_t count, pqc_row_part part,
                                    void* out, uint64_t out_bytes);

/* A partial attention over the selected tokens: merge it with the engine's own by log-sum-exp
 * (pqc_merge). */
typedef struct pqc_attention {
  size_t struct_size;
  float* output;            /* [query_heads, value_dim]; zeros where nothing was selected */
  uint64_t output_capacity; /* elements */
  float* lse; /* [query_heads]: natural log of the scaled logits; -inf where nothing was selected */
  uint64_t lse_capacity;
  pqc_positions selected; /* out; positions only when selected.positions is given */
} pqc_attention;

PQC_API pqc_status pqc_attend(pqc_sequence* sequence, const pqc_query* query,
                              const pqc_selection* selection, pqc_attention* out);
/* Over given positions: [kv_heads, count], ascending per kv head. */
PQC_API pqc_status pqc_attend_positions(pqc_sequence* sequence, const pqc_query* query,
                                        const uint32_t* positions, uint32_t count,
                                        pqc_attention* out);

/* Merges partial b into a, for `rows` rows of `dim` floats: lse = log(exp(lse_a) + exp(lse_b)),
 * output weighted accordingly. */
PQC_API pqc_status pqc_merge(uint32_t rows, uint32_t dim, float* output_a, float* lse_a,
                             const float* output_b, const float* lse_b);

#ifdef __cplusplus
}
#endif

#include "pqcached/step.h"

#endif /* PQCACHED_CLIENT_H_ */
