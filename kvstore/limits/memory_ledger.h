// MemoryLedger: the memory that a store has promised, and the only way to allocate it.
//
// A *promise* is a number of bytes that one tenant may have for one purpose, such as the capacity
// of a pool. Its memory is allocated in steps. A step is refused while the machine or a control
// group has too little memory, because at the limit of a control group the kernel kills a process
// instead of refusing memory. No memory is promised twice: bytes that are promised to others and
// not allocated yet count as taken.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_LIMITS_MEMORY_LEDGER_H_
#define PQCACHED_KVSTORE_LIMITS_MEMORY_LEDGER_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/mutex.h"
#include "kvstore/values.h"

namespace pqcached::kvstore {

class MemoryPromise;

class MemoryLedger : public std::enable_shared_from_this<MemoryLedger> {
 public:
  // Memory that is left free when memory is allocated, for everything that is not in the ledger.
  static constexpr size_t kMarginBytes = size_t{64} << 20;

  // `memory_root`: see StoreOptions.
  explicit MemoryLedger(std::string memory_root = {}) : memory_root_(std::move(memory_root)) {}

  // Promises `bytes`. The promise ends with the returned object. A promise of 0 bytes is for memory
  // of which only a small part is used: it grows with each allocation.
  //
  // Errors: kResourceExhausted  `field`: the shortfall in bytes; without a pause to repeat after
  //                             when the machine, or the control group, never has so much
  absl::StatusOr<std::shared_ptr<MemoryPromise>> Promise(std::string_view tenant, MemoryUse use,
                                                         size_t bytes, const char* field);
  // Records a promise of an earlier process, or one of 0 bytes, which is not refused.
  std::shared_ptr<MemoryPromise> Restore(std::string_view tenant, MemoryUse use, size_t bytes);

  // Returns the number of bytes that the machine has and that are not promised.
  size_t UnpromisedBytes() const;
  // Returns the promises, added up by tenant and use.
  std::vector<MemoryAccount> Accounts() const;

 private:
  friend class MemoryPromise;

  // Admits the allocation of `bytes`, which are then in progress. Bytes that are not promised may
  // not be those that are promised to others.
  absl::Status BeginAllocation(size_t bytes, bool promised);
  void EndAllocation(size_t bytes);
  void Remove(MemoryPromise* promise);
  size_t UnallocatedBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string memory_root_;
  mutable Mutex mutex_;
  std::set<const MemoryPromise*> promises_ ABSL_GUARDED_BY(mutex_);
  size_t in_progress_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Held by what uses the memory.
class MemoryPromise {
 public:
  ~MemoryPromise() { ledger_->Remove(this); }
  MemoryPromise(const MemoryPromise&) = delete;
  MemoryPromise& operator=(const MemoryPromise&) = delete;

  // Runs `make_present`, which allocates at most `bytes` and returns whether the kernel granted
  // them. The caller then sets the allocated bytes.
  //
  // Errors: kResourceExhausted  too little memory is left (shortfall in bytes), or the kernel
  //                             refuses it (a full file system, huge pages)
  absl::Status Allocate(size_t bytes, absl::FunctionRef<bool()> make_present);
  // Sets the number of bytes that pages back now.
  void SetAllocated(size_t bytes) { allocated_bytes_.store(bytes, std::memory_order_relaxed); }

 private:
  friend class MemoryLedger;

  MemoryPromise(std::shared_ptr<MemoryLedger> ledger, std::string_view tenant, MemoryUse use,
                size_t bytes)
      : ledger_(std::move(ledger)), tenant_(tenant), use_(use), bytes_(bytes) {}

  const std::shared_ptr<MemoryLedger> ledger_;  // outlives the store: readers hold pools
  const std::string tenant_;
  const MemoryUse use_;
  const size_t bytes_;
  std::atomic<size_t> allocated_bytes_ = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_LIMITS_MEMORY_LEDGER_H_
