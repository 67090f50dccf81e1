// Pool allocates extents of one cache's memory.
//
// An *extent* is a number of consecutive units (kMinExtentBytes) of a memfd that only the sidecar
// writes. An ExtentRef names it by a block of 2^order units that begins with it and is long enough;
// the units of the block behind the extent belong to others. An Extent object owns an extent: its
// units are free when the object is destroyed. A reader therefore holds the object (or a shared_ptr
// to its owner) while it reads the bytes.
//
// A pool has the pages of its extents, of its part of an *idle reserve* of free memory
// (idle_reserve.h), which a thread keeps present ahead of the next allocations, and of free memory
// that was used a short while ago (ReturnUnusedPages).
//
// Thread-safe. One lock, held for O(extents of a request * log(runs)), while the free runs are
// copied (free_map, and for pages that return), and while the kernel removes pages of a free piece
// of at most 2 MiB; pages are allocated without it.
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
#include "kvstore/memory/extent_ledger.h"
#include "kvstore/memory/free_map.h"
#include "kvstore/memory/idle_reserve.h"
#include "kvstore/memory/memfd.h"
#include "kvstore/memory/run_allocator.h"
#include "kvstore/mutex.h"
#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

class Extent;

// Keeps the pages of a pool in place while it lives (Pool::HoldPages).
using PageHold = std::shared_ptr<const void>;

// The use of a pool that grows is granted in steps of this size.
inline constexpr size_t kGrantBytes = size_t{64} << 20;

struct PoolUsage {
  size_t capacity_bytes = 0;
  size_t used_bytes = 0;  // includes quarantined bytes
  size_t free_bytes = 0;
  size_t largest_free_bytes = 0;  // longest run of free units
  size_t quarantined_bytes = 0;   // possibly still mapped by clients of an earlier process
  // Limit of used_bytes: the quota, or less when memory is short, or what a pool that grows was
  // granted.
  size_t limit_bytes = 0;
};

