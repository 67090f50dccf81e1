// LiveWorld: a store with one cache, and what benches of its indexes do to it.
#ifndef PQCACHED_TESTS_BENCH_LOCAL_LIVE_WORLD_H_
#define PQCACHED_TESTS_BENCH_LOCAL_LIVE_WORLD_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kvstore/store.h"
#include "tests/bench/local/drift_keys.h"

namespace pqcached::bench {

inline constexpr kvstore::IndexDescriptor kLiveIndex = {kvstore::IndexKind::kPq, 2, 6};

struct Quality {
  double recall = 0;  // of the exact selection of the same size, per kv head
  double mass = 0;    // attention that the selected tokens have among all candidates
};

class LiveWorld {
 public:
  LiveWorld(const kvstore::StoreOptions& options, const DriftShape& shape, uint32_t layers,
            size_t capacity_bytes);

  kvstore::Store& store() { return *store_; }
  uint64_t NewSequence(bool live, uint32_t iterations);
  // The same rows in every layer.
  void Ingest(uint64_t sequence_id, uint32_t first, const Bf16Rows& keys, const Bf16Rows& values);
  void Append(uint64_t sequence_id, uint32_t first, const Bf16Rows& keys, const Bf16Rows& values);
  void Build(uint64_t sequence_id, const kvstore::BuildSpec& spec);
  uint64_t Fork(uint64_t sequence_id, uint32_t tokens);
  void Drop(uint64_t sequence_id);
  // Until the store has nothing left to do for a live index.
  void WaitIdle(uint64_t sequence_id);
  size_t IndexBytes(uint64_t sequence_id);  // codebooks too

  // Means over the queries, in layer 0, of selections of `count` tokens.
  Quality Judge(uint64_t sequence_id, uint32_t tokens, const std::vector<Bf16Rows>& queries,
                uint32_t count);

 private:
  std::vector<kvstore::LayerRows> Rows(const Bf16Rows& keys, const Bf16Rows& values) const;

  const DriftShape shape_;
  const uint32_t layers_;
  std::unique_ptr<kvstore::Store> store_;
  uint64_t cache_id_ = 0;
};

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_LOCAL_LIVE_WORLD_H_
