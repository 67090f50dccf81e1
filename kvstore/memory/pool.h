// Pool allocates extents of one cache's memory.
//
// An *extent* is 2^order x kMinExtentBytes of contiguous bytes of a memfd that only the sidecar
// writes. An Extent object owns one: its bytes return to the free lists when the object is
// destroyed. A reader therefore holds the object (or a shared_ptr to its owner) while it reads the
// bytes.
//
// Thread-safe. One lock, held for O(extents of a request * log(extents)); pages are allocated
// without it.
#ifndef PQCACHED_KVSTORE_MEMORY_POOL_H_
#define PQCACHED_KVSTORE_MEMORY_POOL_H_

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

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kvstore/limits/granted_memory.h"
#include "kvstore/limits/memory_ledger.h"
#include "kvstore/memory/buddy.h"
#include "kvstore/memory/extent_ledger.h"
#include "kvstore/memory/free_map.h"
#include "kvstore/memory/memfd.h"
#include "kvstore/mutex.h"
#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

class Extent;

struct PoolUsage {
  size_t capacity_bytes = 0;
  size_t used_bytes = 0;  // includes quarantined bytes
  size_t free_bytes = 0;
  size_t largest_free_bytes = 0;  // longest extent that could be allocated
  size_t quarantined_bytes = 0;   // possibly still mapped by clients of an earlier process
  size_t limit_bytes = 0;         // limit of used_bytes: the quota, or less when memory is short
};

