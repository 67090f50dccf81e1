// Arena: the threads of one kind of work (serving, building) as a ParallelFor. ScratchPool:
// reusable scratch memory.
//
// Concurrent calls share the arena's workers, so that the machine is not oversubscribed.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_MEMORY_ARENA_H_
#define PQCACHED_KVSTORE_MEMORY_ARENA_H_

#include <oneapi/tbb/task_arena.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvstore/mutex.h"
#include "kvstore/read/layer_view.h"

namespace pqcached::kvstore {

class Arena {
 public:
  enum class Priority : uint8_t { kServing, kBuilding };

  // REQUIRES: thread_count >= 1.
  Arena(uint32_t thread_count, Priority priority);

  uint32_t worker_count() const { return worker_count_; }
  // Returns a ParallelFor whose tasks begin in ascending order. REQUIRES: the arena outlives it.
  ParallelFor parallel_for();

 private:
  void Run(uint32_t task_count, const ParallelFor::Body& body);

  const uint32_t worker_count_;
  oneapi::tbb::task_arena arena_;
};

// Pool of scratch buffers. They are reused because fresh memory costs a page fault per 4 KiB.
class ScratchPool {
 public:
  // Owner of a 64-byte aligned buffer with unspecified contents; the destructor returns the memory
  // to the pool.
  class Buffer {
   public:
    Buffer(Buffer&&) = default;
    Buffer& operator=(Buffer&&) = delete;
    ~Buffer();
    std::span<std::byte> bytes() const { return bytes_; }

   private:
    friend class ScratchPool;
    struct AlignedDelete {
      void operator()(std::byte* memory) const;
    };
    struct Block {
      std::unique_ptr<std::byte, AlignedDelete> memory;
      size_t size_bytes = 0;
    };
    Buffer(ScratchPool* pool, Block block, size_t size_bytes)
        : pool_(pool), block_(std::move(block)), bytes_(block_.memory.get(), size_bytes) {}
    ScratchPool* pool_;
    Block block_;
    std::span<std::byte> bytes_;
  };

  // Returns a buffer of `size_bytes`, from the pool when it has one that is large enough.
  // REQUIRES: the pool outlives the buffer.
  Buffer Take(size_t size_bytes);

 private:
  static constexpr size_t kMaxFreeBlocks = 16;
  static constexpr size_t kMaxFreeBlockBytes = size_t{64} << 20;

  void ReturnBlock(Buffer::Block block);

  Mutex mutex_;
  std::vector<Buffer::Block> blocks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_ARENA_H_
