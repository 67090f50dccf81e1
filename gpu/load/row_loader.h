// RowLoader is the interface through which libpqcached_client has libpqcached_gpu copy stored rows
// to K and V in device memory. It needs no Steps: clients on the remote path load too.
//
// Rows are read in place where they lie in the pool and can be page-locked; all others are copied
// through page-locked staging of the loader. The loader has a stream of its own, so that the copies
// overlap with the engine's work.
//
// What steps.h says about the boundary of the libraries holds. One load at a time. Write is
// thread-safe; no other call may run concurrently with another one.
#ifndef PQCACHED_GPU_LOAD_ROW_LOADER_H_
#define PQCACHED_GPU_LOAD_ROW_LOADER_H_

#include <cstddef>
#include <cstdint>

#include "gpu/steps.h"
#include "kernels/base/dtype.h"

namespace pqcached::gpu {

// Where K or V of a layer is written: element (t, h, i) is at data + token(t) + h * head_stride +
// i * dim_stride, in elements. No two elements have the same place.
struct LoadTensor {
  void* data = nullptr;
  kernels::DType dtype = kernels::DType::kF16;
  // Null: token(t) = t * token_stride. Otherwise [token_count], in memory of the host:
  // token_offsets[t].
  const int64_t* token_offsets = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t dim_stride = 1;
};

struct LoadShape {
  LoadTensor keys;
  LoadTensor values;
  uint64_t token_count = 0;
  uint32_t kv_heads = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  kernels::DType row_dtype = kernels::DType::kF16;
};

// Rows [key | value] without gaps, in memory of the host.
struct LoadRows {
  uint64_t first_token = 0;  // of the layer's tokens
  uint32_t token_count = 0;
  const std::byte* const* rows = nullptr;  // [kv_heads]: the row of the first token
};

class RowLoader {
 public:
  // Checks that `memory` may be a target of this loader.
  // Errors: kInvalid  pageable memory of the host, or memory of another device
  virtual Outcome CheckTarget(const void* memory) = 0;
  // Makes the copies that follow wait for the work that `stream`, a cudaStream_t, has received. The
  // host does not wait.
  // Errors: kInvalid  a stream of another device, or one that captures
  virtual Outcome Follow(void* stream) = 0;
  // Gives the memory in which rows may be read in place, page-locked until the next call with
  // another one. Null: none. Until then, or Close, the memory must stay mapped, and its pages where
  // they are.
  virtual Outcome SetPool(const std::byte* pool, size_t pool_bytes) = 0;

  // Begins a layer, after Finish of the previous one. `token_offsets` may be freed afterwards.
  // Errors: kOutOfMemory  for the offsets
  virtual Outcome Begin(const LoadShape& shape) = 0;
  // Launches the copies of some of the layer's rows, and waits for room in the staging. Rows in the
  // pool must stay until Finish; all others may be freed.
  virtual Outcome Write(const LoadRows& rows) = 0;
  // Waits until all rows of the layer are copied. After an error the loader is closed.
  virtual Outcome Finish() = 0;

  // Waits for the copies and destroys this object.
  virtual void Close() = 0;

 protected:
  ~RowLoader() = default;
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_LOAD_ROW_LOADER_H_
