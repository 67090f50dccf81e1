// What the tests of memory pressure share: a store with a pool that is soon full.
#ifndef PQCACHED_TESTS_KVSTORE_EVICT_PRESSURE_FIXTURE_H_
#define PQCACHED_TESTS_KVSTORE_EVICT_PRESSURE_FIXTURE_H_

#include <string>
#include <vector>

#include "tests/kvstore/content.h"

namespace pqcached::kvstore::testing {

// A segment of 128 tokens takes 4 extents of 64 KiB: two layers, two kv heads.
inline constexpr size_t kSegmentBytes = size_t{4} * kMinExtentBytes;

inline StoreOptions PressureOptions() {
  StoreOptions options = SmallOptions();
  options.retain = true;
  options.max_retained_share = 1;
  return options;
}

inline CacheSpec PoolOf(size_t segments) {
  CacheSpec spec = SmallSpec();
  spec.capacity_bytes = segments * kSegmentBytes;
  spec.default_index = {};  // flat: no codes
  return spec;
}

// Named tokens of a family; members share all tokens but those behind `common`.
inline std::vector<uint32_t> Prompt(uint32_t family, size_t tokens, size_t common = SIZE_MAX,
                                    uint32_t member = 0) {
  std::vector<uint32_t> ids(tokens);
  for (size_t i = 0; i < tokens; ++i) {
    ids[i] =
        family * 1000 + static_cast<uint32_t>(i % 1000) + (i >= common ? 7'000'000 * member : 0);
  }
  return ids;
}

struct PressureStore : SharingStore {
  explicit PressureStore(size_t segments, const StoreOptions& options = PressureOptions())
      : SharingStore(PoolOf(segments), options) {}

  // A sequence that holds the prompt.
  uint64_t Fill(const std::vector<uint32_t>& prompt, const std::string& session = "session") {
    const auto created = store->CreateSequence(
        kTenant, cache_id,
        {.session = session, .token_ids = prompt, .extra_key = {}, .live_index = {}});
    EXPECT_TRUE(created.ok()) << created.status();
    if (!created.ok()) return 0;
    const Content content = ContentOf(prompt);
    const auto rest = std::span(content).subspan(created->token_count);
    if (rest.empty()) return created->sequence_id;
    const auto count =
        IngestContent(*store, created->sequence_id, group, created->token_count, rest);
    EXPECT_TRUE(count.ok()) << count.status();
    return created->sequence_id;
  }
  void Drop(uint64_t id) { EXPECT_TRUE(store->DropSequence(kTenant, id).ok()); }
  // Fills and drops, so that it is retained.
  void Serve(const std::vector<uint32_t>& prompt) { Drop(Fill(prompt)); }

  std::vector<SequenceInfo> Retained() {
    const auto all = store->ListSequences("", cache_id);
    EXPECT_TRUE(all.ok()) << all.status();
    std::vector<SequenceInfo> retained;
    for (const SequenceInfo& info : *all) {
      if (info.is_cached_prefix) retained.push_back(info);
    }
    return retained;
  }
  // Returns the slots of each segment.
  std::vector<uint32_t> Capacities(uint64_t id) {
    std::vector<uint32_t> capacities;
    for (const SegmentInfo& segment : Describe(id).segments) {
      capacities.push_back(segment.slot_capacity);
    }
    return capacities;
  }
  absl::Status Read(uint64_t id) {
    return store->FetchBlocks(kTenant, id, group.layers[0], {0, 1}, RowPart::kRow).status();
  }
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_EVICT_PRESSURE_FIXTURE_H_
