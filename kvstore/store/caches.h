// Caches: the open caches of a store. Opens them under the limits of the store, of the tenants and
// of the machine, and recovers those of an earlier process.
//
// Thread-safe. The one lock is held for operations on lists only, never while memory is made.
#ifndef PQCACHED_KVSTORE_STORE_CACHES_H_
#define PQCACHED_KVSTORE_STORE_CACHES_H_

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/store.h"
#include "kvstore/store/cache_memory.h"

namespace pqcached::kvstore {

class Caches {
 public:
  using CachePointer = std::shared_ptr<const Cache>;

  // The arguments outlive this object.
  Caches(const StoreOptions& options, CacheMemory& memory)
      : options_(options), memory_(memory), quotas_(options.tenant_quotas) {}

  // Open waits at most this long for another thread that makes the same cache.
  static constexpr absl::Duration kMakingLimit = absl::Seconds(5);

  struct Opened {
    CachePointer cache;
    bool is_new = false;
  };
  // Returns the tenant's cache of this name (and rank), or makes it. Waits for another thread that
  // makes it. Holds no lock while the cache is made: the keeper and the kernel may take long.
  // `session` uses the cache from now on; an empty one does until Remove.
  // Errors: those of Store::OpenCache; kAborted after kMakingLimit.
  absl::StatusOr<Opened> Open(std::string_view tenant, const CacheSpec& spec,
                              std::string_view session);
  // Records that a session has ended, and uses no cache any more.
  void Leave(std::string_view session);
  void SetQuotas(TenantQuotas quotas);
  // Adds a recovered cache that these sessions may use.
  void Restore(CachePointer cache, const std::vector<std::string>& sessions);

  // Chooses caches of the tenant that no session uses and for which `may_drop` is true, those first
  // that have been unused longest, so that the limits admit the spec without them; none when all of
  // them do not suffice. Until EndDropping, the limits do not count them, and Open waits for them.
  // `may_drop` is called under the lock.
  std::vector<CachePointer> BeginDropping(std::string_view tenant, const CacheSpec& spec,
                                          absl::FunctionRef<bool(uint64_t cache_id)> may_drop);
  // Ends what BeginDropping began; those that Remove has not removed count again.
  void EndDropping(const std::vector<CachePointer>& caches);

  // Removes a cache from the list; null when it is not there.
  CachePointer Remove(uint64_t cache_id);

  // Finds a cache of the tenant. Errors: kNotFound  cache_id
  absl::StatusOr<CachePointer> Find(std::string_view tenant, uint64_t cache_id) const;
  // Finds a cache of any tenant. Errors: as Find.
  absl::StatusOr<CachePointer> FindInAnyTenant(uint64_t cache_id) const;
  // Returns the caches of a tenant; of all tenants when it is empty.
  std::vector<CachePointer> OfTenant(std::string_view tenant) const;
  std::vector<CachePointer> All() const { return OfTenant({}); }
  // Returns the open caches of the cache's group, including itself; without a group, only itself.
  std::vector<CachePointer> OfGroup(const CachePointer& cache) const;

 private:
  // A cache that a thread is making. Its memory is promised to it already.
  struct Making {
    std::string_view tenant;
    const CacheSpec* spec = nullptr;
  };
  using MakingList = std::list<Making>;
  struct OpenCache {
    CachePointer cache;
    std::set<std::string, std::less<>> sessions;  // that use it
    SteadyTime unused_since = SteadyTime::Now();  // when the last of them left
    bool is_leaving = false;                      // from BeginDropping to EndDropping
  };

  OpenCache* FindByName(std::string_view tenant, const CacheSpec& spec)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether a thread is making or dropping this cache.
  bool IsChanging(std::string_view tenant, const CacheSpec& spec) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks whether the cache may be made, in addition to those that are open or in making. Errors:
  // those of Store::OpenCache.
  absl::Status CheckNew(std::string_view tenant, const CacheSpec& spec) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Calls `visit` with the tenant, the spec and the capacity of all caches that are open or in
  // making, and not leaving.
  void VisitAll(
      absl::FunctionRef<void(std::string_view tenant, const CacheSpec& spec, size_t capacity_bytes)>
          visit) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks that the spec is compatible with the open caches of its group's other ranks. Errors:
  // kFailedPrecondition naming the incompatible field.
  absl::Status CheckRanks(std::string_view tenant, const CacheSpec& spec) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks max_caches, in all and of the tenant. Errors: kResourceExhausted naming the limit.
  absl::Status CheckCount(std::string_view tenant) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks `capacity_bytes` against the tenant's quota and the guarantees of other tenants. Errors:
  // kResourceExhausted naming the quota.
  absl::Status CheckTenantQuota(std::string_view tenant, size_t capacity_bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks `capacity_bytes` against max_pool_bytes. Errors: kResourceExhausted naming
  // capacity_bytes.
  absl::Status CheckMaxPoolBytes(size_t capacity_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const StoreOptions& options_;
  CacheMemory& memory_;
  mutable Mutex mutex_;
  CondVar changed_;  // signalled when an element leaves making_, and when caches are not leaving
  std::map<uint64_t, OpenCache> caches_ ABSL_GUARDED_BY(mutex_);
  MakingList making_ ABSL_GUARDED_BY(mutex_);
  TenantQuotas quotas_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_CACHES_H_
