// Compute: the threads, the scratch memory and the instruction set that all caches of a store
// compute with.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_MEMORY_COMPUTE_H_
#define PQCACHED_KVSTORE_MEMORY_COMPUTE_H_

#include <oneapi/tbb/global_control.h>

#include <cstdint>
#include <optional>
#include <thread>

#include "kernels/base/exec.h"
#include "kvstore/memory/arena.h"
#include "kvstore/read/scratch.h"

namespace pqcached::kvstore {

struct Compute {
  // `threads`: of each arena.
  Compute(const kernels::Exec& instructions, uint32_t threads)
      : exec(instructions),
        serving(threads, Arena::Priority::kServing),
        building(threads, Arena::Priority::kBuilding) {
    if (threads > std::thread::hardware_concurrency()) {
      more_threads.emplace(oneapi::tbb::global_control::max_allowed_parallelism, threads);
    }
  }

  const kernels::Exec exec;
  // Allows more threads than cores, when the options ask for them.
  std::optional<oneapi::tbb::global_control> more_threads;
  Arena serving;
  Arena building;
  ScratchPool scratch;  // of builds and writers
  ReadScratchPool read_scratch;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_COMPUTE_H_
