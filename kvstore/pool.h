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
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/buddy.h"
#include "kvstore/free_map.h"
#include "kvstore/memfd.h"
#include "kvstore/mutex.h"
#include "kvstore/read/layout.h"
#include "kvstore/record_table.h"

namespace pqcached::kvstore {

class Extent;

struct PoolUsage {
  size_t capacity_bytes = 0;
  size_t used_bytes = 0;  // quarantined ones included
  size_t free_bytes = 0;
  size_t largest_free_bytes = 0;  // the longest extent that would be granted
  size_t quarantined_bytes = 0;   // that processes may read which an earlier process told of them
  size_t limit_bytes = 0;         // of used_bytes; capacity_bytes, unless less may be used
};

// shared_ptr: extents keep their pool alive, because a reader may outlast the cache.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  struct Options {
    size_t capacity_bytes = 0;  // > 0, rounded up to kMinExtentBytes
    uint32_t touch_threads =
        1;  // that touch all pages in the background; 0 = pages are touched by their first use
    bool strict = false;     // nobody else can ever write the memory, not even root
    size_t quota_bytes = 0;  // of what may be in use; 0 = capacity_bytes
    // A descriptor of the memory, at least capacity_bytes, that stays the caller's; -1: a memfd is made.
    int memory = -1;
    // Of all of that memory, for writing; empty: it is mapped here.
    Mapping mapping = {};
    // Where it is written down what is handed out; null: nowhere.
    std::shared_ptr<RecordTable> records = nullptr;
  };

  // Makes room for extents of these sizes; returns whether to try again.
  using Reclaimer = std::function<bool(std::span<const size_t> sizes_bytes)>;

  // Reserves the memory; its pages are touched in the background, from the start, where extents
  // come from first.
  //
  // Errors: kInvalidArgument    capacity_bytes (names the range)
  //         kResourceExhausted  the kernel refuses the memfd or the mapping
  static absl::StatusOr<std::shared_ptr<Pool>> Create(Options options);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Returns one extent per size, each rounded up to the next power of two; all or none. Contents
  // are unspecified. Asks the reclaimer when there is not enough.
  //
  // Errors: kResourceExhausted  not enough memory, or no run is long enough (the message gives the
  // shortfall in bytes)
  absl::StatusOr<std::vector<Extent>> Allocate(std::span<const size_t> sizes_bytes);

  // Recovery: an extent that an earlier process handed out and that goes on to be in use. Nothing when it
  // lies outside or overlaps another one.
  std::optional<Extent> Claim(ExtentRef extent);
  // Behind all claims: what the records call in use and nobody has claimed belongs to nobody from now
  // on, until EndQuarantine frees it. Until then, what was claimed joins it when it is freed.
  void BeginQuarantine();
  void EndQuarantine();

  // Who makes room; empty: nobody. One call at a time; returns when none is under way. The caller of
  // Allocate waits, so its locks must not be those that the reclaimer takes.
  void SetReclaimer(Reclaimer reclaimer);

  // What is free now, and may be used. What was claimed stays in use there, whoever frees it.
  FreeMap free_map() const;

  // Lets no more than this be in use from now on, nor more than the quota; what is in use stays.
  // `why` is what refusals say. SIZE_MAX: the quota alone.
  void LimitUse(size_t bytes, std::string why);
  // Stops, or goes on with, touching pages in the background.
  void PauseTouching(bool paused) { touching_paused_.store(paused, std::memory_order_relaxed); }
  // Gives pages of free extents, the longest first, back to the machine; returns how many bytes. None
  // of a strict pool, which nobody may punch holes in.
  size_t ReturnFreePages(size_t wanted_bytes);
  // Bytes that hold no page of the machine.
  size_t absent_bytes() const;

  PoolUsage usage() const;
  // Of the pages in force, where extents come from first: 4096, or the size of a huge page.
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

  Pool(FileDescriptor memfd, Options options, size_t page_bytes);
  void Quarantine(uint32_t begin, uint32_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartTouching(uint32_t thread_count);
  absl::StatusOr<std::vector<Extent>> TryAllocate(std::span<const size_t> sizes_bytes);
  bool Reclaim(std::span<const size_t> sizes_bytes);
  bool ReturnPages(ExtentRef extent);
  void Free(ExtentRef extent);

  const FileDescriptor memfd_;
  const Mapping mapping_;
  std::byte* const base_;
  const size_t capacity_bytes_;
  const size_t page_bytes_;
  const std::shared_ptr<RecordTable> records_;
  const size_t quota_bytes_;

  mutable Mutex mutex_;
  BuddyAllocator buddy_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint32_t, uint32_t> claimed_ ABSL_GUARDED_BY(mutex_);  // unit -> order
  std::vector<ExtentRef> quarantine_ ABSL_GUARDED_BY(mutex_);
  size_t limit_bytes_ ABSL_GUARDED_BY(mutex_);
  std::string limit_reason_ ABSL_GUARDED_BY(mutex_);

  Mutex reclaim_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  Reclaimer reclaimer_ ABSL_GUARDED_BY(reclaim_mutex_);

  std::atomic<bool> stop_touching_ = false;
  std::atomic<bool> touching_paused_ = false;
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

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_POOL_H_
