// Copies by cache lines, written once for every Vec that has CopyLine, StreamLine and Fence.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_COPY_SIMD_H_
#define PQCACHED_KERNELS_BASE_SIMD_COPY_SIMD_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {
namespace {

PQC_INLINE void CopyBytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes < 64) {
    __builtin_memcpy(to, from, bytes);
    return;
  }
  size_t i = 0;
  for (; i + 64 <= bytes; i += 64) Vec::CopyLine(to + i, from + i);
  if (i < bytes) Vec::CopyLine(to + bytes - 64, from + bytes - 64);
}

// Copies with non-temporal stores for whole cache lines of the target and with plain stores for
// partial lines at both ends. The caller must fence.
PQC_INLINE void StreamBytes(std::byte* to, const std::byte* from, size_t bytes) {
  const size_t before = (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64;
  if (before > 0) {
    const size_t head = before < bytes ? before : bytes;
    __builtin_memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
  }
  size_t i = 0;
  for (; i + 64 <= bytes; i += 64) Vec::StreamLine(to + i, from + i);
  if (i < bytes) __builtin_memcpy(to + i, from + i, bytes - i);
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_COPY_SIMD_H_
