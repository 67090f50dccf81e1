// ScratchCutter returns consecutive 64-byte aligned parts of a kernel's scratch.
#ifndef PQCACHED_KERNELS_BASE_SCRATCH_CUTTER_H_
#define PQCACHED_KERNELS_BASE_SCRATCH_CUTTER_H_

#include <cstddef>
#include <span>

#include "kernels/base/check.h"

namespace pqcached::kernels {

inline constexpr size_t kScratchAlignment = 64;

constexpr size_t ScratchAligned(size_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

class ScratchCutter {
 public:
  // REQUIRES: scratch is 64-byte aligned and outlives the parts.
  explicit ScratchCutter(std::span<std::byte> scratch) : rest_(scratch) {}

  // Returns `count` elements with unspecified contents. REQUIRES: they fit into the remaining
  // scratch.
  template <typename T>
  std::span<T> Take(size_t count) {
    const size_t bytes = ScratchAligned(count * sizeof(T));
    PQC_CHECK(bytes <= rest_.size());
    const std::span<T> part(reinterpret_cast<T*>(rest_.data()), count);
    rest_ = rest_.subspan(bytes);
    return part;
  }

 private:
  std::span<std::byte> rest_;
};

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SCRATCH_CUTTER_H_
