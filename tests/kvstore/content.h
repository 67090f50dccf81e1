// Rows that tell where they come from: each token's content is a number, and its rows follow from it, so
// that a test needs to remember one number per token to know all its bytes.
#ifndef PQCACHED_TESTS_KVSTORE_CONTENT_H_
#define PQCACHED_TESTS_KVSTORE_CONTENT_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore::testing {

using Content = std::vector<uint64_t>;

inline uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Content of tokens that are named by their ids: as with K and V, it depends on all ids before.
inline Content ContentOf(std::span<const uint32_t> token_ids) {
  Content content;
  for (const uint32_t id : token_ids) {
    content.push_back(Mix(content.empty() ? 7 : content.back(), id));
  }
  return content;
}

inline float ElementOf(uint64_t content, uint32_t layer, uint32_t kv_head, uint32_t i) {
  const uint64_t mixed = Mix(content, (uint64_t{layer} << 32) + (uint64_t{kv_head} << 16) + i);
  return static_cast<float>(mixed >> 44) / static_cast<float>(1u << 19) - 1.0f;  // exact
}

// [tokens, kv_heads, dims] of dims [begin, end) of the rows.
inline Floats PartOf(std::span<const uint64_t> content, const LayerGroup& group, uint32_t layer,
                     uint32_t begin, uint32_t end) {
  Floats floats{.shape = {content.size(), group.kv_heads, end - begin}, .data = {}};
  for (const uint64_t token : content) {
    for (uint32_t head = 0; head < group.kv_heads; ++head) {
      for (uint32_t i = begin; i < end; ++i)
        floats.data.push_back(ElementOf(token, layer, head, i));
    }
  }
  return floats;
}

// Rows as FetchBlocks gives them: [kv_heads, tokens, key_dim + value_dim].
inline std::vector<float> RowsOf(std::span<const uint64_t> content, const LayerGroup& group,
                                 uint32_t layer) {
  std::vector<float> rows;
  for (uint32_t head = 0; head < group.kv_heads; ++head) {
    for (const uint64_t token : content) {
      for (uint32_t i = 0; i < group.key_dim + group.value_dim; ++i) {
        rows.push_back(ElementOf(token, layer, head, i));
      }
    }
  }
  return rows;
}

// K and V of all layers of a group.
struct ContentRows {
  std::vector<Floats> keys;
  std::vector<Floats> values;
  std::vector<LayerRows> layers;

  ContentRows(std::span<const uint64_t> content, const LayerGroup& group) {
    for (const uint32_t layer : group.layers) {
      keys.push_back(PartOf(content, group, layer, 0, group.key_dim));
      values.push_back(
          PartOf(content, group, layer, group.key_dim, group.key_dim + group.value_dim));
    }
    for (size_t i = 0; i < group.layers.size(); ++i) {
      layers.push_back(
          {.layer = group.layers[i], .keys = keys[i].view(), .values = values[i].view()});
    }
  }
};

inline absl::StatusOr<uint64_t> AppendContent(Store& store, uint64_t id, const LayerGroup& group,
                                              uint64_t first, std::span<const uint64_t> content) {
  const ContentRows rows(content, group);
  return store.Append(kTenant, id, first, rows.layers);
}

// As a prefill does: layer by layer, chunk by chunk.
inline absl::StatusOr<uint64_t> IngestContent(Store& store, uint64_t id, const LayerGroup& group,
                                              uint64_t first, std::span<const uint64_t> content,
                                              size_t chunk_tokens = 100) {
  auto ingest = store.BeginIngest(kTenant, id);
  if (!ingest.ok()) return ingest.status();
  for (size_t done = 0; done < content.size(); done += chunk_tokens) {
    const ContentRows rows(content.subspan(done, std::min(chunk_tokens, content.size() - done)),
                           group);
    for (const LayerRows& layer : rows.layers) {
      if (absl::Status status = (*ingest)->Write(first + done, layer); !status.ok()) return status;
    }
  }
  return (*ingest)->Commit();
}

// Compares every visible byte of [begin, content.size()).
inline void ExpectContent(Store& store, uint64_t id, const LayerGroup& group,
                          std::span<const uint64_t> content, size_t begin = 0) {
  if (begin >= content.size()) return;
  for (const uint32_t layer : group.layers) {
    const auto rows = store.FetchBlocks(kTenant, id, layer, {begin, content.size()}, RowPart::kRow);
    ASSERT_TRUE(rows.ok()) << rows.status();
    ASSERT_TRUE(ToFloats(*rows) == RowsOf(content.subspan(begin), group, layer))
        << "sequence " << id << " layer " << layer;
  }
}

inline Content NumberedContent(uint64_t seed, uint32_t count) {
  Content content;
  for (uint32_t i = 0; i < count; ++i) content.push_back(testing::Mix(seed, i));
  return content;
}

inline std::vector<uint32_t> RandomIds(std::mt19937_64& random, size_t count) {
  std::vector<uint32_t> ids(count);
  for (uint32_t& id : ids) id = static_cast<uint32_t>(random() % 50'000);
  return ids;
}

// A store with one cache, for tests that make their own sequences.
struct SharingStore {
  std::unique_ptr<Store> store;
  uint64_t cache_id = 0;
  LayerGroup group;

  explicit SharingStore(const CacheSpec& spec = SmallSpec(),
                        const StoreOptions& options = SmallOptions())
      : store(*Store::Create(options)), group(spec.groups[0]) {
    const auto cache = store->OpenCache(kTenant, spec);
    EXPECT_TRUE(cache.ok()) << cache.status();
    cache_id = cache->cache_id;
  }

  CreatedSequence Create(std::span<const uint32_t> token_ids = {},
                         const std::string& extra_key = "") {
    const auto created = store->CreateSequence(kTenant, cache_id,
                                               {.session = "session",
                                                .token_ids = {token_ids.begin(), token_ids.end()},
                                                .extra_key = extra_key,
                                                .live_index = {}});
    EXPECT_TRUE(created.ok()) << created.status();
    return *created;
  }
  CreatedSequence Fork(uint64_t id, uint64_t token_count = 0) {
    const auto created = store->ForkSequence(kTenant, id, token_count, "session");
    EXPECT_TRUE(created.ok()) << created.status();
    return *created;
  }
  uint64_t Match(std::span<const uint32_t> token_ids, const std::string& extra_key = "") {
    const auto count = store->MatchPrefix(kTenant, cache_id, token_ids, extra_key);
    EXPECT_TRUE(count.ok()) << count.status();
    return *count;
  }
  size_t used_bytes() { return store->ListCaches("").front().used_bytes; }
  SequenceInfo Describe(uint64_t id) { return *store->DescribeSequence(kTenant, id); }
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_CONTENT_H_
