// Pool hands out extents of one cache's memory.
//
// An *extent* is 2^order x kMinExtentBytes of contiguous bytes of a memfd that the sidecar alone
// writes. An Extent object owns one: its bytes go back to the free lists when the object dies, so
// whoever may still read them holds the object (or a shared_ptr to its holder).
//
// Thread-safe. One lock, held for O(extents of a request * log(extents)); no call blocks on I/O.
#ifndef PQCACHED_KVSTORE_POOL_H_
#define PQCACHED_KVSTORE_POOL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/buddy.h"
#include "kvstore/memfd.h"
#include "kvstore/mutex.h"
#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

class Extent;

struct PoolUsage {
  size_t capacity_bytes = 0;
  size_t used_bytes = 0;
  size_t free_bytes = 0;
  size_t largest_free_bytes = 0;  // the longest extent that would be granted
};

// shared_ptr: extents keep their pool alive, because a reader may outlast the cache.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  struct Options {
    size_t capacity_bytes = 0;  // > 0, rounded up to kMinExtentBytes
    uint32_t touch_threads =
        1;  // that touch all pages in the background; 0 = pages are touched by their first use
    bool strict = false;  // nobody else can ever write the memory, not even root
  };

  // Reserves the memory; its pages are touched in the background, from the start, where extents
  // come from first.
  //
  // Errors: kInvalidArgument    capacity_bytes (names the range)
  //         kResourceExhausted  the kernel refuses the memfd or the mapping
  static absl::StatusOr<std::shared_ptr<Pool>> Create(const Options& options);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Returns one extent per size, each rounded up to the next power of two; all or none. Contents
  // are unspecified.
  //
  // Errors: kResourceExhausted  not enough memory, or no run is long enough (the message gives the
  // shortfall in bytes)
  absl::StatusOr<std::vector<Extent>> Allocate(std::span<const size_t> sizes_bytes);

  PoolUsage usage() const;
  // Of the pages in force: 4096, or the size of a huge page.
  size_t page_bytes() const { return page_bytes_; }
  // Bytes that the background has not touched yet.
  size_t untouched_bytes() const;
  // The memfd; stays owned by the pool.
  int descriptor() const { return memfd_.get(); }
  // For a client: a descriptor that can only read. The memfd has mode 0600 and can neither shrink nor
  // grow, so that a reader's mapping stays whole whatever other readers do.
  absl::StatusOr<SharedMemory> Share() const;

  std::byte* data(ExtentRef extent) const { return base_ + extent.offset_bytes(); }

 private:
  friend class Extent;

  Pool(FileDescriptor memfd, std::byte* base, size_t capacity_bytes, size_t page_bytes);
  void StartTouching(uint32_t thread_count);
  void Free(ExtentRef extent);

  const FileDescriptor memfd_;
  std::byte* const base_;
  const size_t capacity_bytes_;
  const size_t page_bytes_;

  mutable Mutex mutex_;
  BuddyAllocator buddy_ ABSL_GUARDED_BY(mutex_);

  std::atomic<bool> stop_touching_ = false;
  std::atomic<size_t> next_touch_bytes_ = 0;
  std::vector<std::thread> touchers_;
};

// Owner of one extent. Movable.
class Extent {
 public:
  Extent() = default;
  Extent(std::shared_ptr<Pool> pool, ExtentRef ref) : pool_(std::move(pool)), ref_(ref) {}
  Extent(Extent&& other) noexcept : pool_(std::move(other.pool_)), ref_(other.ref_) {
    other.ref_ = ExtentRef{};
  }
  Extent& operator=(Extent&& other) noexcept {
    if (this != &other) {
      Release();
      pool_ = std::move(other.pool_);
      ref_ = other.ref_;
      other.ref_ = ExtentRef{};
    }
    return *this;
  }
  ~Extent() { Release(); }

  ExtentRef ref() const { return ref_; }
  size_t size_bytes() const { return ref_.size_bytes(); }
  // REQUIRES: ref().valid().
  std::byte* data() const { return pool_->data(ref_); }

 private:
  void Release() {
    if (ref_.valid()) pool_->Free(ref_);
    ref_ = ExtentRef{};
    pool_.reset();
  }

  std::shared_ptr<Pool> pool_;
  ExtentRef ref_;
};

// Bytes that this process may still take: the least of what the machine has available and what the
// cgroup leaves.
size_t AvailableMemoryBytes();

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_POOL_H_
