// NoPagesRemote: a Remote of tests without page caches and without attention by given logits.
#ifndef PQCACHED_TESTS_CLIENT_LOCAL_NO_PAGES_REMOTE_H_
#define PQCACHED_TESTS_CLIENT_LOCAL_NO_PAGES_REMOTE_H_

#include "client/base/remote.h"

namespace pqcached::client {

class NoPagesRemote : public Remote {
 public:
  pqc_status OpenPageCache(const char*, uint64_t, uint64_t, uint64_t*,
                           RefusalBuffer*) noexcept override {
    return PQC_UNIMPLEMENTED;
  }
  pqc_status PutPages(uint64_t, PutPageItem*, uint32_t, RefusalBuffer*) noexcept override {
    return PQC_UNIMPLEMENTED;
  }
  pqc_status GetPages(uint64_t, GetPageItem*, uint32_t, RefusalBuffer*) noexcept override {
    return PQC_UNIMPLEMENTED;
  }
  pqc_status FindPages(uint64_t, FindPageItem*, uint32_t, uint64_t,
                       RefusalBuffer*) noexcept override {
    return PQC_UNIMPLEMENTED;
  }
  void SetClientVersion(uint32_t) noexcept override {}
  pqc_status AttendScored(const ScoredItem*, uint32_t, RefusalBuffer*) noexcept override {
    return PQC_UNIMPLEMENTED;
  }
  pqc_status MakeIndex(const char*, const pqc_index_parameter*, uint32_t, pqc_index*,
                       RefusalBuffer*) noexcept override {
    return PQC_UNIMPLEMENTED;
  }
  pqc_status FetchRows(const FetchView& fetch, kvstore::TokenRange tokens, std::byte* out,
                       uint64_t*, RefusalBuffer* error) noexcept override {
    return FetchBlocks(fetch, tokens, out, error);
  }
  pqc_status ReadRows(const FetchView*, uint32_t, kvstore::TokenRange, const RowRunSink&, uint64_t*,
                      RefusalBuffer*) noexcept override {
    return PQC_UNIMPLEMENTED;
  }

 protected:
  ~NoPagesRemote() = default;
};

}  // namespace pqcached::client

#endif  // PQCACHED_TESTS_CLIENT_LOCAL_NO_PAGES_REMOTE_H_
