#include "kvstore/store/caches.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/model.h"
#include "kvstore/refusal.h"
#include "kvstore/store/cache_rules.h"

namespace pqcached::kvstore {

namespace {

// Returns whether both are one cache: ranks of a group have one each, all under one name.
bool IsSameCache(const CacheSpec& a, const CacheSpec& b) {
  return a.name == b.name && (a.rank.group != b.rank.group || a.rank.rank == b.rank.rank);
}

// Returns the bytes of an open cache that count towards quotas.
size_t GrantedTo(const Caches::CachePointer& cache) { return cache->pool->granted_bytes(); }

// Returns the bytes of a new cache that count towards quotas.
size_t NeededBy(const CacheSpec& spec) {
  return spec.grows ? kMinExtentBytes : spec.capacity_bytes;
}

size_t LeftOf(size_t limit, size_t used) { return limit - std::min(limit, used); }

bool Contains(const std::vector<Caches::CachePointer>& caches, uint64_t cache_id) {
  return std::any_of(caches.begin(), caches.end(), [&](const Caches::CachePointer& cache) {
    return cache->cache_id == cache_id;
  });
}

}  // namespace

void Caches::VisitOthers(
    const Making& wanted,
    absl::FunctionRef<void(std::string_view tenant, const CacheSpec& spec, size_t bytes)> visit)
    const {
  for (const auto& [id, open] : caches_) {
    if (Contains(wanted.replaced, id)) continue;
    visit(open.cache->tenant, open.cache->spec, GrantedTo(open.cache));
  }
  for (const Making& each : making_) {
    if (&each == &wanted) continue;
    size_t bytes = NeededBy(*each.spec);
    for (const CachePointer& replaced : each.replaced) {
      if (caches_.contains(replaced->cache_id)) bytes -= std::min(bytes, GrantedTo(replaced));
    }
    visit(each.tenant, *each.spec, bytes);
  }
}

absl::Status Caches::CheckRanks(const Making& wanted) const {
  const CacheSpec& spec = *wanted.spec;
  absl::Status status;
  if (spec.rank.group.empty()) return status;
  VisitOthers(wanted, [&](std::string_view other_tenant, const CacheSpec& other, size_t) {
    if (!status.ok() || other_tenant != wanted.tenant || other.name != spec.name) return;
    const std::string field = FindIncompatibleField(other, spec);
    if (field.empty()) return;
    status = FailedPrecondition(field, absl::StrCat("does not go with that of rank ",
                                                    other.rank.rank, " of cache ", spec.name));
  });
  return status;
}

absl::Status Caches::CheckCount(const Making& wanted) const {
  uint32_t open = 0, all = 0;
  const auto count = [&](std::string_view tenant) {
    ++all;
    open += tenant == wanted.tenant;
  };
  for (const auto& [id, other] : caches_) {
    if (!Contains(wanted.replaced, id)) count(other.cache->tenant);
  }
  for (const Making& each : making_) {  // one that replaces others counts when these have left
    bool replaces = false;
    for (const CachePointer& replaced : each.replaced) {
      replaces = replaces || caches_.contains(replaced->cache_id);
    }
    if (&each != &wanted && !replaces) count(each.tenant);
  }
  if (all >= options_.max_caches) {
    return ResourceExhausted("max_caches", absl::StrCat(options_.max_caches, " caches are open"),
                             kRetryMemory);
  }
  const uint32_t most = quotas_.Of(wanted.tenant).max_caches;
  if (open < most) return absl::OkStatus();
  return ResourceExhausted("tenant_limits.caches",
                           absl::StrCat("tenant ", std::string(wanted.tenant), " has ", open,
                                        " open caches, and may have ", most),
                           kRetryMemory);
}

Caches::Room Caches::RoomFor(const Making& wanted) const {
  std::map<std::string, size_t, std::less<>> open_bytes;
  size_t all_bytes = 0;
  VisitOthers(wanted, [&](std::string_view other, const CacheSpec&, size_t bytes) {
    open_bytes[std::string(other)] += bytes;
    all_bytes += bytes;
  });
  const auto open_of = [&](std::string_view of) {
    const auto it = open_bytes.find(of);
    return it == open_bytes.end() ? size_t{0} : it->second;
  };
  Room room{.quota_bytes = LeftOf(quotas_.Of(wanted.tenant).max_bytes, open_of(wanted.tenant)),
            .pool_bytes = LeftOf(options_.max_pool_bytes, all_bytes)};
  for (const auto& [name, quota] : quotas_.by_tenant) {
    if (name != wanted.tenant) {
      room.guaranteed_bytes += LeftOf(quota.guaranteed_bytes, open_of(name));
    }
  }
  return room;
}

absl::Status Caches::CheckRoom(std::string_view tenant, size_t bytes, const Room& room) const {
  const auto refusal = [&](const std::string& limit, size_t left, uint32_t retry) {
    return ResourceExhausted("capacity_bytes",
                             absl::StrCat(bytes, "; ", limit, ", ", bytes - left, " bytes short"),
                             retry);
  };
  if (bytes > room.quota_bytes) {
    return refusal(absl::StrCat("the quota of tenant ", std::string(tenant), " is ",
                                quotas_.Of(tenant).max_bytes, " and leaves ", room.quota_bytes),
                   room.quota_bytes, kRetryMemory);
  }
  if (const size_t left = LeftOf(room.pool_bytes, room.guaranteed_bytes);
      room.guaranteed_bytes > 0 && bytes > left) {
    return refusal(absl::StrCat("max_pool_bytes leaves ", left, " in addition to ",
                                room.guaranteed_bytes, " that other tenants are guaranteed"),
                   left, kRetryMemory);
  }
  if (bytes <= room.pool_bytes) return absl::OkStatus();
  return refusal(absl::StrCat("max_pool_bytes leaves ", room.pool_bytes), room.pool_bytes,
                 bytes > options_.max_pool_bytes ? kNoRetry : kRetryMemory);
}

CacheSpec Caches::Resolved(std::string_view tenant, const CacheSpec& spec) const {
  const MutexLock lock(&mutex_);
  return ResolveCapacity(spec, std::min({options_.max_pool_bytes, quotas_.Of(tenant).max_bytes,
                                         kMinExtentBytes << kMaxExtentOrder}));
}

size_t Caches::GrowableBytes(const CachePointer& cache) const {
  if (!cache->spec.grows) return 0;
  const MutexLock lock(&mutex_);
  return RoomFor({.tenant = cache->tenant}).bytes();
}

bool Caches::Grow(const CachePointer& cache, std::span<const size_t> sizes_bytes) {
  if (!cache->spec.grows) return false;
  const MutexLock lock(&mutex_);
  const size_t missing_bytes = cache->pool->MissingGrantBytes(sizes_bytes);
  if (missing_bytes == 0) return false;
  const Room room = RoomFor({.tenant = cache->tenant});
  if (const absl::Status status = CheckRoom(cache->tenant, missing_bytes, room); !status.ok()) {
    cache->pool->RefuseUse(absl::StrCat("; the cache cannot grow: ", TextOf(status)));
    return false;
  }
  const size_t steps = (missing_bytes + kGrantBytes - 1) / kGrantBytes;
  cache->pool->GrantUse(std::min(steps * kGrantBytes, room.bytes()));
  return true;
}

Caches::OpenCache* Caches::FindByName(std::string_view tenant, const CacheSpec& spec) {
  OpenCache* found = nullptr;
  for (auto& [id, open] : caches_) {
    if (open.cache->tenant == tenant && IsSameCache(open.cache->spec, spec)) found = &open;
  }
  return found;
}

bool Caches::IsChanging(std::string_view tenant, const CacheSpec& spec) const {
  for (const Making& each : making_) {
    if (each.tenant == tenant && IsSameCache(*each.spec, spec)) return true;
    for (const CachePointer& replaced : each.replaced) {
      if (replaced->tenant == tenant && IsSameCache(replaced->spec, spec)) return true;
    }
  }
  return false;
}

bool Caches::IsReplaced(uint64_t cache_id) const {
  return std::any_of(making_.begin(), making_.end(),
                     [&](const Making& each) { return Contains(each.replaced, cache_id); });
}

absl::Status Caches::CheckNew(const Making& wanted) const {
  RETURN_IF_ERROR(CheckRanks(wanted));
  RETURN_IF_ERROR(CheckCount(wanted));
  return CheckRoom(wanted.tenant, NeededBy(*wanted.spec), RoomFor(wanted));
}

absl::StatusOr<Caches::Opened> Caches::Open(std::string_view tenant, const CacheSpec& wanted,
                                            std::string_view session) {
  RETURN_IF_ERROR(ValidateCacheSpec(wanted));
  const CacheSpec spec = Resolved(tenant, wanted);
  auto opened = Open({.tenant = tenant, .spec = &spec}, session);
  if (absl::IsResourceExhausted(opened.status())) {
    auto replaced = Replaceable(tenant, spec);
    if (replaced.empty()) return opened;
    opened = Open({.tenant = tenant, .spec = &spec, .replaced = std::move(replaced)}, session);
  }
  if (opened.ok() && spec.prefill.has_value()) opened->cache->prefill_times->Set(*spec.prefill);
  return opened;
}

absl::StatusOr<Caches::Opened> Caches::Open(Making wanted, std::string_view session) {
  const std::string_view tenant = wanted.tenant;
  const CacheSpec& spec = *wanted.spec;
  MakingList::iterator making;
  ASSIGN_OR_RETURN(auto open, Begin(std::move(wanted), session, &making));
  if (open != nullptr) return Opened{.cache = std::move(open)};
  const absl::Cleanup done = [&] {
    const MutexLock lock(&mutex_);
    making_.erase(making);
    changed_.SignalAll();
  };
  RETURN_IF_ERROR(Replace(making));
  ASSIGN_OR_RETURN(auto made, memory_.Make(tenant, spec));
  const MutexLock lock(&mutex_);
  if (spec.grows) made->pool->GrantUse(std::min(kGrantBytes, RoomFor(*making).bytes()));
  caches_.emplace(made->cache_id, OpenCache{.cache = made, .sessions = {std::string(session)}});
  return Opened{.cache = std::move(made), .is_new = true};
}

absl::StatusOr<Caches::CachePointer> Caches::Begin(Making wanted, std::string_view session,
                                                   MakingList::iterator* making) {
  const CacheSpec& spec = *wanted.spec;
  std::vector<CachePointer> candidates;  // the last references end without the lock
  const MutexLock lock(&mutex_);
  const SteadyTime limit = SteadyTime::Now() + kMakingLimit;
  while (IsChanging(wanted.tenant, spec)) {
    if (SteadyTime::Now() >= limit) {
      return Aborted("name", absl::StrCat("another call is opening cache ", spec.name),
                     kRetryConflict);
    }
    changed_.WaitUntil(&mutex_, limit);
  }
  if (OpenCache* const open = FindByName(wanted.tenant, spec)) {
    if (open->cache->spec.kind != spec.kind) {
      return FailedPrecondition(
          "name", absl::StrCat(spec.name, " is the name of an open ",
                               spec.kind == CacheKind::kPages ? "cache of rows" : "page cache"));
    }
    const std::string field = FindDifference(open->cache->spec, spec);
    if (!field.empty()) {
      return FailedPrecondition(field,
                                absl::StrCat("cache ", spec.name, " is open with another value"));
    }
    open->sessions.emplace(session);
    return open->cache;
  }
  candidates = std::exchange(wanted.replaced, {});
  for (const CachePointer& cache : candidates) {  // some may be used by now
    const auto found = caches_.find(cache->cache_id);
    if (found == caches_.end() || !found->second.sessions.empty() || IsReplaced(found->first)) {
      continue;
    }
    wanted.replaced.push_back(cache);
  }
  RETURN_IF_ERROR(CheckNew(wanted));
  *making = making_.insert(making_.end(), std::move(wanted));
  return nullptr;
}

absl::Status Caches::Replace(MakingList::iterator making) {
  std::vector<CachePointer> replaced;
  {
    const MutexLock lock(&mutex_);
    replaced = making->replaced;
  }
  if (replaced.empty()) return absl::OkStatus();
  for (const CachePointer& cache : replaced) dropper_.drop(cache);
  const MutexLock lock(&mutex_);
  making->replaced.clear();
  changed_.SignalAll();
  return CheckNew(*making);
}

std::vector<Caches::CachePointer> Caches::Unused(std::string_view tenant) const {
  std::vector<const OpenCache*> unused;
  const MutexLock lock(&mutex_);
  for (const auto& [id, open] : caches_) {
    if (open.cache->tenant == tenant && open.sessions.empty() && !IsReplaced(id)) {
      unused.push_back(&open);
    }
  }
  std::stable_sort(unused.begin(), unused.end(), [](const OpenCache* a, const OpenCache* b) {
    return a->unused_since < b->unused_since;
  });
  std::vector<CachePointer> caches;
  caches.reserve(unused.size());
  for (const OpenCache* const open : unused) caches.push_back(open->cache);
  return caches;
}

std::vector<Caches::CachePointer> Caches::Replaceable(std::string_view tenant,
                                                      const CacheSpec& spec) const {
  if (!dropper_.drop) return {};
  const size_t machine_bytes = memory_.UnpromisedBytes();  // read without the lock
  Making wanted{.tenant = tenant, .spec = &spec, .replaced = Unused(tenant)};
  const auto suffice = [&] {
    size_t bytes = machine_bytes;
    for (const CachePointer& cache : wanted.replaced) bytes += GrantedTo(cache);
    const MutexLock lock(&mutex_);
    return NeededBy(spec) <= bytes && CheckNew(wanted).ok();
  };
  if (wanted.replaced.empty() || !suffice()) return {};
  const std::set<uint64_t> held = dropper_.held();
  auto candidates = std::exchange(wanted.replaced, {});
  if (suffice()) return {};  // another reason refuses it, or there is room by now
  for (CachePointer& cache : candidates) {
    if (held.contains(cache->cache_id)) continue;
    wanted.replaced.push_back(std::move(cache));
    if (suffice()) return std::move(wanted.replaced);
  }
  return {};
}

void Caches::Leave(std::string_view session) {
  const MutexLock lock(&mutex_);
  for (auto& [id, open] : caches_) {
    const auto used = open.sessions.find(session);
    if (used == open.sessions.end()) continue;
    open.sessions.erase(used);
    open.unused_since = SteadyTime::Now();
  }
}

Caches::CachePointer Caches::Remove(uint64_t cache_id) {
  const MutexLock lock(&mutex_);
  auto node = caches_.extract(cache_id);
  return node.empty() ? nullptr : std::move(node.mapped().cache);
}

void Caches::SetQuotas(TenantQuotas quotas) {
  const MutexLock lock(&mutex_);
  quotas_ = std::move(quotas);
}

void Caches::Restore(CachePointer cache, const std::vector<std::string>& sessions) {
  const MutexLock lock(&mutex_);
  const uint64_t cache_id = cache->cache_id;
  caches_.emplace(cache_id, OpenCache{.cache = std::move(cache),
                                      .sessions = {sessions.begin(), sessions.end()}});
}

absl::StatusOr<Caches::CachePointer> Caches::FindInAnyTenant(uint64_t cache_id) const {
  const MutexLock lock(&mutex_);
  const auto it = caches_.find(cache_id);
  if (it == caches_.end()) return NotFound("cache_id", absl::StrCat("no cache ", cache_id));
  return it->second.cache;
}

absl::StatusOr<Caches::CachePointer> Caches::FindKind(std::string_view tenant, uint64_t cache_id,
                                                      CacheKind kind) const {
  ASSIGN_OR_RETURN(auto found,
                   tenant == kAllTenants ? FindInAnyTenant(cache_id) : Find(tenant, cache_id));
  if (found->spec.kind == kind) return found;
  return FailedPrecondition(
      "cache_id", absl::StrCat("cache ", cache_id,
                               kind == CacheKind::kPages ? " holds rows, not pages"
                                                         : " is a page cache, without sequences"));
}

absl::StatusOr<Caches::CachePointer> Caches::Find(std::string_view tenant,
                                                  uint64_t cache_id) const {
  auto found = FindInAnyTenant(cache_id);
  if (found.ok() && (*found)->tenant != tenant) {
    return NotFound("cache_id", absl::StrCat("no cache ", cache_id));
  }
  return found;
}

std::vector<Caches::CachePointer> Caches::OfTenant(std::string_view tenant) const {
  std::vector<CachePointer> caches;
  const MutexLock lock(&mutex_);
  for (const auto& [id, open] : caches_) {
    if (tenant == kAllTenants || open.cache->tenant == tenant) caches.push_back(open.cache);
  }
  return caches;
}

std::vector<Caches::CachePointer> Caches::OfGroup(const CachePointer& cache) const {
  if (cache->spec.rank.group.empty()) return {cache};
  std::vector<CachePointer> ranks;
  const MutexLock lock(&mutex_);
  for (const auto& [id, open] : caches_) {
    const CachePointer& other = open.cache;
    const bool member = other->tenant == cache->tenant && other->spec.name == cache->spec.name &&
                        other->spec.rank.group == cache->spec.rank.group;
    if (member) ranks.push_back(other);
  }
  return ranks;
}

}  // namespace pqcached::kvstore