// Held by shared_ptr: extents keep their pool alive, because a reader may outlive the cache.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  struct Options {
    size_t capacity_bytes = 0;  // > 0, rounded up to kMinExtentBytes
    // Free bytes whose pages a thread allocates ahead of their use, from the first TouchReserve or
    // PauseTouching(false) on; 0 = pages are allocated with the extents only.
    size_t idle_reserve_bytes = 0;
    // A reserve that it shares with other pools, in place of idle_reserve_bytes; null: none.
    std::shared_ptr<IdleReserve> idle_reserve = nullptr;
    // Promise of these bytes; null: pages are allocated without a ledger.
    std::shared_ptr<MemoryPromise> promise = nullptr;
    bool strict = false;  // no other process can ever map the memory for writing, not even root's
    size_t quota_bytes = 0;  // limit of the bytes in use; 0 = capacity_bytes
    bool grows = false;      // the bytes in use are limited to those of GrantUse
    // Descriptor of the memory, at least capacity_bytes long, owned by the caller; -1: a memfd is
    // created.
    int memory = -1;
    // Writable mapping of all of that memory; empty: Create maps it.
    Mapping mapping = {};
    // Records which extents are allocated; null: they are not recorded.
    std::shared_ptr<ExtentLedger> ledger = nullptr;
  };

  // Tries to free memory for extents of these sizes, or to grant more use; returns whether the
  // allocation should be retried.
  using Reclaimer = std::function<bool(std::span<const size_t> sizes_bytes)>;

  // Reserves the memory, with the pages of its first 2 MiB if it has an idle reserve.
  //
  // Errors: kInvalidArgument    capacity_bytes (names the range)
  //         kResourceExhausted  the kernel refuses the memfd or the mapping
  static absl::StatusOr<std::shared_ptr<Pool>> Create(Options options);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Allocates one extent per size, each rounded up to whole units, with all of its pages; all or
  // none. Contents are unspecified. Calls the reclaimer if there is not enough memory.
  //
  // Errors: kResourceExhausted  not enough memory, or no free run is long enough, or the machine
  //                             has no pages for them (the message gives the shortfall in bytes)
  absl::StatusOr<std::vector<Extent>> Allocate(std::span<const size_t> sizes_bytes);

  // Recovery: takes over an extent of `size_bytes` that an earlier process had allocated. Returns
  // nothing if the reference has another order than that size, is out of range, or overlaps another
  // extent.
  std::optional<Extent> Claim(ExtentRef extent, size_t size_bytes);
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

  // Returns the free extents, and the limit of use as if `more_bytes` were granted. Claimed extents
  // do not become free there, whichever sequence releases them.
  FreeMap free_map(size_t more_bytes = 0) const;

  // Returns the use that was granted to a pool that grows, in bytes; the capacity of other pools.
  size_t granted_bytes() const;
  // Returns the number of bytes that have to be granted before extents of these sizes can be
  // allocated; 0 when another limit refuses them, too.
  size_t MissingGrantBytes(std::span<const size_t> sizes_bytes) const;
  // Grants the use of more bytes to a pool that grows, up to its capacity.
  void GrantUse(size_t bytes);
  // Sets the text that errors of Allocate append when the granted use is the limit.
  void RefuseUse(std::string why);
  // Reduces the granted use to the most bytes that were in use since the last but one
  // ReturnUnusedPages, rounded up to kGrantBytes, and at least to the pages that cannot return.
  // at_once: to those that are in use now, not rounded.
  void ReturnGrant(bool at_once = false);

  // Limits the bytes in use from now on to the minimum of `bytes`, the quota and the granted use;
  // allocated extents stay. Errors of Allocate append `why`. SIZE_MAX: only the quota applies.
  void SetUseLimit(size_t bytes, std::string why);
  // Allocates the pages of the idle reserve that are missing, or as many of them as the machine
  // has: those of the free extents that are allocated next.
  void TouchReserve();
  // Pauses or resumes the thread that allocates the pages of the idle reserve. It allocates them
  // when it resumes, and when the last TouchReserve has left some out.
  void PauseTouching(bool paused);
  // Returns pages of free extents to the machine, those first that are allocated last; returns the
  // number of bytes, which exceeds `wanted_bytes` by less than 2 MiB. Returns 0 for a strict pool,
  // whose seal forbids punching holes, and while pages are held.
  size_t ReturnFreePages(size_t wanted_bytes);
  // Returns free pages until the pages of the pool are at most its idle reserve plus 1.2 times the
  // most bytes that were in use since the call before the last one; returns the number of bytes.
  // Called at regular intervals, it thus leaves the pages of a workload that ends and begins within
  // an interval in place, and returns those of one that has ended two intervals ago.
  size_t ReturnUnusedPages();
  // Keeps all pages of the pool in place, also those of free extents, until the returned object is
  // destroyed. Needed by readers that have page-locked a mapping of the pool: their device goes on
  // reading a page that it has locked when another page has replaced it.
  PageHold HoldPages();
  // Ends all holds. REQUIRES: no extent is allocated any more.
  void EndHolds();
  // Returns whether pages stay in the pool at present when they are unused.
  bool KeepsPages() const;
  // Overwrites the contents of all free and quarantined extents with zeros: returns their pages to
  // the machine, or, where pages stay, writes.
  void EraseFree();
  // Returns the number of bytes that no physical page backs.
  size_t absent_bytes() const { return granted_->absent_bytes(); }

  PoolUsage usage() const;
  // Returns the size of the pages where extents are allocated first: 4096, or a huge page size.
  size_t page_bytes() const { return page_bytes_; }
  // Returns the memfd, which the pool owns.
  int descriptor() const { return memfd_.get(); }
  // Returns a read-only descriptor for a client. The memfd has mode 0600 and can neither shrink nor
  // grow, so a client's mapping stays valid whatever other clients do.
  absl::StatusOr<SharedMemory> Share() const;

  std::byte* data(ExtentRef extent) const { return base_ + extent.offset_bytes(); }

 private:
  friend class Extent;

  size_t UseLimit() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t UsedBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return static_cast<size_t>(units_.used_units()) << kExtentUnitShift;
  }
  bool AlwaysKeepsPages() const;
  void ReleaseHold();
  // Grants the bytes in use of an earlier process.
  void GrantClaimed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Pool(FileDescriptor memfd, Options options, size_t page_bytes,
       std::unique_ptr<GrantedMemory> granted);
  void StartTouching();
  void TouchInBackground();
  // Returns free units of `size_bytes` or more, or all, in the order in which they are allocated.
  std::vector<UnitRange> NextFree(size_t size_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Allocates pages of the first `wanted_bytes` of the runs, until touching ends or pauses; returns
  // whether all of them are there.
  bool TouchRuns(std::span<const UnitRange> runs, size_t wanted_bytes);
  absl::StatusOr<std::vector<Extent>> TryAllocate(std::span<const size_t> sizes_bytes);
  // Returns what errors of Allocate append when the limit of use refuses the extents.
  std::string ReasonOfLimit() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts bytes that were allocated, and wakes the toucher when they have used enough of the idle
  // reserve.
  void CountAllocated(size_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Allocates the pages of extents.
  absl::Status MakePresent(std::span<const Extent> extents);
  bool Reclaim(std::span<const size_t> sizes_bytes);
  // Calls `visit` with the free units, those first that are allocated last, in pieces of at most
  // `piece_bytes`, until it returns false.
  void VisitFree(size_t piece_bytes, absl::FunctionRef<bool(UnitRange piece)> visit) const;
  // Returns whether pages back a part of the units.
  bool HasPages(UnitRange units) const;
  // Removes the pages of the units if they are free; returns the number of bytes.
  size_t ReturnPages(UnitRange units);
  bool RemovePages(UnitRange units);
  void EraseQuarantined();
  void FreeQuarantined() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::byte* data(UnitRange units) const { return base_ + units.offset_bytes(); }
  void Free(UnitRange units);

  const FileDescriptor memfd_;
  const Mapping mapping_;
  std::byte* const base_;
  const size_t capacity_bytes_;
  const size_t page_bytes_;
  const std::unique_ptr<GrantedMemory> granted_;
  const std::shared_ptr<ExtentLedger> ledger_;
  const size_t quota_bytes_;
  const bool strict_;
  const bool grows_;

  IdleReserve::Part idle_reserve_;

  mutable Mutex mutex_;
  RunAllocator units_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint32_t, uint32_t> claimed_ ABSL_GUARDED_BY(mutex_);  // unit -> count
  std::vector<UnitRange> quarantine_ ABSL_GUARDED_BY(mutex_);
  uint64_t quarantine_ends_ ABSL_GUARDED_BY(mutex_) = 0;  // calls of EndQuarantine
  size_t limit_bytes_ ABSL_GUARDED_BY(mutex_);
  std::string limit_reason_ ABSL_GUARDED_BY(mutex_);
  size_t granted_bytes_ ABSL_GUARDED_BY(mutex_);
  std::string grant_refusal_ ABSL_GUARDED_BY(mutex_);
  // The most bytes in use since the last ReturnUnusedPages, and between the two calls before.
  size_t peak_used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t previous_peak_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t allocated_since_touch_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t page_holds_ ABSL_GUARDED_BY(mutex_) = 0;
  bool touch_wanted_ ABSL_GUARDED_BY(mutex_) = false;
  bool reserve_touched_ ABSL_GUARDED_BY(mutex_) = false;  // by the last TouchReserve, completely
  CondVar touch_;  // signalled when the toucher has work, or ends

  Mutex reclaim_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  Reclaimer reclaimer_ ABSL_GUARDED_BY(reclaim_mutex_);

  // Written under mutex_; read without it between two pieces.
  std::atomic<bool> stop_touching_ = false;
  std::atomic<bool> touching_paused_ = false;
  std::thread toucher_;  // not joinable without an idle reserve
};

// Owner of one extent. Movable.
class Extent {
 public:
  Extent() = default;
  // `unit_count`: at most those that `ref` names.
  Extent(std::shared_ptr<Pool> pool, ExtentRef ref, uint32_t unit_count)
      : pool_(std::move(pool)), ref_(ref), unit_count_(unit_count) {}
  Extent(Extent&& other) noexcept
      : pool_(std::move(other.pool_)), ref_(other.ref_), unit_count_(other.unit_count_) {
    other.ref_ = ExtentRef{};
  }
  Extent& operator=(Extent&& other) noexcept {
    if (this != &other) {
      Release();
      pool_ = std::move(other.pool_);
      ref_ = other.ref_;
      unit_count_ = other.unit_count_;
      other.ref_ = ExtentRef{};
    }
    return *this;
  }
  ~Extent() { Release(); }

  ExtentRef ref() const { return ref_; }
  UnitRange units() const { return {ref_.unit, ref_.valid() ? unit_count_ : 0}; }
  size_t size_bytes() const { return units().size_bytes(); }
  // REQUIRES: ref().valid().
  std::byte* data() const { return pool_->data(ref_); }

 private:
  void Release() {
    if (ref_.valid()) pool_->Free(units());
    ref_ = ExtentRef{};
    pool_.reset();
  }

  std::shared_ptr<Pool> pool_;
  ExtentRef ref_;
  uint32_t unit_count_ = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_POOL_H_
