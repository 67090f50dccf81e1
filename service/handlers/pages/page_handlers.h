// PageHandlers answers the rpcs on pages of page caches: PutPages, GetPages and FindPages.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_HANDLERS_PAGES_PAGE_HANDLERS_H_
#define PQCACHED_SERVICE_HANDLERS_PAGES_PAGE_HANDLERS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kvstore/store.h"
#include "pqcached/v1/pages.pb.h"
#include "service/handlers/caller.h"

namespace pqcached::service {

class PageHandlers {
 public:
  // Most pages, or keys, of one call.
  static constexpr int kMaxPages = 4096;

  PageHandlers(kvstore::Store& store, uint64_t max_message_bytes)
      : store_(store), max_message_bytes_(max_message_bytes) {}

  absl::Status PutPages(const Caller& caller, const v1::PutPagesRequest& request,
                        v1::PutPagesResponse* response);
  absl::Status GetPages(const Caller& caller, const v1::GetPagesRequest& request,
                        v1::GetPagesResponse* response);
  absl::Status FindPages(const Caller& caller, const v1::FindPagesRequest& request,
                         v1::FindPagesResponse* response);

 private:
  kvstore::Store& store_;
  const uint64_t max_message_bytes_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_PAGES_PAGE_HANDLERS_H_
