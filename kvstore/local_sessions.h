// LocalSessions: the sessions of clients on this host, and what each holds: control memory, a staging
// ring, leases.
//
// Thread-safe. One lock, held for map operations; it may be taken by nobody who holds a lease's or a
// sequence's lock.
#ifndef PQCACHED_KVSTORE_LOCAL_SESSIONS_H_
#define PQCACHED_KVSTORE_LOCAL_SESSIONS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/control_memory.h"
#include "kvstore/lease.h"
#include "kvstore/local_session.h"
#include "kvstore/mutex.h"
#include "kvstore/staging.h"

namespace pqcached::kvstore {

class LocalSessions {
 public:
  // max_leases: per session, as max_staging_bytes. lease_timeout, keeper: see StoreOptions.
  LocalSessions(uint32_t max_leases, size_t max_staging_bytes, absl::Duration lease_timeout,
                DescriptorKeeper* keeper = nullptr)
      : max_leases_(max_leases),
        max_staging_bytes_(max_staging_bytes),
        lease_timeout_(lease_timeout),
        keeper_(keeper) {}
  ~LocalSessions();

  // See Store, also for the errors.
  absl::StatusOr<SessionMemory> Open(std::string_view session, uint64_t boot_word);
  absl::StatusOr<SharedMemory> OpenStaging(std::string_view session, uint64_t slot_bytes,
                                           uint32_t slot_count);
  absl::StatusOr<StagedBytes> ClaimStaging(std::string_view session,
                                           const StagingReference& reference);
  absl::StatusOr<AttachedSequence> Attach(std::shared_ptr<const Cache> cache,
                                          std::shared_ptr<Sequence> sequence,
                                          std::string_view session, const LeaseState& lease);
  absl::StatusOr<VersionedImage> Refresh(std::string_view session, const LeaseState& lease);
  absl::Status Detach(std::string_view session, uint64_t lease_id);
  // Revokes those that have expired, too.
  std::vector<LeaseInfo> ListLeases() const;

  // Tells the client by its control memory, then frees what the session held. No error when there is
  // no such session.
  void Drop(std::string_view session);

  size_t staging_bytes() const;

 private:
  struct Session {
    std::shared_ptr<const ControlMemory> control;
    std::shared_ptr<StagingRing> staging;
    std::map<uint64_t, std::shared_ptr<Lease>> leases;
    std::vector<uint32_t> free_words;
    uint32_t used_words = 0;  // below it all words are in use or in free_words
  };
  using Sessions = std::map<std::string, Session, std::less<>>;

  absl::StatusOr<Session*> Find(std::string_view session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<Lease>> FindLease(std::string_view session, uint64_t lease_id);
  // The words and control memory of a lease to come, and its id.
  absl::StatusOr<Lease::Parts> Reserve(std::string_view session);
  absl::StatusOr<std::shared_ptr<Lease>> Begin(std::shared_ptr<const Cache> cache,
                                               std::shared_ptr<Sequence> sequence,
                                               std::string_view session);
  void FreeWords(std::string_view session, uint32_t word_index);
  static void End(Session& session);

  const uint32_t max_leases_;
  const size_t max_staging_bytes_;
  const absl::Duration lease_timeout_;
  DescriptorKeeper* const keeper_;
  mutable Mutex mutex_;
  Sessions sessions_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_lease_id_ ABSL_GUARDED_BY(mutex_) = 1;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_LOCAL_SESSIONS_H_
