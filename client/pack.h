// Packs borrowed tensors, whatever their strides and block tables: what both libraries need of them.
//
// Pure; thread-safe.
#ifndef PQCACHED_CLIENT_PACK_H_
#define PQCACHED_CLIENT_PACK_H_

#include <cstddef>
#include <cstdint>

#include "client/remote.h"

namespace pqcached::client {

uint64_t ElementBytes(pqc_dtype dtype);

// How many bytes one index of the first dimension takes, packed.
uint64_t BytesPerIndex(const TensorView& tensor);

// Consecutive indices of the first dimension whose elements lie one stride apart.
struct PackRun {
  const std::byte* data = nullptr;  // of the first one
  uint64_t count = 0;
};

// The longest run that begins at `index`, not beyond `end`.
// REQUIRES: index < end <= shape[0]; no staging.
PackRun RunAt(const TensorView& tensor, uint64_t index, uint64_t end);

// True when dimensions [first, ndim) lie packed, last index fastest.
bool IsPacked(const TensorView& tensor, uint32_t first);

// Writes indices [begin, end) of the first dimension to `to`, contiguously.
void Pack(const TensorView& tensor, uint64_t begin, uint64_t end, std::byte* to);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_PACK_H_
