/* pqcached client: C ABI.
 *
 * An engine stores the K and V of its attention layers in a sidecar process, which selects, per
 * decode step and layer, the stored tokens that matter for a query. The method is PQCache (SIGMOD
 * 2025, arXiv 2407.12820; "the paper" below).
 *
 * Five concepts are enough: client, cache (pqc_model_read describes it by a model's config.json),
 * sequence, prefill and decode. The decoder (pqc_decoder_open, step.h) is the front door: it keeps
 * sink and window, and gives the complete attention of the next token. All other calls that write
 * or attend are advanced: for engines with batches, KV memory or kernels of their own.
 *
 * Words
 *   row        the KV entry [key, value] of one token, layer and kv head
 *   KV         the rows of several tokens; keys and values are passed as two tensors
 *   cache      one tenant's KV space for one model, with a fixed amount of memory
 *   sequence   the tokens of one request; its rows are written layer by layer in position order
 *   prefill    writing the rows of a prompt (pqc_ingest, pqc_gpu_ingest)
 *   index      selects tokens by approximate scores (pq: product quantization) or exact ones (flat)
 *   codebook   the centroids of one layer and kv head; long sequences have several generations
 *   sink       the first tokens of the context; window: the last ones. The decoder attends to both;
 *              with the other calls the engine itself does, unless they say otherwise
 *   selection  the k tokens that an index chose between sink and window
 *   local path the client maps the sidecar's memory and computes in this process; remote path: RPCs
 *
 * Conventions
 *  1. Handles are opaque. A handle that pqc_X_open or pqc_X_create returned is closed once, by
 *     pqc_X_close, pqc_X_drop or pqc_sequence_detach. Caches and sequences may outlive their
 *     client's handle: their calls then return PQC_FAILED_PRECONDITION.
 *  2. Every struct begins with `struct_size`: set it with PQC_INIT(type) or to sizeof. Later
 *     versions only add fields, at the end, and zero in a new field means what earlier versions
 *     did. A smaller struct is read as if its missing fields were zero, down to the size that the
 *     struct had in version 0.1 (PQC_INVALID_ARGUMENT below it). A larger one is accepted when the
 *     bytes that this version does not know are zero (PQC_UNIMPLEMENTED otherwise). Structs that a
 *     call fills in are filled in up to the caller's size. In arrays of structs the first element's
 *     struct_size is the distance between elements, and all elements have the same. Structs that
 *     are members of others (pqc_tensor, pqc_index, pqc_positions) never grow, and their
 *     struct_size may be 0.
 *  3. Every call returns a pqc_status, with the numbers of gRPC's codes; see the table in
 *     status.h. Three calls describe the calling thread's last failure: pqc_last_error() returns a
 *     message with the field, the refused value and the limit, for people to read;
 *     pqc_last_error_field() the path of the field; pqc_last_error_retry_ms() the retry time, after
 *     which a repetition may succeed (0 = repeating is not worthwhile). Programs decide by these
 *     and the status, never by the message.
 *  4. Outputs are the caller's memory. A capacity that is too small is PQC_OUT_OF_RANGE, with the
 *     needed size in the message and in the `count` field where there is one.
 *  5. Positions are absolute token positions; those beyond the stored tokens are PQC_OUT_OF_RANGE.
 *     A sequence has at most 2^30 tokens. Token counts, heads and dims are counts, not bytes,
 *     unless named `_bytes`; times are named `_ms` (milliseconds) or `seconds`.
 *  6. All calls on a client, its caches and its sequences may run concurrently on several threads.
 *     Calls that change one sequence (ingest, append, truncate, fork, suspend, resume, and a build
 *     as it begins) exclude each other and steps: the second one returns PQC_ABORTED. They first
 *     wait until the rows of finished steps are stored, and return the pending error of those rows,
 *     if any, without doing their own work. This exclusion holds for calls on one handle; attach.h
 *     says what holds between several handles of a sequence. Handles must not be closed while a
 *     call uses them.
 *  7. Every call ends within its deadline: `timeout_ms` of the client, or of the call's options,
 *     where 0 is the default and PQC_TIMEOUT_POLL means no wait (not in pqc_cache_events_next).
 *     After PQC_UNAVAILABLE the client itself repeats, within the deadline, only calls that are
 *     harmless to repeat (reads; rows, since positions make a repeat a no-op).
 *     When the sidecar's worker process ends, calls in progress return PQC_UNAVAILABLE; the next
 *     call continues with the next worker, within its deadline: handles and acknowledged rows
 *     remain, the client sends unacknowledged rows of steps again, and a build that was in progress
 *     has to be started again. On the local path a step that is in progress goes on when a worker
 *     crashes or is killed: it reads the memory that it has mapped. Once the sidecar does not know
 *     the session any more, every call returns PQC_UNAVAILABLE with a retry time of 0, and a new
 *     client is needed.
 *  8. No call throws, aborts, installs signal handlers, or changes the environment; callbacks must
 *     not throw. The first pqc_client_open of a process reads one variable, PQCACHED_RECORD: when
 *     it names a file, each call appends a line to that file, without rows, queries and outputs,
 *     and pqcached-conform checks the lines against these conventions. The library needs libc,
 *     libm, libstdc++ and libdl; gRPC is loaded separately (libpqcached_rpc), so that it never
 *     meets the protobuf of the engine. After fork(), the child must not use a client that was
 *     opened before.
 *  9. A failed call changes nothing, unless its comment says otherwise. After PQC_DEADLINE_EXCEEDED
 *     and PQC_UNAVAILABLE the sidecar may have done the work without this client's knowing.
 *
 * Versions
 *   0.x        A program that was built with the headers of 0.x runs with the libraries of every
 *              later 0.y: functions, enum values and fields are added, never removed or changed.
 *              A function that 0.x did not have is missing in its library: the loader says so.
 *   soname     libpqcached_client.so.1; a break makes it .2, and pqc_abi_version() return 2
 *   CMake      find_package(pqcached 0.1) accepts every 0.y from 0.1 on.
 *   libraries  libpqcached_client and libpqcached_rpc are installed together. During an update each
 *              works with the other one of the minor version before or after it: calls and fields
 *              that the older one does not have return PQC_UNIMPLEMENTED.
 *
 * Example, which stores 4096 tokens of one layer, and decodes the next one with a tenth of them:
 *
 *     pqc_client* client = NULL;
 *     pqc_cache* cache = NULL;
 *     pqc_sequence* sequence = NULL;
 *     pqc_decoder* decoder = NULL;
 *     pqc_client_options options = PQC_INIT(pqc_client_options);
 *     options.endpoint = "unix:///run/pqcached/pqcached.sock";
 *     pqc_status status = pqc_client_open(&options, &client);
 *
 *     const uint32_t layers[] = {0};
 *     pqc_layer_group group = PQC_INIT(pqc_layer_group);
 *     group.kind = PQC_LAYERS_SELECTED;
 *     group.layers = layers;
 *     group.layer_count = 1;
 *     group.kv_heads = 8;
 *     group.query_heads = 32;  // groups of 4 query heads per kv head
 *     group.key_dim = group.value_dim = 128;
 *     group.dtype = PQC_F16;
 *     pqc_cache_spec spec = PQC_INIT(pqc_cache_spec);
 *     spec.name = "demo";
 *     spec.model_fingerprint = "demo-1";
 *     spec.groups = &group;
 *     spec.group_count = 1;
 *     if (status == PQC_OK) status = pqc_cache_open(client, &spec, &cache);
 *     if (status == PQC_OK) status = pqc_sequence_create(cache, &sequence);
 *
 *     pqc_selection selection = PQC_INIT(pqc_selection);
 *     selection.sink_tokens = 16;
 *     selection.window_tokens = 64;
 *     selection.ratio = 0.1;  // 409 of 4097 tokens: 16 sink + 64 window + 329 selected
 *     if (status == PQC_OK) status = pqc_decoder_open(sequence, &selection, &decoder);
 *
 *     const uint64_t kv_shape[] = {4096, 8, 128};  // [tokens, kv_heads, dim]
 *     pqc_tensor k = PQC_INIT(pqc_tensor);
 *     k.ptr = keys;
 *     k.dtype = PQC_F32;
 *     k.ndim = 3;
 *     k.shape = kv_shape;
 *     pqc_tensor v = k;
 *     v.ptr = values;
 *     if (status == PQC_OK) status = pqc_decoder_prefill(decoder, 0, &k, &v);
 *
 *     const uint64_t query_shape[] = {32, 128};  // [query_heads, key_dim]
 *     pqc_tensor q = PQC_INIT(pqc_tensor);
 *     q.ptr = query;
 *     q.dtype = PQC_F32;
 *     q.ndim = 2;
 *     q.shape = query_shape;
 *     k.ptr = key;  // of the next token, at position 4096
 *     v.ptr = value;
 *     k.ndim = v.ndim = 2;
 *     k.shape = v.shape = &kv_shape[1];
 *     if (status == PQC_OK) status = pqc_decoder_decode(decoder, 0, &q, &k, &v, output, 32 * 128);
 *
 *     pqc_decoder_close(decoder);
 *     pqc_sequence_drop(sequence);
 *     pqc_cache_close(cache);
 *     pqc_client_close(client);
 */
