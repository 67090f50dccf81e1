/* pqcached client: copies stored rows back into the engine's own KV memory, so that a prefix that
 * is stored need not be computed again. The conventions of client.h hold.
 *
 * Example, which computes a layer while the rows of the next ones are still being copied:
 *
 *     pqc_token_range tokens = {0, shared};
 *     pqc_operation* load = NULL;
 *     pqc_status status = pqc_load_begin(sequence, tokens, layers, layer_count, request, &load);
 *     for (uint32_t i = 0; status == PQC_OK && i < layer_count; ++i) {
 *       status = pqc_load_wait(load, i + 1, 0);
 *       if (status == PQC_OK) compute_layer(i);
 *     }
 *     pqc_operation_close(load, 0);
 */
#ifndef PQCACHED_LOAD_H_
#define PQCACHED_LOAD_H_

#include "pqcached/client.h"
#include "pqcached/operation.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies the rows of the tokens of a range (not empty) to the engine's memory. layers [layer_count]
 * are any stored layers, each at most once; their keys [tokens, kv_heads, key_dim] and values
 * [tokens, kv_heads, value_dim] are written, in every layout that pqc_ingest reads: contiguous or
 * with strides, paged by a block table or by slots, of any dtype, to which the rows are rounded to
 * nearest even. No block or slot occurs twice, except 0, for tokens that the engine does not keep;
 * its contents are unspecified then. K that is transposed within its blocks has the strides
 * {block, 1, kv_head, dim}.
 *
 * All tokens of all layers must be stored: otherwise the call fails before it writes. The rows of
 * all layers are those of one time: when another call, of any handle, truncates the sequence, or
 * its worker is replaced, the load goes on with the same rows or fails. After any failure but
 * PQC_INVALID_ARGUMENT and PQC_OUT_OF_RANGE the contents of the tensors are unspecified, but for
 * layers for which pqc_load_wait has returned PQC_OK. On the local path the client copies out of
 * mapped memory, on its threads (pqc_client_set_threads), without an RPC, except that the first
 * read or step of a handle acquires a lease.
 *
 * The tensors are memory of the host, or all of them are memory of one GPU (PQC_CUDA). `stream` of
 * the first one, a cudaStream_t, which may be NULL, is then the stream of the call: rows are
 * written after the work that it has received before, by a stream of the client's own. When the
 * call returns, or pqc_load_wait for a layer, the rows are there, and every stream may read them.
 * `blocks` and `slots` are host memory. The GPU reads the sidecar's memory where it can be
 * page-locked for the time of the load; all other rows, and those of the remote path, go through 8
 * MiB of page-locked memory. Block tables and slots need 8 bytes per token of it. No pqc_gpu is
 * needed. The client uses the libpqcached_gpu.so of the first pqc_gpu_open, or else that of the
 * default path (pqc_gpu_options).
 *
 * Errors: PQC_INVALID_ARGUMENT     tokens; a layer, its shape or a stride of 0; a block or slot
 *                                  that occurs twice; a pointer that is not the GPU's or not
 *                                  aligned to its elements; a stream of another GPU, or one that
 *                                  captures
 *         PQC_OUT_OF_RANGE         tokens that are not stored in a layer
 *         PQC_FAILED_PRECONDITION  no GPU, or no libpqcached_gpu.so (pqc_gpu_open)
 *         PQC_UNIMPLEMENTED        layers of kind PQC_LAYERS_VALUES on a GPU; a GPU of a compute
 *                                  capability below 8.0; tensors on a GPU when the first ones are
 *                                  not
 *         PQC_RESOURCE_EXHAUSTED   memory of the GPU or page-locked memory; on the remote path also
 *                                  other calls, for as long as the client waits
 *         PQC_INTERNAL             the GPU has failed
 *         PQC_ABORTED              the sequence was truncated during the call: repeat, if it has
 *                                  the tokens again */
PQC_API pqc_status pqc_load(pqc_sequence* sequence, pqc_token_range tokens,
                            const pqc_layer_rows* layers, uint32_t layer_count);

/* Begins pqc_load, an operation (operation.h) with the `context` of the engine. The layers are
 * copied in the order of the array. Structs, shapes and strides are copied; the tensors' memory,
 * `blocks` and `slots` must stay until the operation has ended, which pqc_operation_cancel makes it
 * do between two layers. The sequence stays free: steps, rows and other loads go on.
 *
 * Errors: PQC_INVALID_ARGUMENT, those about a GPU, and those of pqc_sequence_flush_begin; the other
 * errors of pqc_load are the operation's own */
PQC_API pqc_status pqc_load_begin(pqc_sequence* sequence, pqc_token_range tokens,
                                  const pqc_layer_rows* layers, uint32_t layer_count, void* context,
                                  pqc_operation** operation);

/* Waits until the first `layer_count` layers of a load are in the engine's memory, which may then
 * be used, whatever happens to the others. timeout_ms: as in pqc_operation_wait.
 *
 * Errors: PQC_INVALID_ARGUMENT   `operation` is not a load, or has fewer layers
 *         PQC_DEADLINE_EXCEEDED  about the field "timeout_ms": they are not there yet
 *         and those of the load, if it has ended before these layers */
PQC_API pqc_status pqc_load_wait(pqc_operation* operation, uint32_t layer_count,
                                 uint32_t timeout_ms);

/* A hint that rows will be read soon: on the local path, a thread of the client maps their pages,
 * so that the first load or fetch of them does not wait for page faults. Returns at once; nothing
 * depends on it. On the remote path without an effect.
 *
 * Errors: PQC_INVALID_ARGUMENT  sequence, tokens */
PQC_API pqc_status pqc_prefetch(pqc_sequence* sequence, pqc_token_range tokens);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_LOAD_H_ */
