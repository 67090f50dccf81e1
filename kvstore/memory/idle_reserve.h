// IdleReserve: free memory that the pools of a store keep present ahead of its use, all of them
// together (Pool).
//
// The pools that were used lately have equal parts of it: those with a use since the last but one
// interval of theirs. When there is none, all of it is the part of the pool that was used last.
//
// Thread-safe. One lock, held for a constant time but for the end of a part; it may be acquired
// while any other lock is held.
#ifndef PQCACHED_KVSTORE_MEMORY_IDLE_RESERVE_H_
#define PQCACHED_KVSTORE_MEMORY_IDLE_RESERVE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvstore/mutex.h"

namespace pqcached::kvstore {

class IdleReserve {
 public:
  explicit IdleReserve(size_t size_bytes) : size_bytes_(size_bytes) {}

  size_t size_bytes() const { return size_bytes_; }

  // The part of one pool, which begins as one that was used.
  class Part {
   public:
    // The part never exceeds `most_bytes`.
    Part(std::shared_ptr<IdleReserve> reserve, size_t most_bytes);
    ~Part();
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;

    // Returns whether the part can ever be more than 0.
    bool exists() const { return reserve_->size_bytes() > 0; }
    size_t size_bytes() const;
    // Notes a use of the pool. Returns the size of the part.
    size_t Use();
    // Notes the end of an interval of the pool. Returns the size that the part had in it.
    size_t EndInterval();

   private:
    size_t SizeLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(reserve_->mutex_);

    const std::shared_ptr<IdleReserve> reserve_;
    const size_t most_bytes_;
    // Guarded by the reserve's lock.
    uint32_t unused_intervals_ = 0;
    uint64_t last_use_ = 0;
  };

 private:
  const size_t size_bytes_;
  mutable Mutex mutex_;
  std::vector<Part*> parts_ ABSL_GUARDED_BY(mutex_);
  size_t used_lately_ ABSL_GUARDED_BY(mutex_) = 0;  // number of parts
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
  const Part* last_used_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_IDLE_RESERVE_H_
