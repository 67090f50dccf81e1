// RpcRemote: opens page caches; stores, reads and finds their pages.
#include <algorithm>
#include <cstring>
#include <string>

#include "client/rpc/refusal.h"
#include "client/rpc/rpc_remote.h"
#include "kernels/base/status_macros.h"
#include "pqcached/page_cache.h"

namespace pqcached::client {
namespace {

// Bytes of pages in one message, apart from a single larger page.
constexpr uint64_t kPagePayloadBytes = 16 << 20;
// Bytes of a message for each page, apart from its content.
constexpr uint64_t kPageOverheadBytes = 128;

// Returns the status with the caller's number of a page in place of its number in the request.
grpc::Status RenumberPage(const grpc::Status& status, uint32_t first) {
  return RenumberItem(
      status, [first](uint32_t number) { return first + number; }, "pages");
}

void SetStaging(const StagingPlace& place, v1::StagingReference* staging) {
  staging->set_slot(place.slot);
  staging->set_offset_bytes(place.offset_bytes);
  staging->set_size_bytes(place.size_bytes);
  staging->set_generation(place.generation);
}

grpc::Status BadPages(const std::string& what) {
  return {grpc::StatusCode::INTERNAL, "the sidecar's answer is invalid: " + what};
}

}  // namespace

pqc_status RpcRemote::OpenPageCache(const char* name, uint64_t capacity_bytes, uint64_t quota_bytes,
                                    uint64_t* cache_id, RefusalBuffer* error) noexcept {
  return Finish("OpenPageCache", error, [&] {
    v1::OpenPageCacheRequest request;
    v1::OpenPageCacheResponse response;
    request.set_name(name);
    request.set_capacity_bytes(capacity_bytes);
    request.set_quota_bytes(quota_bytes);
    grpc::Status status = Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncOpenPageCache, context, request, &response);
    });
    *cache_id = response.cache_id();
    return status;
  });
}

grpc::Status RpcRemote::PutPagesPart(uint64_t cache_id, PutPageItem* items, uint32_t first,
                                     uint32_t count, Deadline deadline) {
  v1::PutPagesRequest request;
  v1::PutPagesResponse response;
  request.set_cache_id(cache_id);
  uint64_t boot_word = 0;
  for (uint32_t i = first; i < first + count; ++i) {
    v1::Page& page = *request.add_pages();
    page.set_key(items[i].key, items[i].key_bytes);
    if (const StagingPlace* const place = items[i].staging) {
      SetStaging(*place, page.mutable_staging());
      boot_word = place->boot_word;
    } else {
      page.set_content(items[i].data, items[i].data_bytes);
    }
  }
  // A staged call is sent once: its slots may not change while the sidecar uses them.
  const Repeat repeat = boot_word != 0 ? Repeat::kNever : Repeat::kHarmless;
  RETURN_IF_ERROR(Attempt(
      repeat, deadline,
      [&](const Context& context) {
        return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncPutPages, context, request, &response);
      },
      boot_word));
  if (response.outcomes_size() != static_cast<int>(count)) return BadPages("outcomes");
  for (uint32_t i = 0; i < count; ++i) {
    items[first + i].outcome = static_cast<uint32_t>(response.outcomes(static_cast<int>(i)));
  }
  return grpc::Status::OK;
}

pqc_status RpcRemote::PutPages(uint64_t cache_id, PutPageItem* items, uint32_t item_count,
                               RefusalBuffer* error) noexcept {
  return Finish("PutPages", error, [&]() -> grpc::Status {
    const Deadline deadline = CallDeadline();
    const uint64_t most_bytes = PayloadBytes(PQC_MAX_PAGE_BYTES);
    const auto bytes_of = [&](uint32_t i) {
      return kPageOverheadBytes + (items[i].staging ? 0 : items[i].data_bytes);
    };
    for (uint32_t i = 0; i < item_count; ++i) {
      if (items[i].staging || items[i].data_bytes <= most_bytes) continue;
      return Refuse(grpc::StatusCode::OUT_OF_RANGE, "pages[" + std::to_string(i) + "].data_bytes",
                    std::to_string(items[i].data_bytes) + ", must be at most " +
                        std::to_string(most_bytes) + " for the sidecar's max_message_bytes");
    }
    for (uint32_t first = 0; first < item_count;) {
      uint32_t end = first + 1;
      uint64_t bytes = bytes_of(first);
      while (end < item_count && bytes + bytes_of(end) <= PayloadBytes(kPagePayloadBytes)) {
        bytes += bytes_of(end++);
      }
      const grpc::Status status = PutPagesPart(cache_id, items, first, end - first, deadline);
      if (!status.ok()) return RenumberPage(status, first);
      first = end;
    }
    return grpc::Status::OK;
  });
}

