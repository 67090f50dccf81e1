// Implements pqc_page_cache_* and pqc_page_*.
#include "pqcached/page_cache.h"

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/local/page_transfer.h"
#include "client/step/handles.h"
#include "kernels/base/status_macros.h"

struct pqc_page_cache {
  std::shared_ptr<pqcached::client::ClientState> client;
  uint64_t cache_id = 0;
};

namespace pqcached::client {
namespace {

constexpr uint32_t kPagesVersion = 14;  // of Remote
constexpr uint64_t kMaxPageLeaseMs = 3600000;

pqc_status GetRemoteWithPages(const ClientState& client, Remote** remote) {
  RETURN_IF_ERROR(GetRemote(client, remote));
  if (client.remote_version >= kPagesVersion) return PQC_OK;
  return Fail(PQC_UNIMPLEMENTED, "", "libpqcached_rpc is older, and has no page caches");
}

pqc_status OpenPageCache(pqc_client* client, const pqc_page_cache_spec* caller_spec,
                         pqc_page_cache** cache) {
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache", "must not be NULL");
  *cache = nullptr;
  if (!client) return Fail(PQC_INVALID_ARGUMENT, "client", "must not be NULL");
  pqc_page_cache_spec spec;
  RETURN_IF_ERROR(ReadStruct(caller_spec, "spec", &spec));
  if (!spec.name) return Fail(PQC_INVALID_ARGUMENT, "spec.name", "must not be NULL");
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemoteWithPages(*client->state, &remote));
  auto opened = std::make_unique<pqc_page_cache>();
  opened->client = client->state;
  RefusalBuffer error;
  const pqc_status status = remote->OpenPageCache(spec.name, spec.capacity_bytes, spec.quota_bytes,
                                                  &opened->cache_id, &error);
  if (status != PQC_OK) {
    return Report(status, error,
                  {{"name", "spec.name"},
                   {"capacity_bytes", "spec.capacity_bytes"},
                   {"quota_bytes", "spec.quota_bytes"}});
  }
  *cache = opened.release();
  return PQC_OK;
}

pqc_status DropPageCache(pqc_page_cache* cache) {
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache", "must not be NULL");
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemoteWithPages(*cache->client, &remote));
  const std::string request = "{\"cache_id\": \"" + std::to_string(cache->cache_id) + "\"}";
  RefusalBuffer error;
  const TextSink ignored{nullptr, [](void*, const char*, size_t) {}};
  return Report(remote->AdminJson("DropCache", request.c_str(), ignored, &error), error,
                {{"cache_id", "cache"}});
}

// Checks what all calls on pages take: a handle, and the number of pages.
pqc_status CheckPageCall(const pqc_page_cache* cache, const char* name, uint32_t count) {
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache", "must not be NULL");
  if (count >= 1 && count <= PQC_MAX_PAGES) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s_count", name), "%u, must lie in [1, %d]",
              count, PQC_MAX_PAGES);
}

pqc_status CheckKey(const char* list, uint32_t i, const void* key, uint64_t key_bytes) {
  if (!key) return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s[%u].key", list, i), "NULL");
  if (key_bytes >= PQC_MIN_PAGE_KEY_BYTES && key_bytes <= PQC_MAX_PAGE_KEY_BYTES) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s[%u].key_bytes", list, i),
              "%llu, must lie in [%d, %d]", static_cast<unsigned long long>(key_bytes),
              PQC_MIN_PAGE_KEY_BYTES, PQC_MAX_PAGE_KEY_BYTES);
}

// Returns element `i` of an array whose elements may be of another version.
template <class Struct>
Struct* PageElement(Struct* pages, uint32_t i) {
  return const_cast<Struct*>(ElementOf(pages, i));
}

pqc_status ReadSource(const pqc_page_source* pages, uint32_t i, PutPageItem* item) {
  pqc_page_source page;
  RETURN_IF_ERROR(ReadElement(pages, i, "pages", &page));
  RETURN_IF_ERROR(CheckKey("pages", i, page.key, page.key_bytes));
  if (!page.data) return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("pages[%u].data", i), "NULL");
  if (page.data_bytes == 0 || page.data_bytes > PQC_MAX_PAGE_BYTES) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("pages[%u].data_bytes", i),
                "%llu, must lie in [1, %d]", static_cast<unsigned long long>(page.data_bytes),
                PQC_MAX_PAGE_BYTES);
  }
  *item = {.key = page.key,
           .key_bytes = page.key_bytes,
           .data = page.data,
           .data_bytes = page.data_bytes};
  return PQC_OK;
}

