// Requests about a small cache, with rows that anyone can make again.
#ifndef PQCACHED_TESTS_SERVICE_HANDLERS_REQUESTS_H_
#define PQCACHED_TESTS_SERVICE_HANDLERS_REQUESTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "pqcached/v1/kv_cache.pb.h"
#include "service/config/config.h"

namespace pqcached::service {

inline constexpr uint32_t kKvHeads = 2;
inline constexpr uint32_t kQueryHeads = 4;
inline constexpr uint32_t kKeyDim = 32;
inline constexpr uint32_t kValueDim = 40;
inline constexpr uint32_t kLayers[] = {1, 4};  // stored; layer 2 is the engine's own

// Segments of 128 tokens, so that every sequence has several.
Config SmallConfig();

v1::Tensor FloatTensor(const std::vector<uint64_t>& shape, uint64_t seed);
v1::LayerRows RowsOf(uint32_t layer, uint64_t first, uint64_t tokens);
v1::OpenCacheRequest CacheRequest(const std::string& name = "cache");
v1::Query QueryAt(uint64_t sequence_id, uint32_t layer, uint64_t position);
v1::IndexSpec Pq(uint32_t subspaces, uint32_t bits);
v1::IndexSpec Flat();
v1::Selection TokenCountSelection(const v1::IndexSpec& index, uint64_t sink, uint64_t window,
                                  uint64_t count);

}  // namespace pqcached::service

#endif  // PQCACHED_TESTS_SERVICE_HANDLERS_REQUESTS_H_
