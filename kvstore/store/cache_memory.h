// CacheMemory: makes the memory of new caches, and recovers that of an earlier process.
//
// With a keeper, the pool and the record table of a cache are kept, and the root records name them.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_STORE_CACHE_MEMORY_H_
#define PQCACHED_KVSTORE_STORE_CACHE_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "kvstore/limits/memory_ledger.h"
#include "kvstore/memory/idle_reserve.h"
#include "kvstore/records/root_records.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/store.h"

namespace pqcached::kvstore {

class CacheMemory {
 public:
  // The arguments outlive this object. `root`: null without a keeper.
  CacheMemory(const StoreOptions& options, const Cache::Shared& shared, RootRecords* root,
              MemoryLedger& ledger)
      : options_(options),
        idle_reserve_(std::make_shared<IdleReserve>(options.idle_reserve_bytes)),
        shared_(shared),
        root_(root),
        ledger_(ledger) {}

  // Creates the memory of a new cache, and records it if there is a keeper. Errors: those of Pool,
  // of the keeper, and of the ledger (kResourceExhausted naming capacity_bytes).
  absl::StatusOr<std::shared_ptr<const Cache>> Make(std::string_view tenant, const CacheSpec& spec);

  // Recovers the memory of a recorded cache, without its sequences. Moves the pool first if that is
  // planned, and adds the result to the report. Errors: kDataLoss if nothing of the cache can be
  // recovered.
  absl::StatusOr<std::shared_ptr<const Cache>> Recover(const CacheRecord& record,
                                                       RecoveryReport& report);

  // Returns the number of bytes that the machine has for pools and that are not promised.
  size_t UnpromisedBytes() const { return ledger_.UnpromisedBytes(); }
  // Returns a new id for a cache or a sequence, which no earlier process has used.
  uint64_t NewId() { return root_ != nullptr ? root_->NewId() : next_id_++; }

 private:
  Pool::Options OptionsOf(const CacheSpec& spec) const;

  const StoreOptions& options_;
  const std::shared_ptr<IdleReserve> idle_reserve_;  // shared with the pools
  const Cache::Shared shared_;
  RootRecords* const root_;
  MemoryLedger& ledger_;
  std::atomic<uint64_t> next_id_ = 1;  // without a keeper
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_CACHE_MEMORY_H_
