// RootRecords: what a store writes down of itself besides the contents of its caches: ids, caches,
// sessions. They stand in kept memory (keeper.h), for the store of the next process.
//
// Nothing that is read back is trusted: what is broken is dropped and counted.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_ROOT_RECORDS_H_
#define PQCACHED_KVSTORE_ROOT_RECORDS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/keeper.h"
#include "kvstore/memfd.h"
#include "kvstore/mutex.h"
#include "kvstore/slot_array.h"
#include "kvstore/store.h"

namespace pqcached::kvstore {

// A cache, and the shape of its record table.
struct CacheRecord {
  uint64_t cache_id = 0;
  std::string tenant;
  CacheSpec spec;
  uint32_t sequence_slots = 0;
  uint64_t heap_bytes = 0;

  std::string pool_name() const;   // of the kept memory
  std::string table_name() const;  // likewise
};

class RootRecords {
 public:
  // Finds the records of an earlier process, or makes new ones. Kept memory of the store that no
  // record names is let go of.
  //
  // Errors: kFailedPrecondition  the records are of another layout_version or record_version (the
  //                              message names both); nothing was changed
  //         those of the keeper
  static absl::StatusOr<std::unique_ptr<RootRecords>> Open(const kernels::Exec& exec,
                                                           DescriptorKeeper& keeper);

  // Whether there were records of an earlier process.
  bool recovered() const { return recovered_; }
  uint32_t dropped_records() const { return dropped_records_; }

  // A new id of a cache or sequence; no earlier process has given it.
  uint64_t NewId();
  // An id was found in records.
  void SeenId(uint64_t id);

  // Of earlier processes.
  const std::vector<CacheRecord>& caches() const { return caches_; }
  // Errors: kResourceExhausted.
  absl::Status AddCache(const CacheRecord& cache);
  void RemoveCache(uint64_t cache_id);

  // See Store.
  absl::Status KeepSession(const KeptSession& session);
  void ForgetSession(std::string_view id);
  std::vector<KeptSession> KeptSessions() const;

  // From now on nothing is written any more: what stands there is for the next process.
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
  void Read();
  void ReadCaches() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReadSessions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Header& header() const { return *reinterpret_cast<Header*>(memory_.data()); }

  const Mapping memory_;
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

#endif  // PQCACHED_KVSTORE_ROOT_RECORDS_H_
