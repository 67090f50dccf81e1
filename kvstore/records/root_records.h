// RootRecords: the store's records apart from the contents of its caches: ids, caches, sessions.
// They are stored in kept memory (memory/keeper.h), for the store of the next process.
//
// Nothing that is read back is trusted: broken records are dropped and counted.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_RECORDS_ROOT_RECORDS_H_
#define PQCACHED_KVSTORE_RECORDS_ROOT_RECORDS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/limits/granted_memory.h"
#include "kvstore/memory/keeper.h"
#include "kvstore/memory/memfd.h"
#include "kvstore/mutex.h"
#include "kvstore/records/slot_array.h"
#include "kvstore/values.h"

namespace pqcached::kvstore {

// A cache and the shape of its record table.
struct CacheRecord {
  uint64_t cache_id = 0;
  std::string tenant;
  CacheSpec spec;
  uint32_t sequence_slots = 0;
  uint64_t heap_bytes = 0;

  std::string pool_name() const;   // name of the pool's kept memory
  std::string table_name() const;  // name of the record table's kept memory
  // Names of the memory that is kept while the pool is moved: a mark that it shall be, and the
  // complete copy, which then replaces the pool.
  std::string move_plan_name() const;
  std::string moved_pool_name() const;
  // Returns all of these names.
  std::vector<std::string> names() const;
};

class RootRecords {
 public:
  static constexpr char kMemoryName[] = "records";  // of their kept memory

  // Opens the records of an earlier process, or creates new ones. Releases kept pools and record
  // tables that no record names.
  //
  // Errors: kFailedPrecondition  the records are of a layout_version that is not read, or of
  //                              another record_version (the message names both); nothing was
  //                              changed
  //         those of the keeper
  static absl::StatusOr<std::unique_ptr<RootRecords>> Open(const kernels::Exec& exec,
                                                           DescriptorKeeper& keeper);

  // Returns whether an earlier process left records.
  bool recovered() const { return recovered_; }
  uint32_t dropped_records() const { return dropped_records_; }

  // Returns a new id for a cache or sequence, which no earlier process has used.
  uint64_t NewId();
  // Marks an id found in other records as used.
  void MarkIdUsed(uint64_t id);

  // Caches that earlier processes recorded.
  const std::vector<CacheRecord>& caches() const { return caches_; }
  // Errors: kResourceExhausted.
  // Records a cache.
  absl::Status AddCache(const CacheRecord& cache);
  void RemoveCache(uint64_t cache_id);

  // See Store.
  absl::Status KeepSession(const KeptSession& session);
  void ForgetSession(std::string_view id);
  std::vector<KeptSession> KeptSessions() const;

  // Stops all writes: the current records stay for the next process.
  void Detach();

 private:
  struct Header;
  struct Session {
    uint32_t slot = 0;
    bool earlier = false;
    KeptSession session;
  };

  RootRecords(const kernels::Exec& exec, Mapping memory);
  static absl::StatusOr<Mapping> MapKept(DescriptorKeeper& keeper);
  static absl::StatusOr<Mapping> Make(DescriptorKeeper& keeper);
  // Allocates the pages of a slot. Errors: kResourceExhausted.
  absl::Status MakePresent(std::span<const std::byte> slot);
  void Read();
  void ReadCaches() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReadSessions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Header& header() const { return *reinterpret_cast<Header*>(memory_.data()); }

  const Mapping memory_;
  GrantedMemory granted_;
  bool recovered_ = false;
  uint32_t dropped_records_ = 0;
  std::vector<CacheRecord> caches_;

  mutable Mutex mutex_;
  bool detached_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  SlotArray cache_slots_ ABSL_GUARDED_BY(mutex_);
  SlotArray session_slots_ ABSL_GUARDED_BY(mutex_);
  SlotNumbers free_caches_ ABSL_GUARDED_BY(mutex_);
  SlotNumbers free_sessions_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, uint32_t> slot_of_cache_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Session, std::less<>> sessions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_RECORDS_ROOT_RECORDS_H_