// Passes all items, those that fit through the staging ring of the local path. `staged` returns the
// number of the first items of a span that have passed; call(items, count, error) passes any.
template <class Item, class Staged, class InMessages>
pqc_status PassPages(const pqc_page_cache& cache, Remote& remote, std::vector<Item>& items,
                     uint64_t Item::*bytes, const Staged& staged, const InMessages& in_messages) {
  const std::shared_ptr<LocalSession> local = cache.client->local;
  const std::span<Item> all(items);
  for (uint32_t first = 0; first < all.size();) {
    const std::span<Item> rest = all.subspan(first);
    uint32_t count = static_cast<uint32_t>(rest.size());
    if (local) {
      const PageTransfer transfer{.staging = local->staging(),
                                  .remote = remote,
                                  .cache_id = cache.cache_id,
                                  .timeout_ms = cache.client->timeout_ms};
      if (const uint32_t passed = staged(transfer, rest); passed > 0) {
        first += passed;
        continue;
      }
      if (rest.front().*bytes > transfer.staging.slot_bytes()) count = 1;
      ClearLastError();  // of the attempt
    }
    RefusalBuffer error;
    const pqc_status status = in_messages(rest.data(), count, &error);
    if (status != PQC_OK) {
      return AddToNumber("pages", first, Report(status, error, {{"cache_id", "cache"}}));
    }
    first += count;
  }
  return PQC_OK;
}

pqc_status PutPages(pqc_page_cache* cache, pqc_page_source* pages, uint32_t page_count) {
  RETURN_IF_ERROR(CheckPageCall(cache, "page", page_count));
  std::vector<PutPageItem> items(page_count);
  for (uint32_t i = 0; i < page_count; ++i) RETURN_IF_ERROR(ReadSource(pages, i, &items[i]));
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemoteWithPages(*cache->client, &remote));
  const pqc_status status =
      PassPages(*cache, *remote, items, &PutPageItem::data_bytes, PutThroughStaging,
                [&](PutPageItem* part, uint32_t count, RefusalBuffer* error) {
                  return remote->PutPages(cache->cache_id, part, count, error);
                });
  for (uint32_t i = 0; i < page_count; ++i) {
    pqc_page_source page;
    RETURN_IF_ERROR(ReadElement(pages, i, "pages", &page));
    page.outcome = static_cast<pqc_page_outcome>(items[i].outcome);
    WriteStruct(page, PageElement(pages, i));
  }
  return status;
}

pqc_status ReadTarget(const pqc_page_target* pages, uint32_t i, GetPageItem* item) {
  pqc_page_target page;
  RETURN_IF_ERROR(ReadElement(pages, i, "pages", &page));
  RETURN_IF_ERROR(CheckKey("pages", i, page.key, page.key_bytes));
  if (!page.data && page.capacity_bytes > 0) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("pages[%u].data", i), "NULL");
  }
  *item = {.key = page.key,
           .key_bytes = page.key_bytes,
           .data = page.data,
           .capacity_bytes = page.capacity_bytes};
  return PQC_OK;
}

pqc_page_outcome OutcomeOf(const GetPageItem& item) {
  if (!item.answered) return PQC_PAGE_UNKNOWN;
  if (item.size_bytes == 0) return PQC_PAGE_MISSING;
  return item.size_bytes <= item.capacity_bytes ? PQC_PAGE_FOUND : PQC_PAGE_TOO_LARGE;
}

