// NoPagesRemote: a Remote of tests without page caches and without attention by given logits.
#ifndef PQCACHED_TESTS_CLIENT_LOCAL_NO_PAGES_REMOTE_H_
#define PQCACHED_TESTS_CLIENT_LOCAL_NO_PAGES_REMOTE_H_

#include <cstddef>
#include <vector>

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
  pqc_status AddSamples(uint64_t, const SampleBlock*, uint32_t, RefusalBuffer*) noexcept override {
    return PQC_UNIMPLEMENTED;
  }
  pqc_status FetchRows(const FetchView& fetch, kvstore::TokenRange tokens, std::byte* out,
                       uint64_t*, RefusalBuffer* error) noexcept override {
    return FetchBlocks(fetch, tokens, out, error);
  }
  pqc_status ReadRows(const FetchView* layers, uint32_t layer_count, kvstore::TokenRange tokens,
                      const RowRunSink& sink, uint64_t*, RefusalBuffer* error) noexcept override {
    const uint64_t count = tokens.end - tokens.begin;
    for (uint32_t layer = 0; layer < layer_count; ++layer) {
      const LayerShape& shape = layers[layer].shape;
      const size_t head_bytes = count * kvstore::BytesOfPart(shape, layers[layer].part).size;
      std::vector<std::byte> rows(shape.kv_heads * head_bytes);
      const pqc_status status = FetchBlocks(layers[layer], tokens, rows.data(), error);
      if (status != PQC_OK) return status;
      std::vector<const std::byte*> heads;
      for (uint32_t head = 0; head < shape.kv_heads; ++head) {
        heads.push_back(rows.data() + head * head_bytes);
      }
      if (!sink.take(sink.context, layer, static_cast<uint32_t>(tokens.begin),
                     static_cast<uint32_t>(count), heads.data())) {
        return PQC_OK;
      }
    }
    return PQC_OK;
  }

 protected:
  ~NoPagesRemote() = default;
};

}  // namespace pqcached::client

#endif  // PQCACHED_TESTS_CLIENT_LOCAL_NO_PAGES_REMOTE_H_
