// A sequence of one layer whose keys are in the engine and whose values are in the sidecar (KCache),
// and its decode steps.
#ifndef PQCACHED_TESTS_BENCH_SYSTEMS_KCACHE_DECODING_H_
#define PQCACHED_TESTS_BENCH_SYSTEMS_KCACHE_DECODING_H_

#include <cstdint>
#include <vector>

#include "pqcached/client.h"
#include "tests/bench/huge_buffer.h"
#include "tests/bench/local/sidecar.h"

namespace pqcached::bench {

// Returns a cache of values of one layer.
pqc_cache* OpenValueCache(pqc_client* client, const char* name, uint64_t capacity_bytes);

// Ends the program when a call fails. Single-thread.
class KCacheDecoding {
 public:
  // Keeps the keys of `tokens` tokens of `rows`, again and again, and stores their values. Each
  // query head attends to its `top_count` best tokens.
  KCacheDecoding(pqc_client* client, pqc_cache* cache, const Rows& rows, uint64_t tokens,
                 uint32_t top_count, uint32_t query_seed);
  ~KCacheDecoding() { pqc_sequence_drop(sequence_); }
  KCacheDecoding(const KCacheDecoding&) = delete;
  KCacheDecoding& operator=(const KCacheDecoding&) = delete;

  // Runs a whole step, without the row of its token: scores all keys, takes the best of each query
  // head, and attends to their values.
  void Step();

  // The attention of the last step, [query_heads, dim].
  const std::vector<float>& output() const { return output_; }

 private:
  // Scores the keys of one kv head, and writes the lists and logits of its query heads.
  void Select(uint32_t kv_head);

  pqc_client* client_;
  pqc_sequence* sequence_ = nullptr;
  const uint32_t tokens_, top_count_;
  HugeBuffer keys_;  // [kv_heads, tokens, dim]
  std::vector<float> queries_, scores_, output_, lse_, logits_;
  std::vector<int32_t> positions_;  // [query_heads, top_count]
  std::vector<std::byte> score_scratch_;
  HugeBuffer select_scratch_;
};

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_SYSTEMS_KCACHE_DECODING_H_