#ifndef PQCACHED_CLIENT_H_
#define PQCACHED_CLIENT_H_

#include "pqcached/tensor.h"
#include "pqcached/threads.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Client */

typedef struct pqc_client pqc_client;
/* Value of a `timeout_ms` field whose comment names it: the call does not wait. It differs from 0,
 * the default, and from UINT32_MAX, which is 49 days. */
#define PQC_TIMEOUT_POLL 4294967294u

typedef enum pqc_path_choice {
  PQC_PATH_ANY = 0,         /* local where the sidecar's broker answers, remote otherwise */
  PQC_PATH_ONLY_REMOTE = 1, /* remote */
  PQC_PATH_ONLY_LOCAL = 2,  /* local; PQC_UNAVAILABLE, with the reason, where no broker answers */
  PQC_PATH_ADMIN = 3        /* for operators: no session, and only pqc_admin_json, which reaches all
                               tenants; on the sidecar's admin socket, endpoint + ".admin" */
} pqc_path_choice;

typedef struct pqc_client_options {
  size_t struct_size;
  const char* endpoint; /* "unix:///run/pqcached/pqcached.sock", or "host:port" */
  const char* tenant;   /* 1 to 64 bytes of [a-z0-9_.-]; NULL = the tenant that the broker has for
                              the process's user, that of the client over TLS, or "default" */
  const char* client_name; /* printable UTF-8 of at most 128 bytes; NULL = the program's name */
  uint32_t timeout_ms;     /* deadline of each call except pqc_build_index; 0 = 10000 */
  /* Threads of the kernels on the local path. NULL = thread_count threads of the client's own (0 =
   * all cores, PQC_THREADS_CALLER = only the calling thread). See pqc_client_set_threads. */
  pqc_parallel_for parallel_for;
  void* parallel_for_context;
  uint32_t thread_count;
  /* NULL = libpqcached_rpc.so next to libpqcached_client.so, then in the loader's search path. */
  const char* rpc_library_path;
  pqc_path_choice path;
  /* Staging ring: shared memory through which rows reach the sidecar on the local path, in slots of
   * a multiple of 1 MiB; both 0 = the client's default. */
  uint64_t staging_slot_bytes;
  uint32_t staging_slot_count;
  /* TLS of "host:port": paths of PEM files, and of a file with a token; NULL = none. They are read
   * again when they change. Hosts beyond the loopback need tls_ca. */
  const char* tls_ca;          /* of the sidecar's certificate; NULL = no TLS */
  const char* tls_certificate; /* of this client */
  const char* tls_key;
  const char* tls_server_name; /* in the sidecar's certificate; NULL = the endpoint's host */
  const char* token_file;
} pqc_client_options;

