// The example of store.h, run.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kvstore/store.h"

namespace pqcached::kvstore {
namespace {

// clang-format off
absl::StatusOr<Attention> Example(const TensorView& keys, const TensorView& values,
                                  const TensorView& queries) {
  // [example]
  StoreOptions options;
  options.max_pool_bytes = 64 << 20;
  auto store = Store::Create(options);
  if (!store.ok()) return store.status();
  const IndexDescriptor index = {.kind = IndexKind::kPq, .subspace_count = 2, .bits = 6};
  const LayerGroup group{.layers = {0}, .kv_heads = 2, .query_heads = 8,
                         .key_dim = 64, .value_dim = 64};
  const auto cache = (*store)->OpenCache(
      "tenant", {.name = "demo", .model_fingerprint = "demo-1", .groups = {group},
                 .capacity_bytes = 32 << 20, .default_index = index});
  if (!cache.ok()) return cache.status();
  const auto made = (*store)->CreateSequence("tenant", cache->cache_id, {.session = "demo"});
  if (!made.ok()) return made.status();
  {
    auto ingest = (*store)->BeginIngest("tenant", made->sequence_id);
    if (!ingest.ok()) return ingest.status();
    absl::Status written = (*ingest)->Write(0, {.layer = 0, .keys = keys, .values = values});
    if (!written.ok()) return written;
    if (auto tokens = (*ingest)->Commit(); !tokens.ok()) return tokens.status();
  }
  absl::Status built = (*store)->BuildIndex("tenant", made->sequence_id, {.index = index}, {});
  if (!built.ok()) return built;
  return (*store)->Attend("tenant", made->sequence_id,
                          {.layer = 0, .query_position = 1023, .queries = queries},
                          {.index = index, .sink_tokens = 16, .window_tokens = 64,
                           .budget_ratio = 0.1},
                          /*want_positions=*/false);
  // [/example]
}
// clang-format on

TensorView View(const std::vector<float>& numbers, std::vector<uint64_t> shape) {
  return {.data = reinterpret_cast<const std::byte*>(numbers.data()),
          .data_bytes = numbers.size() * sizeof(float),
          .dtype = kernels::DType::kF32,
          .shape = std::move(shape),
          .strides = {}};
}

std::vector<float> Numbers(size_t count) {
  std::vector<float> numbers(count);
  for (size_t i = 0; i < count; ++i) numbers[i] = static_cast<float>(i * i % 9973) / 9973 - 0.5f;
  return numbers;
}

TEST(StoreHeaderTest, TheExampleSelectsWhatTheBudgetLeaves) {
  const std::vector<float> rows = Numbers(1024 * 2 * 64);
  const std::vector<float> query = Numbers(8 * 64);
  const auto attention =
      Example(View(rows, {1024, 2, 64}), View(rows, {1024, 2, 64}), View(query, {1, 8, 64}));
  ASSERT_TRUE(attention.ok()) << attention.status();
  EXPECT_EQ(attention->selected.count, 102u - 16 - 64);
  EXPECT_EQ(attention->output.size(), 8u * 64);
}

}  // namespace
}  // namespace pqcached::kvstore
