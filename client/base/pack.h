// Packs borrowed tensors of any strides, paged or not. Used by both client libraries.
//
// Pure; thread-safe.
#ifndef PQCACHED_CLIENT_BASE_PACK_H_
#define PQCACHED_CLIENT_BASE_PACK_H_

#include <cstddef>
#include <cstdint>

#include "client/base/remote.h"

namespace pqcached::client {

// Returns the packed size of one index of the first dimension, in bytes.
uint64_t BytesPerIndex(const TensorView& tensor);

// Consecutive indices of the first dimension that are one stride apart in memory.
struct PackRun {
  const std::byte* data = nullptr;  // of the first index
  uint64_t count = 0;
};

// Returns the longest run that begins at `index` and ends at or before `end`.
// REQUIRES: index < end <= shape[0]; no staging.
PackRun RunAt(const TensorView& tensor, uint64_t index, uint64_t end);

// Returns true when dimensions [first, ndim) are contiguous, last index fastest.
bool IsPacked(const TensorView& tensor, uint32_t first);

// Writes indices [begin, end) of the first dimension to `to`, contiguously.
void Pack(const TensorView& tensor, uint64_t begin, uint64_t end, std::byte* to);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_PACK_H_