/* Connects to the sidecar and opens a session. *client is set on PQC_OK, and NULL otherwise. One
 * client per process is enough; several are independent of each other.
 *
 * Errors: PQC_INVALID_ARGUMENT     endpoint, tenant, path, staging_slot_*, tls_*, token_file
 *         PQC_UNIMPLEMENTED        libpqcached_rpc is older than this library, and has no TLS
 *         PQC_FAILED_PRECONDITION  libpqcached_rpc cannot be loaded, or is not of this release;
 *                                  PQCACHED_RECORD: the file cannot be opened
 *         PQC_PERMISSION_DENIED    the tenant belongs to other clients; PQC_PATH_ADMIN: this one is
 *                                  no operator
 *         PQC_UNAUTHENTICATED      over TLS: neither a certificate nor a token that is valid
 *         PQC_RESOURCE_EXHAUSTED   the sidecar has max_sessions sessions: repeat later
 *         PQC_UNAVAILABLE          no process listens at the endpoint, or TLS fails
 *         PQC_DEADLINE_EXCEEDED    a process listens and does not answer */
PQC_API pqc_status pqc_client_open(const pqc_client_options* options, pqc_client** client);
/* Ends the session, which drops the client's sequences in the sidecar, and closes the handle. Rows
 * of finished steps that are not stored yet are discarded. No other call on the client may be in
 * progress. NULL does nothing. */
PQC_API void pqc_client_close(pqc_client* client);

typedef enum pqc_path { PQC_PATH_REMOTE = 0, PQC_PATH_LOCAL = 1 } pqc_path;
/* Returns how this client reaches the rows: by RPC, or in mapped memory. PQC_PATH_REMOTE for NULL.
 * The path does not change during a client's life. On PQC_PATH_LOCAL too, calls that select or
 * score by an index of kind PQC_INDEX_PLUGIN make an RPC, those of a step one for each layer. */
PQC_API pqc_path pqc_client_path(const pqc_client* client);

/* Changes the number of threads of the kernels that run in this process: at most 256; 0 = all
 * cores, PQC_THREADS_CALLER = only the calling thread, without the client's pool and without the
 * engine's parallel_for. With a parallel_for it is the largest `count` of its calls. Holds for
 * calls that begin later; waits until a kernel ends whose threads are not needed any more. Without
 * an effect on the remote path.
 *
 * Errors: PQC_INVALID_ARGUMENT  thread_count */
