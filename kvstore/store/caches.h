// Caches: the open caches of a store. Opens them under the limits of the store, of the tenants and
// of the machine, and recovers those of an earlier process.
//
// Thread-safe. The one lock is held for operations on lists only, never while memory is made.
#ifndef PQCACHED_KVSTORE_STORE_CACHES_H_
#define PQCACHED_KVSTORE_STORE_CACHES_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <span>
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

  // Drops caches that no session uses, for a new one. Both are called without the lock.
  struct Dropper {
    // Returns the ids of the caches that may not be dropped.
    std::function<std::set<uint64_t>()> held;
    // Drops the cache, unless it is held by then.
    std::function<void(const CachePointer&)> drop;
  };

  // The arguments outlive this object. Without a dropper, no cache is dropped.
  Caches(const StoreOptions& options, CacheMemory& memory, Dropper dropper = {})
      : options_(options),
        memory_(memory),
        dropper_(std::move(dropper)),
        quotas_(options.tenant_quotas) {}

  // Open waits at most this long for another thread that makes the same cache.
  static constexpr absl::Duration kMakingLimit = absl::Seconds(5);

  struct Opened {
    CachePointer cache;
    bool is_new = false;
  };
  // Returns the tenant's cache of this name (and rank), or makes it. Waits for another thread that
  // makes or drops it. Holds no lock while the cache is made: the keeper and the kernel may take
  // long. `session` uses the cache from now on; an empty one does until Remove.
  //
  // When the limits or the machine refuse a new cache, those of the tenant that no session uses are
  // dropped for it, those first that have been unused longest; none when all do not suffice. They
  // count until Remove, and the new cache counts for what it needs in addition to them.
  //
  // Errors: those of Store::OpenCache; kAborted after kMakingLimit.
  absl::StatusOr<Opened> Open(std::string_view tenant, const CacheSpec& wanted,
                              std::string_view session);
  // Grants more use to the pool of a cache that grows, as far as the limits of the tenant and of
  // the store allow, so that extents of these sizes can be allocated. Returns whether it has.
  bool Grow(const CachePointer& cache, std::span<const size_t> sizes_bytes);
  // Returns the bytes that Grow would grant at most.
  size_t GrowableBytes(const CachePointer& cache) const;
  // Records that a session has ended, and uses no cache any more.
  void Leave(std::string_view session);
  void SetQuotas(TenantQuotas quotas);
  // Adds a recovered cache that these sessions may use.
  void Restore(CachePointer cache, const std::vector<std::string>& sessions);

  // Removes a cache from the list; null when it is not there.
  CachePointer Remove(uint64_t cache_id);

  // Finds a cache of the tenant. Errors: kNotFound  cache_id
  absl::StatusOr<CachePointer> Find(std::string_view tenant, uint64_t cache_id) const;
  // Finds a cache of a kind, of the tenant or of any tenant for kAllTenants. Errors: kNotFound;
  // kFailedPrecondition  the cache is of the other kind
  absl::StatusOr<CachePointer> FindKind(std::string_view tenant, uint64_t cache_id,
                                        CacheKind kind) const;
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
    std::vector<CachePointer> replaced = {};  // caches that are dropped for it
  };
  using MakingList = std::list<Making>;
  struct OpenCache {
    CachePointer cache;
    std::set<std::string, std::less<>> sessions;  // that use it
    SteadyTime unused_since = SteadyTime::Now();  // when the last of them left
  };

  // Bytes that the limits leave.
  struct Room {
    size_t quota_bytes = 0;       // of the tenant
    size_t pool_bytes = 0;        // of max_pool_bytes
    size_t guaranteed_bytes = 0;  // of these: guaranteed to other tenants, and not open yet

    size_t bytes() const {
      return std::min(quota_bytes, pool_bytes - std::min(pool_bytes, guaranteed_bytes));
    }
  };

  // Opens the cache, and drops those that it replaces if it has to be made.
  absl::StatusOr<Opened> Open(Making wanted, std::string_view session);
  // Returns the open cache, or adds `wanted` to making_, sets *making, and returns null.
  absl::StatusOr<CachePointer> Begin(Making wanted, std::string_view session,
                                     MakingList::iterator* making);
  // Drops the caches that the one in making replaces. Errors: those of CheckNew when some stay.
  absl::Status Replace(MakingList::iterator making);
  // Returns the caches to drop, so that the limits and the machine admit the spec without them;
  // none when all that are unused do not suffice.
  std::vector<CachePointer> Replaceable(std::string_view tenant, const CacheSpec& spec) const;
  // Returns the tenant's unused caches, those first that have been unused longest.
  std::vector<CachePointer> Unused(std::string_view tenant) const;
  OpenCache* FindByName(std::string_view tenant, const CacheSpec& spec)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether a thread is making or dropping this cache.
  bool IsChanging(std::string_view tenant, const CacheSpec& spec) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsReplaced(uint64_t cache_id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks whether the cache may be made, in addition to those that are open or in making, without
  // those that it replaces. Errors: those of Store::OpenCache.
  absl::Status CheckNew(const Making& wanted) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Calls `visit` with the tenant, the spec and the bytes, which count towards quotas, of all other
  // caches that are open or in making. A cache in making counts for what it needs in addition to
  // those that it replaces.
  void VisitOthers(
      const Making& wanted,
      absl::FunctionRef<void(std::string_view tenant, const CacheSpec& spec, size_t bytes)> visit)
      const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks that the spec is compatible with the open caches of its group's other ranks. Errors:
  // kFailedPrecondition naming the incompatible field.
  absl::Status CheckRanks(const Making& wanted) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks max_caches, in all and of the tenant. Errors: kResourceExhausted naming the limit.
  absl::Status CheckCount(const Making& wanted) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns what the other caches leave to this one.
  Room RoomFor(const Making& wanted) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks whether the tenant may have these bytes in addition. Errors: kResourceExhausted naming
  // capacity_bytes and the limit.
  absl::Status CheckRoom(std::string_view tenant, size_t bytes, const Room& room) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the spec with the most bytes that the cache may grow to, if its capacity is 0.
  CacheSpec Resolved(std::string_view tenant, const CacheSpec& spec) const;

  const StoreOptions& options_;
  CacheMemory& memory_;
  const Dropper dropper_;
  mutable Mutex mutex_;
  CondVar changed_;  // signalled when an element leaves making_, or replaces no caches any more
  std::map<uint64_t, OpenCache> caches_ ABSL_GUARDED_BY(mutex_);
  MakingList making_ ABSL_GUARDED_BY(mutex_);
  TenantQuotas quotas_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_CACHES_H_
