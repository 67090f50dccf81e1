// Store's calls on page caches.
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/refusal.h"
#include "kvstore/store/store_impl.h"

namespace pqcached::kvstore {

PageCounts& PageCounts::operator+=(const PageCounts& other) {
  page_count += other.page_count;
  bytes += other.bytes;
  hits += other.hits;
  misses += other.misses;
  evicted_pages += other.evicted_pages;
  evicted_bytes += other.evicted_bytes;
  return *this;
}

absl::StatusOr<OpenedCache> StoreImpl::OpenPageCache(std::string_view tenant,
                                                     const PageCacheSpec& spec,
                                                     std::string_view session) {
  CacheSpec cache;
  cache.name = spec.name;
  cache.capacity_bytes = spec.capacity_bytes;
  cache.quota_bytes = spec.quota_bytes;
  cache.kind = CacheKind::kPages;
  return OpenCache(tenant, cache, session);
}

absl::StatusOr<std::vector<PageOutcome>> StoreImpl::PutPages(std::string_view tenant,
                                                             uint64_t cache_id,
                                                             std::span<const PageSource> pages) {
  for (size_t i = 0; i < pages.size(); ++i) {
    RETURN_IF_ERROR(CheckPageKey(pages[i].key, absl::StrCat("pages[", i, "].key")));
    RETURN_IF_ERROR(CheckPageBytes(pages[i].bytes.size(), absl::StrCat("pages[", i, "].bytes")));
  }
  ASSIGN_OR_RETURN(const auto cache, caches_.FindKind(tenant, cache_id, CacheKind::kPages));
  return cache->pages->Put(pages);
}

absl::StatusOr<std::vector<FoundPage>> StoreImpl::FindPages(std::string_view tenant,
                                                            uint64_t cache_id,
                                                            std::span<const std::string_view> keys,
                                                            absl::Duration lease) {
  for (size_t i = 0; i < keys.size(); ++i) {
    RETURN_IF_ERROR(CheckPageKey(keys[i], absl::StrCat("keys[", i, "]")));
  }
  if (lease < absl::ZeroDuration() || lease > kMaxPageLease) {
    return InvalidArgument("lease",
                           absl::StrCat(absl::ToDoubleSeconds(lease), " s, must lie in [0, ",
                                        absl::ToDoubleSeconds(kMaxPageLease), "]"));
  }
  ASSIGN_OR_RETURN(const auto cache, caches_.FindKind(tenant, cache_id, CacheKind::kPages));
  return cache->pages->Find(keys, lease);
}

std::set<uint64_t> StoreImpl::HeldCaches() const {
  std::set<uint64_t> held = sequences_.HeldCaches();
  for (const auto& cache : caches_.All()) {
    if (cache->pages != nullptr && cache->pages->HasLease()) held.insert(cache->cache_id);
  }
  return held;
}

}  // namespace pqcached::kvstore