PQC_API pqc_status pqc_client_set_threads(pqc_client* client, uint32_t thread_count);

/* Calls a unary RPC of the service Admin, or KvCache.Admit, by its name ("Stats"). It reaches the
 * data of the client's tenant, or, on PQC_PATH_ADMIN, of all tenants. `request` and *answer are
 * JSON in protobuf's mapping, with the proto's field names; 64-bit integers are strings. `request`
 * may be NULL or "" for an empty message. *answer is NULL or freed with pqc_free. Not repeated.
 *
 * Errors: PQC_INVALID_ARGUMENT   no such method; the request does not parse; and those of the RPC
 *         PQC_PERMISSION_DENIED  the RPC is for operators */
PQC_API pqc_status pqc_admin_json(pqc_client* client, const char* method, const char* request,
                                  char** answer);
/* Frees memory that a call returned. NULL does nothing. */
PQC_API void pqc_free(void* memory);

/* ---- Caches */

typedef struct pqc_cache pqc_cache;

/* Rows of all tokens are stored in all layers but those of PQC_LAYERS_NONE. Only selected layers
 * have an index, without which builds are PQC_FAILED_PRECONDITION. A query of a full layer takes
 * all candidates of its selection, that of a window layer none (output 0, lse -inf): the engine or
 * pqc_step_decode attends to the window. pqc_attend_range and _positions read all but values. */
typedef enum pqc_layer_kind {
  PQC_LAYERS_SELECTED = 1, /* attends to tokens that are selected by an index */
  PQC_LAYERS_FULL = 2,     /* attends to all tokens */
  PQC_LAYERS_WINDOW = 3,   /* attends to its last window_tokens tokens; all rows are kept */
  PQC_LAYERS_NONE = 4,     /* nothing is stored: the engine keeps these layers itself */
  /* Rows are values, with empty keys in all calls: the engine keeps the keys (KCache), and attends
   * by pqc_step_attend_positions with logits; other queries are PQC_FAILED_PRECONDITION. */
  PQC_LAYERS_VALUES = 5
} pqc_layer_kind;

/* Rotation of the keys, for indexes that keep pairs of dims together (pqc_subspace_layout). Keys
 * are stored as they are passed, after RoPE. */
typedef enum pqc_rope_layout {
  PQC_ROPE_UNKNOWN = 0,
  PQC_ROPE_NONE = 1,
  PQC_ROPE_HALF = 2,       /* pairs (i, i + rotary_dim / 2) */
  PQC_ROPE_INTERLEAVED = 3 /* pairs (2i, 2i + 1) */
} pqc_rope_layout;

/* Layers of one kind and shape. */
typedef struct pqc_layer_group {
  size_t struct_size;
  pqc_layer_kind kind;
  const uint32_t* layers; /* absolute layer numbers, ascending, < 1024; each in one group only */
  uint32_t layer_count;   /* 1..1024 */
  uint32_t kv_heads;      /* 1..256; at most 64 query heads each */
  uint32_t query_heads;   /* a multiple of kv_heads, at most 1024; query head h reads kv head h /
                             (query_heads / kv_heads) */
  uint32_t key_dim;       /* 32..256, a multiple of 8; 0 for PQC_LAYERS_VALUES */
  uint32_t value_dim;     /* 32..256, a multiple of 8 */
  pqc_dtype dtype;        /* format of the stored rows */
  float softmax_scale;    /* factor of the logits; 0 = 1 / sqrt(key_dim); of no use for values */
  float softcap;          /* logits become softcap * tanh(logits / softcap); 0 = none */
  pqc_rope_layout rope_layout; /* of the first that opens the cache; UNKNOWN joins others */
  double rope_theta;
  uint32_t rotary_dim;        /* rotated dims of a key */
  uint32_t values_alias_keys; /* must be 0 in this version */
  uint32_t window_tokens;     /* PQC_LAYERS_WINDOW: 1..2^30; 0 for other kinds */
} pqc_layer_group;

typedef enum pqc_index_kind {
  PQC_INDEX_DEFAULT = 0, /* the default_index of the pqc_cache_spec that opened the handle */
  PQC_INDEX_PQ = 1, /* product quantization of keys (paper, sections 2.2 and 3.1); needs a build */
  PQC_INDEX_FLAT = 2,    /* exact scores over all keys; needs no build */
  PQC_INDEX_PLUGIN = 3,  /* of a plug-in of the sidecar: pqc_client_index_make; needs a build */
  PQC_INDEX_GRAPH = 4,   /* graphs over keys, by pqc_index_make; needs a build and query samples */
  PQC_INDEX_CLUSTERS = 5 /* of keys, by pqc_index_make; needs a build; selects as flat does */
} pqc_index_kind;