pqc_status GetPages(pqc_page_cache* cache, pqc_page_target* pages, uint32_t page_count) {
  RETURN_IF_ERROR(CheckPageCall(cache, "page", page_count));
  std::vector<GetPageItem> items(page_count);
  for (uint32_t i = 0; i < page_count; ++i) RETURN_IF_ERROR(ReadTarget(pages, i, &items[i]));
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemoteWithPages(*cache->client, &remote));
  const pqc_status status =
      PassPages(*cache, *remote, items, &GetPageItem::capacity_bytes, GetThroughStaging,
                [&](GetPageItem* part, uint32_t count, RefusalBuffer* error) {
                  return remote->GetPages(cache->cache_id, part, count, error);
                });
  for (uint32_t i = 0; i < page_count; ++i) {
    pqc_page_target page;
    RETURN_IF_ERROR(ReadElement(pages, i, "pages", &page));
    page.size_bytes = items[i].size_bytes;
    page.outcome = OutcomeOf(items[i]);
    WriteStruct(page, PageElement(pages, i));
  }
  return status;
}

pqc_status FindPages(pqc_page_cache* cache, pqc_page_key* keys, uint32_t key_count,
                     uint64_t lease_ms) {
  RETURN_IF_ERROR(CheckPageCall(cache, "key", key_count));
  if (lease_ms > kMaxPageLeaseMs) {
    return Fail(PQC_INVALID_ARGUMENT, "lease_ms", "%llu, must be at most %llu",
                static_cast<unsigned long long>(lease_ms),
                static_cast<unsigned long long>(kMaxPageLeaseMs));
  }
  std::vector<FindPageItem> items(key_count);
  for (uint32_t i = 0; i < key_count; ++i) {
    pqc_page_key key;
    RETURN_IF_ERROR(ReadElement(keys, i, "keys", &key));
    RETURN_IF_ERROR(CheckKey("keys", i, key.key, key.key_bytes));
    items[i] = {.key = key.key, .key_bytes = key.key_bytes};
  }
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemoteWithPages(*cache->client, &remote));
  RefusalBuffer error;
  RETURN_IF_ERROR(
      Report(remote->FindPages(cache->cache_id, items.data(), key_count, lease_ms, &error), error,
             {{"cache_id", "cache"}}));
  for (uint32_t i = 0; i < key_count; ++i) {
    pqc_page_key key;
    RETURN_IF_ERROR(ReadElement(keys, i, "keys", &key));
    key.size_bytes = items[i].size_bytes;
    WriteStruct(key, PageElement(keys, i));
  }
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

extern "C" {

pqc_status pqc_page_cache_open(pqc_client* client, const pqc_page_cache_spec* spec,
                               pqc_page_cache** cache) {
  return pqcached::client::RecordedCall(
      "pqc_page_cache_open",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("client", client).Opens("page_cache", cache);
      },
      [&] { return pqcached::client::OpenPageCache(client, spec, cache); });
}

void pqc_page_cache_close(pqc_page_cache* cache) {
  pqcached::client::RecordedClose("pqc_page_cache_close", "page_cache", cache,
                                  [&] { delete cache; });
}

pqc_status pqc_page_cache_drop(pqc_page_cache* cache) {
  return pqcached::client::RecordedCall(
      "pqc_page_cache_drop",
      [&](pqcached::client::CallRecord& call) { call.Handle("page_cache", cache); },
      [&] { return pqcached::client::DropPageCache(cache); });
}

pqc_status pqc_page_put(pqc_page_cache* cache, pqc_page_source* pages, uint32_t page_count) {
  return pqcached::client::RecordedCall(
      "pqc_page_put",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("page_cache", cache).Number("page_count", page_count);
      },
      [&] { return pqcached::client::PutPages(cache, pages, page_count); });
}

pqc_status pqc_page_get(pqc_page_cache* cache, pqc_page_target* pages, uint32_t page_count) {
  return pqcached::client::RecordedCall(
      "pqc_page_get",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("page_cache", cache).Number("page_count", page_count);
      },
      [&] { return pqcached::client::GetPages(cache, pages, page_count); });
}

pqc_status pqc_page_exists(pqc_page_cache* cache, pqc_page_key* keys, uint32_t key_count,
                           uint64_t lease_ms) {
  return pqcached::client::RecordedCall(
      "pqc_page_exists",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("page_cache", cache).Number("key_count", key_count);
      },
      [&] { return pqcached::client::FindPages(cache, keys, key_count, lease_ms); });
}

}  // extern "C"
