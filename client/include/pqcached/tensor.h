/* pqcached client: tensors of the caller. Included by client.h.
 *
 * Example, the keys of 4096 tokens in fp16, [tokens, kv_heads, key_dim]:
 *
 *     static const uint64_t shape[] = {4096, 8, 128};
 *     pqc_tensor keys = PQC_INIT(pqc_tensor);
 *     keys.ptr = data;
 *     keys.dtype = PQC_F16;
 *     keys.ndim = 3;
 *     keys.shape = shape;
 */
#ifndef PQCACHED_TENSOR_H_
#define PQCACHED_TENSOR_H_

#include "pqcached/status.h"

/* Number format of elements, in the machine's byte order. */
typedef enum pqc_dtype { PQC_F16 = 1, PQC_BF16 = 2, PQC_F32 = 3 } pqc_dtype;
/* PQC_CUDA is for loads, prefill, steps and merges (load.h, gpu.h); PQC_UNIMPLEMENTED elsewhere. */
typedef enum pqc_device { PQC_CPU = 0, PQC_CUDA = 1 } pqc_device;

/* Block table of a paged engine: token t is stored in block blocks[t / block_tokens], at index
 * t % block_tokens of the block. The tensor is then the engine's whole block memory, its K or its V
 * part: shape and strides are [blocks, block_tokens, kv_heads, dim], whatever the order in memory
 * (vLLM's [blocks, 2, tokens, heads, dim] and [blocks, heads, tokens, dim], llama.cpp's transposed
 * V with a token stride of 1), and the tokens of a call are `token_count` of the table from
 * `first_token` on.
 *
 * A slot mapping, in place of the table: token t of the call is at index slots[t] % block_tokens of
 * block slots[t] / block_tokens. */
typedef struct pqc_block_table {
  size_t struct_size;
  const uint32_t* blocks; /* block numbers, [block_count], each below the tensor's shape[0] */
  uint64_t block_count;   /* at least (first_token + token_count) / block_tokens, rounded up */
  uint32_t block_tokens;  /* tokens per block: the tensor's shape[1] */
  uint64_t token_count;   /* tokens of this call */
  uint64_t first_token;   /* token of the table that is the call's first, at most 2^30 */
  /* [token_count], each in [0, shape[0] * block_tokens), or NULL. With it blocks is NULL, and
   * block_count and first_token are 0. In host memory; on a GPU only for loads. */
  const int64_t* slots;
} pqc_block_table;

/* A borrowed array of the caller. Memory and the arrays pointed to must stay until the call
 * returns. */
typedef struct pqc_tensor {
  size_t struct_size;
  void* ptr; /* the element with index 0 in every dimension; written only where a call's result is
                a tensor */
  pqc_device device;
  pqc_dtype dtype;
  uint32_t ndim;          /* 1 to 4 */
  const uint64_t* shape;  /* [ndim]; at most 2^40 elements */
  const int64_t* strides; /* [ndim], in elements; NULL = contiguous, last index fastest */
  const pqc_block_table* block_table; /* NULL = not paged; only for keys and values of rows */
  void* stream;                       /* of the device; must be NULL on PQC_CPU */
  uint64_t reserved[2];               /* must be 0 */
} pqc_tensor;

#endif /* PQCACHED_TENSOR_H_ */