// Held by shared_ptr: extents keep their pool alive, because a reader may outlive the cache.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  struct Options {
    size_t capacity_bytes = 0;  // > 0, rounded up to kMinExtentBytes
    // Threads that allocate all pages in the background; 0 = only those of allocated extents.
    uint32_t touch_threads = 1;
    // Create allocates the pages of the first touch_first_bytes before it returns, or as many of
    // them as the machine has.
    size_t touch_first_bytes = 0;
    // Promise of these bytes; null: pages are allocated without a ledger.
    std::shared_ptr<MemoryPromise> promise = nullptr;
    bool strict = false;  // no other process can ever map the memory for writing, not even root's
    size_t quota_bytes = 0;  // limit of the bytes in use; 0 = capacity_bytes
    // Descriptor of the memory, at least capacity_bytes long, owned by the caller; -1: a memfd is
    // created.
    int memory = -1;
    // Writable mapping of all of that memory; empty: Create maps it.
    Mapping mapping = {};
    // Records which extents are allocated; null: they are not recorded.
    std::shared_ptr<ExtentLedger> ledger = nullptr;
  };

  // Tries to free memory for extents of these sizes; returns whether the allocation should be
  // retried.
  using Reclaimer = std::function<bool(std::span<const size_t> sizes_bytes)>;

  // Reserves the memory. Its pages are allocated in the background from the start, where extents
  // are allocated first.
  //
  // Errors: kInvalidArgument    capacity_bytes (names the range)
  //         kResourceExhausted  the kernel refuses the memfd or the mapping
  static absl::StatusOr<std::shared_ptr<Pool>> Create(Options options);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Allocates one extent per size, each rounded up to the next power of two, with all of its pages;
  // all or none. Contents are unspecified. Calls the reclaimer if there is not enough memory.
  //
  // Errors: kResourceExhausted  not enough memory, or no free run is long enough, or the machine
  //                             has no pages for them (the message gives the shortfall in bytes)
  absl::StatusOr<std::vector<Extent>> Allocate(std::span<const size_t> sizes_bytes);

  // Recovery: takes over an extent that an earlier process had allocated. Returns nothing if it is
  // out of range or overlaps another extent.
  std::optional<Extent> Claim(ExtentRef extent);
  // Recovery, after all claims: quarantines the units that the ledger marks as used and that no
  // Claim took over. Until EndQuarantine, freed extents that were claimed are quarantined, too.
  void BeginQuarantine();
  // Frees all quarantined extents, and quarantines none from now on. Returns whether this has
  // changed anything.
  bool EndQuarantine();

  // Sets the reclaimer; empty: none. The reclaimer runs in one thread at a time. Returns when no
  // reclaimer call is in progress. The caller of Allocate waits for the reclaimer, so it must not
  // hold locks that the reclaimer acquires.
  void SetReclaimer(Reclaimer reclaimer);

  // Returns the free extents and the limit of use. Claimed extents do not become free there,
  // whichever sequence releases them.
  FreeMap free_map() const;

  // Limits the bytes in use from now on to the minimum of `bytes` and the quota; allocated extents
  // stay. Errors of Allocate append `why`. SIZE_MAX: only the quota applies.
  void SetUseLimit(size_t bytes, std::string why);
  // Pauses or resumes allocating pages in the background.
  void PauseTouching(bool paused) { touching_paused_.store(paused, std::memory_order_relaxed); }
  // Returns pages of free extents, the longest extents first, to the machine; returns the number of
  // bytes. Returns 0 for a strict pool, whose seal forbids punching holes.
  size_t ReturnFreePages(size_t wanted_bytes);
  // Overwrites the contents of all free and quarantined extents with zeros: returns their pages to
  // the machine, or, in a strict pool, writes.
  void EraseFree();
  // Returns the number of bytes that no physical page backs.
  size_t absent_bytes() const { return granted_->absent_bytes(); }

  PoolUsage usage() const;
  // Returns the size of the pages where extents are allocated first: 4096, or a huge page size.
  size_t page_bytes() const { return page_bytes_; }
  // Returns the number of bytes whose pages this object has not allocated yet.
  size_t untouched_bytes() const { return capacity_bytes_ - granted_->present_bytes(); }
  // Returns the memfd, which the pool owns.
  int descriptor() const { return memfd_.get(); }
  // Returns a read-only descriptor for a client. The memfd has mode 0600 and can neither shrink nor
  // grow, so a client's mapping stays valid whatever other clients do.
  absl::StatusOr<SharedMemory> Share() const;

  std::byte* data(ExtentRef extent) const { return base_ + extent.offset_bytes(); }

 private:
  friend class Extent;

  Pool(FileDescriptor memfd, Options options, size_t page_bytes,
       std::unique_ptr<GrantedMemory> granted);
  void Quarantine(uint32_t begin, uint32_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartTouching(uint32_t thread_count);
  void TouchInBackground();
  void TouchNow(size_t size_bytes);  // the first size_bytes, as far as memory is granted
  absl::StatusOr<std::vector<Extent>> TryAllocate(std::span<const size_t> sizes_bytes);
  // Allocates the pages of extents.
  absl::Status MakePresent(std::span<const Extent> extents);
  bool Reclaim(std::span<const size_t> sizes_bytes);
  // Calls `visit` with the free extents, the longest first, in pieces, until it returns false.
  void VisitFree(absl::FunctionRef<bool(ExtentRef piece)> visit) const;
  // Returns whether pages back a part of the extent.
  bool HasPages(ExtentRef extent) const;
  bool ReturnPages(ExtentRef extent);
  bool RemovePages(ExtentRef extent);
  void EraseQuarantined();
  void FreeQuarantined() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Free(ExtentRef extent);

  const FileDescriptor memfd_;
  const Mapping mapping_;
  std::byte* const base_;
  const size_t capacity_bytes_;
  const size_t page_bytes_;
  const std::unique_ptr<GrantedMemory> granted_;
  const std::shared_ptr<ExtentLedger> ledger_;
  const size_t quota_bytes_;

  mutable Mutex mutex_;
  BuddyAllocator buddy_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint32_t, uint32_t> claimed_ ABSL_GUARDED_BY(mutex_);  // unit -> order
  std::vector<ExtentRef> quarantine_ ABSL_GUARDED_BY(mutex_);
  uint64_t quarantine_ends_ ABSL_GUARDED_BY(mutex_) = 0;  // calls of EndQuarantine
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

#endif  // PQCACHED_KVSTORE_MEMORY_POOL_H_
