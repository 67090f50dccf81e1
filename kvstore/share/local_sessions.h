// LocalSessions: the sessions of clients on this host, with their control memory, staging rings and
// leases.
//
// Thread-safe. One lock, held for map operations only. Callers that hold the lock of a lease or of
// a sequence must not take it.
#ifndef PQCACHED_KVSTORE_SHARE_LOCAL_SESSIONS_H_
#define PQCACHED_KVSTORE_SHARE_LOCAL_SESSIONS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/local_session.h"
#include "kvstore/memory/pool.h"
#include "kvstore/mutex.h"
#include "kvstore/share/control_memory.h"
#include "kvstore/share/lease.h"
#include "kvstore/share/staging.h"

namespace pqcached::kvstore {

class LocalSessions {
 public:
  // max_leases and max_staging_bytes: limits per session. lease_timeout, keeper, on_expired_leases:
  // see StoreOptions.
  LocalSessions(uint32_t max_leases, size_t max_staging_bytes, absl::Duration lease_timeout,
                MemoryLedger& ledger, DescriptorKeeper* keeper = nullptr, TenantQuotas quotas = {},
                std::function<void(const std::string&, uint32_t)> on_expired_leases = {})
      : max_leases_(max_leases),
        max_staging_bytes_(max_staging_bytes),
        lease_timeout_(lease_timeout),
        ledger_(ledger),
        keeper_(keeper),
        on_expired_leases_(std::move(on_expired_leases)),
        quotas_(std::move(quotas)) {}
  ~LocalSessions();

  // These functions implement those of Store, which documents them and their errors.
  absl::StatusOr<SessionMemory> Open(std::string_view tenant, std::string_view session,
                                     uint64_t boot_word);
  // Notes that the client of a session receives the pool of a cache. Errors: kFailedPrecondition
  // when the session is not local.
  absl::Status NotePool(std::string_view session, uint64_t cache_id);
  absl::Status HoldPool(std::string_view session, uint64_t cache_id, PageHold hold);
  absl::StatusOr<SharedMemory> OpenStaging(std::string_view tenant, std::string_view session,
                                           uint64_t slot_bytes, uint32_t slot_count);
  absl::StatusOr<StagedBytes> ClaimStaging(std::string_view session,
                                           const StagingReference& reference);
  absl::StatusOr<AttachedSequence> Attach(std::shared_ptr<const Cache> cache,
                                          std::shared_ptr<Sequence> sequence,
                                          std::string_view session, const LeaseState& lease);
  absl::StatusOr<VersionedImage> Refresh(std::string_view session, const LeaseState& lease);
  absl::Status Detach(std::string_view session, uint64_t lease_id);
  // Revokes expired leases, then lists those of a tenant's sessions, or all.
  std::vector<LeaseInfo> ListLeases(std::string_view tenant) const;

  // Notifies the client through its control memory, then frees the memory and leases of the
  // session. No error when there is no such session.
  void Drop(std::string_view session);

  void SetQuotas(TenantQuotas quotas);

  // Returns the bytes of the rings of a tenant, or of all.
  size_t staging_bytes(std::string_view tenant) const;

 private:
  struct Session {
    bool IsOf(std::string_view asked) const { return asked == kAllTenants || asked == tenant; }
    size_t staging_bytes() const { return staging == nullptr ? 0 : staging->size_bytes(); }
    size_t all_staging_bytes() const { return staging_bytes() + opening_bytes; }

    std::string tenant;
    std::shared_ptr<MemoryPromise> control_promise;
    std::shared_ptr<const ControlMemory> control;
    std::shared_ptr<StagingRing> staging;
    size_t opening_bytes = 0;  // of a ring that a thread is making
    std::map<uint64_t, std::shared_ptr<Lease>> leases;
    std::map<uint64_t, PageHold> holds;  // by cache id
    std::vector<uint32_t> free_words;
    uint32_t used_words = 0;  // words below it are in use or in free_words
  };
  using Sessions = std::map<std::string, Session, std::less<>>;

  // Notes that a ring of this size is being made for the session, if it has none and the tenant may
  // have another one. Returns its control memory.
  absl::StatusOr<std::shared_ptr<const ControlMemory>> BeginStaging(std::string_view session,
                                                                    size_t bytes);
  absl::StatusOr<SharedMemory> MakeStaging(std::string_view tenant, std::string_view session,
                                           uint64_t slot_bytes, uint32_t slot_count,
                                           const std::shared_ptr<const ControlMemory>& control);
  absl::StatusOr<Session*> Find(std::string_view session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<Lease>> FindLease(std::string_view session, uint64_t lease_id);
  // Reserves words for a new lease; returns their index, the control memory and the lease id.
  absl::StatusOr<Lease::Parts> Reserve(std::string_view session);
  absl::StatusOr<std::shared_ptr<Lease>> Begin(std::shared_ptr<const Cache> cache,
                                               std::shared_ptr<Sequence> sequence,
                                               std::string_view session);
  void FreeWords(std::string_view session, uint32_t word_index);
  static void End(Session& session);

  const uint32_t max_leases_;
  const size_t max_staging_bytes_;
  const absl::Duration lease_timeout_;
  MemoryLedger& ledger_;
  DescriptorKeeper* const keeper_;
  const std::function<void(const std::string& session, uint32_t count)> on_expired_leases_;
  mutable Mutex mutex_;
  Sessions sessions_ ABSL_GUARDED_BY(mutex_);
  TenantQuotas quotas_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_lease_id_ ABSL_GUARDED_BY(mutex_) = 1;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SHARE_LOCAL_SESSIONS_H_
