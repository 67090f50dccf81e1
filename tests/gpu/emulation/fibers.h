// RunGrid: one kernel launch on the CPU.
//
// Shared by the files of the emulation; single-thread.
#ifndef PQCACHED_TESTS_GPU_EMULATION_FIBERS_H_
#define PQCACHED_TESTS_GPU_EMULATION_FIBERS_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace pqcached::emulation {

struct Grid {
  dim3 blocks;
  dim3 threads;
  size_t shared_bytes = 0;
};

// Runs `kernel` once in every thread of the grid. Bit 0 of `order` turns the order of the blocks
// round, bit 1 that of the threads.
void RunGrid(const Grid& grid, const std::function<void()>& kernel, uint64_t order);

}  // namespace pqcached::emulation

#endif  // PQCACHED_TESTS_GPU_EMULATION_FIBERS_H_