/* Cut of the sub-spaces of pq from a key. Another layout is another index. */
typedef enum pqc_subspace_layout {
  /* s / 2 dims and their partners, where rope_layout is PQC_ROPE_HALF, rotary_dim a multiple of s =
   * key_dim / subspaces and more, and s even */
  PQC_SUBSPACES_PAIRS = 0,
  PQC_SUBSPACES_CONTIGUOUS = 1, /* s consecutive dims */
  PQC_SUBSPACES_WEIGHTED = 2    /* of keys rotated by query samples (rows.h), which it needs */
} pqc_subspace_layout;
#define PQC_INDEX_LAYOUT 0u /* the word of pqc_index.reserved that has it */

typedef struct pqc_index {
  size_t struct_size;
  pqc_index_kind kind;
  uint32_t subspaces; /* pq: m, divides key_dim, at most half of it; 1, 2, 4, 8, 16 are fast */
  uint32_t bits;      /* pq: b in 1..8, 2^b centroids per sub-space; 4..8 are fast. Else 0, as m */
  uint32_t reserved[5]; /* pq: [PQC_INDEX_LAYOUT] is a pqc_subspace_layout, `layout` in refusals */
} pqc_index;

typedef struct pqc_cache_spec {
  size_t struct_size;
  const char* name;              /* 1..128 bytes */
  const char* model_fingerprint; /* 1..256 bytes: weights revision, RoPE, all that changes K or V */
  const pqc_layer_group* groups; /* [group_count] */
  uint32_t group_count;          /* 1..16 */
  /* Memory of the cache's pool, which is promised to it. 0: the pool grows with its use, as long as
   * the tenant's quota allows, and becomes smaller again. */
  uint64_t capacity_bytes;
  pqc_index default_index; /* of calls of this handle; PQC_INDEX_DEFAULT = pq m=4 b=8 */
  /* Ranks (processes) of one model: NULL and zeros for a single process. Each rank opens the cache
   * of the same name with its own layers and kv heads; the fields give their place in the model. */
  const char* rank_group; /* name shared by the ranks, at most 128 bytes */
  uint32_t rank;          /* 0..rank_count - 1 */
  uint32_t rank_count;    /* 1..1024 */
  uint32_t kv_head_begin; /* first of this rank's kv heads, in every layer */
  uint32_t layer_begin;   /* this rank's layers begin at or after this number */
  int32_t numa_node;      /* -1 or 0; others are PQC_UNIMPLEMENTED */
  /* Seconds of the engine's prefill of n tokens in one layer: [0] n^2 + [1] n + [2], each 0..1.
   * Live indexes, and builds with iterations 0, cluster the keys for as long (paper, section 3.3).
   * All 0 = the sidecar's option, or what the open cache has; others replace that. */
  double prefill_seconds[3];
  uint32_t prefill_measured; /* 1: the sidecar measures them from the arrival of chunks; then 0 */
} pqc_cache_spec;

/* Opens the tenant's cache of this name, or joins it when it is open with the same fingerprint and
 * shape; the capacity of an open cache stays as it is. The default index is that of this handle:
 * the engines of a cache may have different ones, for example to compare them. As long as the
 * client's session lasts, the cache stays open. Afterwards it and its cached prefixes remain until
 * it is dropped: by pqc_cache_drop, by an operator, or because the tenant opens another cache for
 * which a limit leaves no room; then the longest unused go first. *cache is set on PQC_OK, and NULL
 * otherwise. Repeating a call is harmless.
 *
 * Errors: PQC_INVALID_ARGUMENT, PQC_UNIMPLEMENTED  a field of `spec`: never succeeds
 *         PQC_FAILED_PRECONDITION  the cache is open with another spec, or this rank does not fit
 *                                  the other ranks (the message names the field): pass the spec
 *                                  that it has, or another name
 *         PQC_RESOURCE_EXHAUSTED   max_caches, max_pool_bytes, the tenant's quota, or less memory
 *                                  on the machine (shortfall in bytes): ask for less, or repeat
 *                                  later
 *         PQC_UNAVAILABLE          also while the sidecar is draining */
PQC_API pqc_status pqc_cache_open(pqc_client* client, const pqc_cache_spec* spec,
                                  pqc_cache** cache);
/* Closes the handle; the cache and its sequences remain in the sidecar. No RPC. NULL does
 * nothing. */
PQC_API void pqc_cache_close(pqc_cache* cache);
/* Drops the cache in the sidecar: its cached prefixes are dropped, its memory returns to the
 * machine, and its name may be opened again, as another cache. The handle remains, and is still to
 * be closed; further calls on it are PQC_NOT_FOUND.
 *
 * Errors: PQC_FAILED_PRECONDITION  a sequence of this or another session is there, or a prefix is
 *                                  pinned (the message names it): drop or unpin it first
 *         PQC_NOT_FOUND            it was dropped before
 *         PQC_UNAVAILABLE          also while a call creates a sequence there: repeat */
