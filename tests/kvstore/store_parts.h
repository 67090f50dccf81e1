// What the tests of the store's parts share: the parts around one cache, wired without a store.
#ifndef PQCACHED_TESTS_KVSTORE_STORE_PARTS_H_
#define PQCACHED_TESTS_KVSTORE_STORE_PARTS_H_

#include <memory>
#include <random>
#include <string>

#include "kvstore/evict/evictor.h"
#include "kvstore/rows/ingest.h"
#include "kvstore/store/caches.h"
#include "kvstore/store/lifecycle.h"
#include "kvstore/store/prefix_sharing.h"
#include "tests/kvstore/cache_parts.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore::testing {

// One cache of one float layer, and the parts that its sequences use.
struct StoreParts {
  explicit StoreParts(const StoreOptions& store_options = SmallOptions())
      : options(store_options),
        shared(options, 1),
        memory(options, shared.shared(), /*root=*/nullptr, *ledger),
        caches(options, memory),
        local(options.max_leases, options.max_staging_bytes, options.lease_timeout, *ledger),
        prefixes(caches),
        evictor({options, sequences, ranks, shared.live, local}),
        lifecycle({options, memory, sequences, ranks, prefixes, caches, evictor, shared.live,
                   /*checksums=*/nullptr}) {
    CacheSpec spec = SmallSpec();
    spec.groups[0].layers = {0};
    auto opened = caches.Open(kTenant, spec, {});
    EXPECT_TRUE(opened.ok()) << opened.status();
    cache = opened->cache;
  }

  // Creates a sequence with `tokens` random rows, named 0, 1, 2 and so on. Returns its id.
  uint64_t Make(const std::string& session, uint32_t tokens) {
    std::vector<uint32_t> ids(tokens);
    for (uint32_t i = 0; i < tokens; ++i) ids[i] = i;
    const auto made = lifecycle.Create(cache, {.session = session, .token_ids = ids});
    EXPECT_TRUE(made.ok()) << made.status();
    Ingest(made->sequence_id, static_cast<uint32_t>(made->token_count), tokens);
    return made->sequence_id;
  }

  void Ingest(uint64_t sequence_id, uint32_t begin, uint32_t end) {
    if (begin == end) return;
    const auto stored = sequences.FindInAnyTenant(sequence_id);
    ASSERT_TRUE(stored.ok()) << stored.status();
    const LayerGroup& group = cache->spec.groups[0];
    const Floats keys = RandomFloats(random, {end - begin, group.kv_heads, group.key_dim});
    const Floats values = RandomFloats(random, {end - begin, group.kv_heads, group.value_dim});
    auto ingest = BeginIngest(cache, *WriteLease::Acquire(stored->sequence),
                              /*has_live_index=*/false, /*announced=*/{});
    ASSERT_TRUE(ingest.ok()) << ingest.status();
    ASSERT_TRUE(
        (*ingest)->Write(begin, {.layer = 0, .keys = keys.view(), .values = values.view()}).ok());
    ASSERT_TRUE((*ingest)->Commit().ok());
  }

  void End(uint64_t sequence_id) {
    const auto stored = sequences.FindInAnyTenant(sequence_id);
    ASSERT_TRUE(stored.ok()) << stored.status();
    lifecycle.End(*stored);
  }

  const StoreOptions options;
  CacheParts shared;
  const std::shared_ptr<MemoryLedger> ledger = std::make_shared<MemoryLedger>();
  CacheMemory memory;
  Caches caches;
  LocalSessions local;
  RankSequences ranks;
  StoredSequences sequences;
  PrefixSharing prefixes;
  Evictor evictor;
  Lifecycle lifecycle;
  std::shared_ptr<const Cache> cache;
  std::mt19937_64 random{7};
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_STORE_PARTS_H_
