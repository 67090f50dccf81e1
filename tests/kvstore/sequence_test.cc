#include "kvstore/sequence.h"

#include <cstring>

#include "kvstore/cache.h"
#include "kvstore/ingest.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using testing::Floats;
using testing::SmallOptions;
using testing::SmallSpec;

// A sequence of its own, without a store around it, so that a test can hold snapshots as long as it likes.
class SnapshotTest : public ::testing::Test {
 protected:
  SnapshotTest() {
    auto pool = Pool::Create({.capacity_bytes = size_t{8} << 20, .touch_threads = 0});
    EXPECT_TRUE(pool.ok());
    cache_ = std::make_shared<const Cache>(1, "default", SmallSpec(), *std::move(pool), &engine_);
    sequence_ = std::make_shared<Sequence>(1, "session", cache_->layers.size());
  }

  void Append(uint32_t first, uint32_t tokens, float value) {
    const LayerGroup& group = cache_->spec.groups[0];
    Floats keys{.shape = {tokens, group.kv_heads, group.key_dim}, .data = {}};
    Floats values{.shape = {tokens, group.kv_heads, group.value_dim}, .data = {}};
    keys.data.assign(size_t{tokens} * group.kv_heads * group.key_dim, value);
    values.data.assign(size_t{tokens} * group.kv_heads * group.value_dim, value);
    std::vector<LayerRows> rows;
    for (const uint32_t layer : group.layers) {
      rows.push_back({.layer = layer, .keys = keys.view(), .values = values.view()});
    }
    const auto count = AppendRows(cache_, *WriteLease::Take(sequence_), first, rows);
    ASSERT_TRUE(count.ok()) << count.status();
  }

  void Truncate(uint32_t token_count) {
    ASSERT_TRUE(TruncateRows(*WriteLease::Take(sequence_), token_count).ok());
  }

  std::shared_ptr<const Snapshot> Read() const { return *sequence_->Read(); }

  // The first element of a token's row, as a snapshot shows it.
  static float ValueAt(const Snapshot& snapshot, uint32_t token) {
    const SegmentRows& rows = *snapshot.list->segments.front().rows;
    float value = 0;
    std::memcpy(&value, rows.rows(0) + size_t{token} * (32 + 40) * sizeof(float), sizeof(value));
    return value;
  }

  Engine engine_{SmallOptions(), 2};
  std::shared_ptr<const Cache> cache_;
  std::shared_ptr<Sequence> sequence_;
};

TEST_F(SnapshotTest, StaysAsItWasWhenItsTokensAreRolledBackAndReplaced) {
  Append(0, 20, 1.0f);
  const auto old = Read();
  Truncate(10);
  Append(10, 10, 2.0f);
  EXPECT_EQ(old->token_count(), 20u);
  for (uint32_t token = 0; token < 20; ++token) {
    EXPECT_EQ(ValueAt(*old, token), 1.0f);
    EXPECT_EQ(ValueAt(*Read(), token), token < 10 ? 1.0f : 2.0f);
  }
}

TEST_F(SnapshotTest, WithoutAReaderTheRolledBackSlotsAreUsedAgainInPlace) {
  Append(0, 20, 1.0f);
  const uint64_t segment_id = Read()->list->segments.front().rows->segment_id();
  const size_t used_bytes = cache_->pool->usage().used_bytes;
  Truncate(10);
  Append(10, 10, 2.0f);
  EXPECT_EQ(Read()->list->segments.front().rows->segment_id(), segment_id);
  EXPECT_EQ(cache_->pool->usage().used_bytes, used_bytes);
}

TEST_F(SnapshotTest, AReaderThatSawNoMoreThanIsKeptCostsNoCopy) {
  Append(0, 10, 1.0f);
  const auto old = Read();
  Append(10, 10, 1.0f);
  Truncate(10);
  Append(10, 10, 2.0f);
  EXPECT_EQ(Read()->list->segments.front().rows, old->list->segments.front().rows);
}

TEST_F(SnapshotTest, KeepsTheMemoryOfADroppedSequenceUntilItsLastReaderIsDone) {
  Append(0, 20, 1.0f);
  auto reader = Read();
  sequence_->Drop();
  EXPECT_EQ(sequence_->Read().status().code(), absl::StatusCode::kNotFound);
  EXPECT_GT(cache_->pool->usage().used_bytes, 0u);
  EXPECT_EQ(ValueAt(*reader, 19), 1.0f);
  reader.reset();
  EXPECT_EQ(cache_->pool->usage().used_bytes, 0u);
}

}  // namespace
}  // namespace pqcached::kvstore