PQC_API pqc_status pqc_cache_drop(pqc_cache* cache);

/* ---- Sequences */

typedef struct pqc_sequence pqc_sequence;

/* Creates an empty sequence that belongs to the client's session. *sequence is set on PQC_OK, and
 * NULL otherwise. The client does not repeat the call by itself.
 *
 * Errors: PQC_RESOURCE_EXHAUSTED  max_sequences: drop sequences, or repeat later
 *         PQC_NOT_FOUND           the cache does not exist any more: open it again
 *         PQC_UNAVAILABLE         also while the sidecar is draining */
PQC_API pqc_status pqc_sequence_create(pqc_cache* cache, pqc_sequence** sequence);
/* Drops the sequence in the sidecar and closes the handle, whatever the status is. Rows of finished
 * steps that are not stored yet are discarded. With `retain` (pqc_sequence_options) named tokens
 * remain, in steps of 128, until they are evicted. NULL does nothing. Not repeatable. */
PQC_API pqc_status pqc_sequence_drop(pqc_sequence* sequence);
/* Returns the sidecar's id of the sequence, as pqcachectl prints it; 0 for NULL. Never fails. */
PQC_API uint64_t pqc_sequence_id(const pqc_sequence* sequence);
/* Removes the tokens from `token_count` on in all layers, and their names. Removing all tokens
 * removes the indexes too: a live index starts again with the next rows, another one has to be
 * built again. Leases of other clients on the removed tokens are revoked.
 *
 * Errors: PQC_INVALID_ARGUMENT  token_count is more than the sequence has
 *         PQC_ABORTED           another call changes the sequence, or a step has it: repeat */
PQC_API pqc_status pqc_sequence_truncate(pqc_sequence* sequence, uint64_t token_count);

/* Content key: the engine's name of 128 tokens, for engines that do not know token ids. Keys differ
 * where the tokens differ, and need not cover the tokens before: the sidecar chains them. */
typedef struct pqc_content_key {
  uint8_t bytes[16];
} pqc_content_key;

/* Options of sequences that share prefixes, have a live index, or are tied to other ranks' ones. */
typedef struct pqc_sequence_options {
  size_t struct_size;
  /* Token ids of the prompt, as far as known, at most 2^22. The sequence begins with their longest
   * stored prefix, in steps of 128 tokens, and later sequences may share the rows that it stores
   * under them. A prefill takes memory for these tokens, not for whole segments. */
  const uint32_t* token_ids;
  uint64_t token_id_count;
  const void* extra_key; /* further identity of the prefix (images, adapters): at most 256 bytes */
  uint64_t extra_key_bytes;
  /* Live index: prefill segments are indexed in the background as they fill; the last one when the
   * first step begins or the first token is appended, or by pqc_build_index with the same index,
   * which waits for all of it. The codebooks of a prompt below a segment are trained ahead, layer
   * by layer as its rows arrive, and used when no row has followed: a prompt that arrives in one
   * chunk is then only coded. In a prompt of many chunks a layer is trained again when its rows
   * have doubled, and the rows behind that wait for the first step. */
  uint32_t has_live_index; /* 0 or 1; the next five fields must be 0 when it is 0 */
  /* Iterations of k-means, at most 1000; 0 = at most 10 that fit into the engine's prefill time. */
  uint32_t iterations;
  pqc_index index;       /* pq */
  uint64_t seed;         /* of k-means */
  uint64_t train_tokens; /* sample per codebook and kv head; 0 = the sidecar's default */
  uint64_t sink_tokens;  /* first tokens that are not trained on */
  /* Only for a cache with a rank_group: the name, at most 64 bytes, under which all ranks create
   * their parts of one sequence; 0 bytes = tied to no other. All ranks receive the *token_count of
   * the first rank's call, and their sequences are evicted and pinned together, or none of them;
   * forks are not tied. The key may be used again when the sequences of all ranks have ended. */
  const void* group_key;
  uint64_t group_key_bytes;
  /* Content keys of the prompt's whole steps of 128 tokens, in place of token_ids; at most 2^15. */
  const pqc_content_key* content_keys;
  uint64_t content_key_count;
  /* Creation fails with PQC_NOT_FOUND when fewer tokens of the prompt are stored: for an engine
   * that has planned with the answer of pqc_match_prefix. 0 = any number. */
  uint64_t at_least_tokens;
  /* Named tokens remain as a cached prefix when the sequence, or a fork of it, ends: 1 = always,
   * 2 = never, 0 = as the sidecar's option `retain` says. Sidecars without this choice take 0. */
  uint64_t retain;
} pqc_sequence_options;

