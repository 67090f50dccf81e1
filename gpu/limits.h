// Limits that several parts of this folder check.
#ifndef PQCACHED_GPU_LIMITS_H_
#define PQCACHED_GPU_LIMITS_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::gpu {

// Lanes (sequences x kv heads) of one launch: the y dimension of a grid.
inline constexpr uint32_t kMaxLanes = 65535;
inline constexpr size_t kMaxRowBytes = 4096;  // key and value of one token in one kv head

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_LIMITS_H_
