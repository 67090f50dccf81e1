// pqcached client: C++20 over page_cache.h. PageCache stores pages of bytes under keys.
//
// Each function calls the function of page_cache.h that its comment names, where its errors and
// thread-safety are written.
//
// Example, which stores a page, and reads it if it is still there:
//
//     auto cache = pqcached::PageCache::Open(client, {.name = "pages", .capacity_bytes = 1 << 30});
//     if (!cache.ok()) return cache.status();
//     pqcached::PageSource source{.key = key, .data = content};
//     if (auto status = cache->Put({&source, 1}); !status.ok()) return status;
//     pqcached::PageTarget target{.key = key, .data = buffer};
//     if (auto status = cache->Get({&target, 1}); !status.ok()) return status;
//     if (target.outcome == PQC_PAGE_FOUND) UsePage(buffer.first(target.size_bytes));
#ifndef PQCACHED_PAGE_CACHE_HPP_
#define PQCACHED_PAGE_CACHE_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pqcached/client.hpp"
#include "pqcached/page_cache.h"

namespace pqcached {

// A page cache to open (pqc_page_cache_spec).
struct PageCacheSpec {
  std::string name;
  uint64_t capacity_bytes = 0;
  uint64_t quota_bytes = 0;
};

// A page to store, and its outcome (pqc_page_source).
struct PageSource {
  std::string_view key;
  std::span<const std::byte> data;
  pqc_page_outcome outcome = PQC_PAGE_UNKNOWN;
};

// Memory for a page, and the outcome (pqc_page_target).
struct PageTarget {
  std::string_view key;
  std::span<std::byte> data;
  uint64_t size_bytes = 0;
  pqc_page_outcome outcome = PQC_PAGE_UNKNOWN;
};

// A page cache (pqc_page_cache). Moves.
class PageCache {
 public:
  // Opens the tenant's page cache of this name (pqc_page_cache_open).
  static Result<PageCache> Open(Client& client, const PageCacheSpec& spec) {
    pqc_page_cache_spec c = PQC_INIT(pqc_page_cache_spec);
    c.name = spec.name.c_str();
    c.capacity_bytes = spec.capacity_bytes;
    c.quota_bytes = spec.quota_bytes;
    pqc_page_cache* cache = nullptr;
    const pqc_status status = pqc_page_cache_open(client.get(), &c, &cache);
    if (status != PQC_OK) return Status(status);
    return PageCache(cache);
  }

  // Drops the page cache in the sidecar (pqc_page_cache_drop).
  Status Drop() { return Status(pqc_page_cache_drop(handle_.get())); }

  // Stores pages, and sets their outcomes (pqc_page_put).
  Status Put(std::span<PageSource> pages) {
    std::vector<pqc_page_source> c(pages.size(), PQC_INIT(pqc_page_source));
    for (size_t i = 0; i < pages.size(); ++i) {
      c[i].key = pages[i].key.data();
      c[i].key_bytes = pages[i].key.size();
      c[i].data = pages[i].data.data();
      c[i].data_bytes = pages[i].data.size();
    }
    const pqc_status status =
        pqc_page_put(handle_.get(), c.data(), static_cast<uint32_t>(c.size()));
    const Status result(status);
    for (size_t i = 0; i < pages.size(); ++i) pages[i].outcome = c[i].outcome;
    return result;
  }

  // Copies pages into the caller's memory, and sets their sizes and outcomes (pqc_page_get).
  Status Get(std::span<PageTarget> pages) {
    std::vector<pqc_page_target> c(pages.size(), PQC_INIT(pqc_page_target));
    for (size_t i = 0; i < pages.size(); ++i) {
      c[i].key = pages[i].key.data();
      c[i].key_bytes = pages[i].key.size();
      c[i].data = pages[i].data.data();
      c[i].capacity_bytes = pages[i].data.size();
    }
    const pqc_status status =
        pqc_page_get(handle_.get(), c.data(), static_cast<uint32_t>(c.size()));
    const Status result(status);
    for (size_t i = 0; i < pages.size(); ++i) {
      pages[i].size_bytes = c[i].size_bytes;
      pages[i].outcome = c[i].outcome;
    }
    return result;
  }

  // Returns the bytes of each key's page, 0 where there is none, and leases the pages for lease_ms
  // (pqc_page_exists).
  Result<std::vector<uint64_t>> Exists(std::span<const std::string_view> keys,
                                       uint64_t lease_ms = 0) {
    std::vector<pqc_page_key> c(keys.size(), PQC_INIT(pqc_page_key));
    for (size_t i = 0; i < keys.size(); ++i) {
      c[i].key = keys[i].data();
      c[i].key_bytes = keys[i].size();
    }
    const pqc_status status =
        pqc_page_exists(handle_.get(), c.data(), static_cast<uint32_t>(c.size()), lease_ms);
    if (status != PQC_OK) return Status(status);
    std::vector<uint64_t> sizes;
    for (const pqc_page_key& key : c) sizes.push_back(key.size_bytes);
    return sizes;
  }

 private:
  struct Closer {
    void operator()(pqc_page_cache* cache) const { pqc_page_cache_close(cache); }
  };

  explicit PageCache(pqc_page_cache* handle) : handle_(handle) {}

  std::unique_ptr<pqc_page_cache, Closer> handle_;
};

}  // namespace pqcached

#endif  // PQCACHED_PAGE_CACHE_HPP_