/* Creates a sequence with options (NULL = none, as pqc_sequence_create). *token_count (may be NULL)
 * receives the tokens of the shared prefix: the next position to ingest. A prompt that is stored
 * completely is shared completely; an engine that needs the logits of its last token truncates by
 * one and ingests that token's rows again. The client does not repeat the call by itself.
 *
 * Errors: those of pqc_sequence_create, and
 *         PQC_INVALID_ARGUMENT     token_ids, content_keys, extra_key, group_key, or a field of the
 *                                  live index
 *         PQC_NOT_FOUND            at_least_tokens: fewer are stored; nothing is created
 *         PQC_ALREADY_EXISTS       group_key: this rank has, or had, a sequence under it, and not
 *                                  all ranks' have ended: use that one, or another key
 *         PQC_FAILED_PRECONDITION  group_key: the prompt differs from the first rank's, or the
 *                                  sidecar has restarted since its call: drop the sequences of all
 *                                  ranks, and create all of them again */
PQC_API pqc_status pqc_sequence_create_with(pqc_cache* cache, const pqc_sequence_options* options,
                                            pqc_sequence** sequence, uint64_t* token_count);
/* Creates a sequence that shares the first `token_count` tokens of `parent` (0 = all), their names
 * and their indexes, copy-on-write: neither sees later changes of the other. A live index continues
 * in both. *child is set on PQC_OK, and NULL otherwise. The client does not repeat the call.
 *
 * Errors: PQC_OUT_OF_RANGE        token_count is more than the parent has
 *         PQC_ABORTED             another call changes the parent, or a step has it
 *         PQC_RESOURCE_EXHAUSTED  max_sequences
 *         PQC_UNAVAILABLE         also while the sidecar is draining */
PQC_API pqc_status pqc_sequence_fork(pqc_sequence* parent, uint64_t token_count,
                                     pqc_sequence** child);
/* Sets *token_count to the number of tokens of a prompt (token_ids: [token_id_count], at most 2^22)
 * that are stored under these ids and this extra_key: a multiple of 128; in a rank group the least
 * over all ranks. Nothing is reserved: pqc_sequence_create_with may find less. extra_key may be
 * NULL with 0 bytes.
 *
 * Errors: PQC_INVALID_ARGUMENT  token_id_count, extra_key_bytes */
PQC_API pqc_status pqc_match_prefix(pqc_cache* cache, const uint32_t* token_ids,
                                    uint64_t token_id_count, const void* extra_key,
                                    uint64_t extra_key_bytes, uint64_t* token_count);
/* Answer of pqc_admit: when a request fits into the cache's memory. */
typedef enum pqc_verdict {
  PQC_FITS_NOW = 1,
  PQC_FITS_AFTER_EVICTION = 2, /* when cached prefixes and idle sequences are evicted, as needed */
  PQC_FITS_LATER = 3,          /* when sequences in use have ended or shrunk */
  PQC_FITS_NEVER = 4           /* exceeds the cache's limit: a larger cache is needed */
} pqc_verdict;

typedef struct pqc_admission {
  size_t struct_size;
  pqc_verdict verdict;
  uint64_t needed_bytes;    /* memory of the request's rows and index */
  uint64_t bytes_to_evict;  /* PQC_FITS_AFTER_EVICTION: bytes to evict; 0 otherwise */
  uint64_t shortfall_bytes; /* PQC_FITS_LATER, PQC_FITS_NEVER: missing bytes; 0 otherwise */
  uint64_t limit_bytes;     /* bytes that the cache may use at present */
  uint64_t retry_after_ms;  /* PQC_FITS_LATER: when to ask again; 0 otherwise */
} pqc_admission;

/* Asks whether a request of `token_count` prefill tokens (without those that pqc_match_prefix
 * found) and `output_token_count` expected tokens fits, with the default index of the handle and
 * token ids that are known before the rows (else twice the rows may be taken until the prefill
 * ends). Nothing is reserved, so a later call may still be refused.
 *
 * Errors: PQC_OUT_OF_RANGE  more than 2^30 tokens together: never succeeds
 *         PQC_UNAVAILABLE   also while the sidecar is draining */
PQC_API pqc_status pqc_admit(pqc_cache* cache, uint64_t token_count, uint64_t output_token_count,
                             pqc_admission* admission);
/* Protects the sequence from eviction for `ttl_ms` from now (at most 30 days; 0 = ends the
 * protection), and the cached prefix that remains of it when it ends. With a group_key, the
 * sequences of all ranks. Works on a suspended sequence too.
 *
 * Errors: PQC_INVALID_ARGUMENT    ttl_ms
 *         PQC_RESOURCE_EXHAUSTED  no room to record the pin for a restarted worker */