grpc::Status RpcRemote::GetPagesPart(uint64_t cache_id, GetPageItem* items, uint32_t count,
                                     Deadline deadline, uint32_t* got_count) {
  v1::GetPagesRequest request;
  v1::GetPagesResponse response;
  uint64_t boot_word = 0;
  request.set_cache_id(cache_id);
  for (uint32_t i = 0; i < count; ++i) {
    v1::WantedPage& page = *request.add_pages();
    page.set_key(items[i].key, items[i].key_bytes);
    page.set_capacity_bytes(items[i].capacity_bytes);
    if (items[i].staging == nullptr) continue;
    SetStaging(*items[i].staging, page.mutable_staging());
    boot_word = items[i].staging->boot_word;
  }
  const Repeat repeat = boot_word != 0 ? Repeat::kNever : Repeat::kHarmless;  // as in PutPagesPart
  RETURN_IF_ERROR(Attempt(
      repeat, deadline,
      [&](const Context& context) {
        return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncGetPages, context, request, &response);
      },
      boot_word));
  const auto got = static_cast<uint32_t>(response.pages_size());
  if (got == 0 || got > count) return BadPages("number of pages");
  for (uint32_t i = 0; i < got; ++i) {
    const v1::GotPage& page = response.pages(static_cast<int>(i));
    const bool fits = page.size_bytes() <= items[i].capacity_bytes;
    if (page.is_staged() && (!fits || items[i].staging == nullptr)) return BadPages("is_staged");
    const uint64_t content_bytes = fits && !page.is_staged() ? page.size_bytes() : 0;
    if (page.content().size() != content_bytes) return BadPages("content");
    items[i].size_bytes = page.size_bytes();
    items[i].is_staged = page.is_staged();
    if (!page.content().empty()) {
      std::memcpy(items[i].data, page.content().data(), page.content().size());
    }
    items[i].answered = true;
  }
  *got_count = got;
  return grpc::Status::OK;
}

pqc_status RpcRemote::GetPages(uint64_t cache_id, GetPageItem* items, uint32_t item_count,
                               RefusalBuffer* error) noexcept {
  return Finish("GetPages", error, [&]() -> grpc::Status {
    const Deadline deadline = CallDeadline();
    for (uint32_t first = 0; first < item_count;) {
      uint32_t got = 0;
      const grpc::Status status =
          GetPagesPart(cache_id, items + first, item_count - first, deadline, &got);
      if (!status.ok()) return RenumberPage(status, first);
      first += got;
    }
    return grpc::Status::OK;
  });
}

pqc_status RpcRemote::FindPages(uint64_t cache_id, FindPageItem* items, uint32_t item_count,
                                uint64_t lease_ms, RefusalBuffer* error) noexcept {
  return Finish("FindPages", error, [&]() -> grpc::Status {
    v1::FindPagesRequest request;
    v1::FindPagesResponse response;
    request.set_cache_id(cache_id);
    request.set_lease_ms(lease_ms);
    for (uint32_t i = 0; i < item_count; ++i) request.add_keys(items[i].key, items[i].key_bytes);
    RETURN_IF_ERROR(Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncFindPages, context, request, &response);
    }));
    if (response.size_bytes_size() != static_cast<int>(item_count)) return BadPages("sizes");
    for (uint32_t i = 0; i < item_count; ++i) {
      items[i].size_bytes = response.size_bytes(static_cast<int>(i));
    }
    return grpc::Status::OK;
  });
}

}  // namespace pqcached::client