PQC_API pqc_status pqc_sequence_pin(pqc_sequence* sequence, uint64_t ttl_ms);
/* Suspends the sequence (preemption): it keeps its tokens, its leases are revoked, and until
 * pqc_sequence_resume every call that reads or changes it returns PQC_FAILED_PRECONDITION;
 * describe, pin and drop still work. Suspending twice is no error.
 *
 * Errors: PQC_ABORTED  another call changes the sequence, or a step has it */
PQC_API pqc_status pqc_sequence_suspend(pqc_sequence* sequence);
/* Ends a suspension. *token_count (may be NULL) receives the tokens of the sequence. Resuming a
 * sequence that is not suspended is no error. Errors: as pqc_sequence_suspend. */
PQC_API pqc_status pqc_sequence_resume(pqc_sequence* sequence, uint64_t* token_count);

typedef struct pqc_sequence_info {
  size_t struct_size;
  uint64_t token_count;    /* tokens whose rows are complete over all stored layers */
  uint64_t row_bytes;      /* content of the stored rows */
  uint64_t index_bytes;    /* content of the indexes: codes and counts */
  uint64_t codebook_bytes; /* content of the codebooks: centroids */
  uint64_t used_bytes;     /* memory in the pool, shared memory included */
  uint32_t segment_count;
  uint32_t index_count;
} pqc_sequence_info;
/* Fills *info with the sequence's state in the sidecar, by one RPC. Rows of steps that are not
 * stored yet do not count (pqc_sequence_flush waits for them). Works on a suspended sequence
 * too. */
PQC_API pqc_status pqc_sequence_describe(pqc_sequence* sequence, pqc_sequence_info* info);

/* ---- Writing rows */

/* Stores the rows of consecutive prefill tokens of one layer: keys [tokens, kv_heads, key_dim] and
 * values [tokens, kv_heads, value_dim] from position `first_position` on, of any dtype, strides or
 * block table; they are converted to the cache's dtype and copied before the call returns. All or
 * nothing. (With a sidecar of an older release that does not report when it is done with a staging
 * slot, on the local path: the slots of a larger call that precede a failure are stored.)
 *
 * `first_position` is the layer's next position; a range that is stored completely is acknowledged
 * without a change, so repeating a call is harmless (other rows than the stored ones are refused
 * under the sidecar's debug option `compare_repeats`). Rows that follow a built index receive the
 * codes of their nearest centroids under the newest codebook.
 *
 * Errors: PQC_INVALID_ARGUMENT    layer; shape; NaN or infinity (also after the conversion); a gap
 *                                 (store the missing positions first), or a partly stored range
 *         PQC_UNIMPLEMENTED       memory of a GPU: pqc_gpu_ingest
 *         PQC_ABORTED             another call changes the sequence, or a step has it: repeat
 *         PQC_RESOURCE_EXHAUSTED  the pool is full (shortfall in bytes): drop sequences, or repeat
 *                                 later
 *         PQC_UNAVAILABLE         also while the sidecar is draining */
PQC_API pqc_status pqc_ingest(pqc_sequence* sequence, uint32_t layer, uint64_t first_position,
                              const pqc_tensor* keys, const pqc_tensor* values);

/* Rows of the same tokens in one layer. */
typedef struct pqc_layer_rows {
  size_t struct_size;
  uint32_t layer;
  pqc_tensor keys;   /* [tokens, kv_heads, key_dim]; empty (ndim 0) for PQC_LAYERS_VALUES */
  pqc_tensor values; /* [tokens, kv_heads, value_dim] */
} pqc_layer_rows;

/* Appends new tokens to all stored layers at once: layers [layer_count] has every stored layer
 * exactly once, all with the same tokens. The rows and their codes under the newest codebook are
 * stored when the call returns. All or nothing. `first_position` is the sequence's token count; a
 * range that is stored completely is acknowledged without a change. *token_count (may be NULL)
 * receives the sequence's tokens.
 *
 * Errors: those of pqc_ingest (not the draining), and
 *         PQC_INVALID_ARGUMENT  a layer is missing or listed twice; token counts differ; the rows
 *                               exceed the sidecar's max_message_bytes: append fewer at once */
PQC_API pqc_status pqc_append(pqc_sequence* sequence, uint64_t first_position,
                              const pqc_layer_rows* layers, uint32_t layer_count,
                              uint64_t* token_count);

#ifdef __cplusplus
}
#endif

#include "pqcached/attach.h"
#include "pqcached/index.h"
#include "pqcached/model.h"
#include "pqcached/names.h"
#include "pqcached/progress.h"
#include "pqcached/query.h"
#include "pqcached/rows.h"
#include "pqcached/step.h"

#endif /* PQCACHED_CLIENT_H_ */
