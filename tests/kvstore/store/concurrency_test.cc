// Readers beside writers, caches beside caches. ThreadSanitizer makes these tests sharp.

#include <atomic>
#include <numeric>
#include <thread>

#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::Pq;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::ToFloats;

// A row whose elements tell its position and version, so that a reader knows a torn or foreign row
// when it sees one.
Floats MarkedRows(uint32_t first, uint32_t tokens, uint32_t heads, uint32_t dim, float version) {
  Floats floats{.shape = {tokens, heads, dim}, .data = {}};
  for (uint32_t token = first; token < first + tokens; ++token) {
    for (uint32_t i = 0; i < heads * dim; ++i) {
      floats.data.push_back(i % 2 == 0 ? static_cast<float>(token) : version);
    }
  }
  return floats;
}

struct Marked {
  Floats keys;
  Floats values;
  Marked(const LayerGroup& group, uint32_t first, uint32_t tokens, float version)
      : keys(MarkedRows(first, tokens, group.kv_heads, group.key_dim, version)),
        values(MarkedRows(first, tokens, group.kv_heads, group.value_dim, version)) {}
};

absl::StatusOr<uint64_t> AppendMarked(Store& store, uint64_t id, const LayerGroup& group,
                                      uint32_t first, uint32_t tokens, float version) {
  const Marked rows(group, first, tokens, version);
  std::vector<LayerRows> layers;
  for (const uint32_t layer : group.layers) {
    layers.push_back({.layer = layer, .keys = rows.keys.view(), .values = rows.values.view()});
  }
  return store.Append(kTenant, id, first, layers);
}

// Every row is one position's, of one version.
void ExpectWholeRows(const Rows& rows, uint32_t first, const LayerGroup& group) {
  const std::vector<float> floats = ToFloats(rows);
  for (uint32_t head = 0; head < group.kv_heads; ++head) {
    for (uint32_t token = 0; token < rows.tokens; ++token) {
      const float* row = &floats[(size_t{head} * rows.tokens + token) * rows.dim];
      for (uint32_t i = 0; i < rows.dim; ++i) {
        ASSERT_EQ(row[i], i % 2 == 0 ? static_cast<float>(first + token) : row[1]);
      }
    }
  }
}

struct SharedStore {
  std::unique_ptr<Store> store;
  std::vector<uint64_t> sequences;  // one per cache

  explicit SharedStore(int caches) {
    store = *Store::Create(SmallOptions());
    for (int i = 0; i < caches; ++i) {
      const auto cache = store->OpenCache(kTenant, SmallSpec("cache" + std::to_string(i)));
      EXPECT_TRUE(cache.ok()) << cache.status();
      sequences.push_back(
          store->CreateSequence(kTenant, cache->cache_id, {.session = "session"})->sequence_id);
    }
  }
};

TEST(Concurrency, ReadersSeeWholeRowsWhileTheTailGrowsAndIsRolledBack) {
  SharedStore shared(1);
  Store& store = *shared.store;
  const uint64_t id = shared.sequences[0];
  const LayerGroup group = SmallSpec().groups[0];
  ASSERT_TRUE(AppendMarked(store, id, group, 0, 200, 0.0f).ok());
  ASSERT_TRUE(store.BuildIndex(kTenant, id, {.index = Pq(2, 4), .iterations = 2}, {}).ok());

  std::atomic<bool> stop = false;
  std::atomic<int> reads = 0;
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 3; ++reader) {
    readers.emplace_back([&, reader] {
      std::mt19937_64 random(static_cast<uint64_t>(reader));
      const Floats query = testing::RandomFloats(random, {1, group.query_heads, group.key_dim});
      while (!stop) {
        const auto info = store.DescribeSequence(kTenant, id);
        ASSERT_TRUE(info.ok());
        const auto count = static_cast<uint32_t>(info->token_count);
        const auto rows = store.FetchBlocks(kTenant, id, 3, {count - 60, count}, RowPart::kRow);
        // A roll back may come between the two calls.
        if (rows.ok()) ExpectWholeRows(*rows, count - 60, group);
        const Query asked{.layer = 1, .query_position = count - 1, .queries = query.view()};
        const Selection selection{.index = Pq(2, 4), .budget_ratio = 0.2};
        const auto attention = store.Attend(kTenant, id, asked, selection, true);
        if (!attention.ok()) {
          ASSERT_EQ(attention.status().code(), absl::StatusCode::kOutOfRange);
        }
        ++reads;
      }
    });
  }
  uint32_t tokens = 200;
  float version = 1.0f;
  while (version < 150.0f || reads < 100) {
    const uint32_t step = 1 + static_cast<uint32_t>(version) % 7;
    const auto count = AppendMarked(store, id, group, tokens, step, version);
    ASSERT_TRUE(count.ok()) << count.status();
    tokens += step;
    const auto info = store.DescribeSequence(kTenant, id);
    ASSERT_TRUE(info.ok());
    const auto tail = static_cast<uint32_t>(info->segments.back().tokens.begin);
    if (tokens - tail > 3) {
      ASSERT_TRUE(store.TruncateSequence(kTenant, id, tokens - 3).ok());
      tokens -= 3;
    }
    version += 1.0f;
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  ASSERT_TRUE(store.DropSequence(kTenant, id).ok());
  EXPECT_EQ(store.ListCaches("").front().used_bytes, 0u);
}

TEST(Concurrency, TwoCachesAreFilledIndexedAndReadAtOnce) {
  SharedStore shared(2);
  const LayerGroup group = SmallSpec().groups[0];
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      Store& store = *shared.store;
      const uint64_t id = shared.sequences[static_cast<size_t>(i)];
      const auto version = static_cast<float>(100 + i);
      uint32_t tokens = 0;
      for (int step = 0; step < 20; ++step) {
        ASSERT_TRUE(AppendMarked(store, id, group, tokens, 30, version).ok());
        tokens += 30;
        if (step == 10) {
          ASSERT_TRUE(store.BuildIndex(kTenant, id, {.index = Pq(2, 4), .iterations = 2}, {}).ok());
        }
        const auto rows = store.FetchBlocks(kTenant, id, 1, {0, tokens}, RowPart::kValue);
        ASSERT_TRUE(rows.ok());
        ExpectWholeRows(*rows, 0, group);
        ASSERT_EQ(ToFloats(*rows)[1], version);  // never the other cache's
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Concurrency, OfManyWritersEachEitherWritesAllOrIsAborted) {
  SharedStore shared(1);
  Store& store = *shared.store;
  const uint64_t id = shared.sequences[0];
  const LayerGroup group = SmallSpec().groups[0];
  std::atomic<uint32_t> written = 0;
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 4; ++writer) {
    writers.emplace_back([&, writer] {
      for (int step = 0; step < 50; ++step) {
        const auto info = store.DescribeSequence(kTenant, id);
        ASSERT_TRUE(info.ok());
        const auto count = AppendMarked(store, id, group, static_cast<uint32_t>(info->token_count),
                                        1, static_cast<float>(writer));
        if (count.ok()) {
          ++written;  // or somebody wrote this position before: then it was a repeat
          continue;
        }
        ASSERT_EQ(count.status().code(), absl::StatusCode::kAborted) << count.status();
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  const auto info = store.DescribeSequence(kTenant, id);
  ASSERT_TRUE(info.ok());
  EXPECT_GT(info->token_count, 0u);
  EXPECT_LE(info->token_count, written);
  const auto rows = store.FetchBlocks(kTenant, id, 1, {0, info->token_count}, RowPart::kRow);
  ASSERT_TRUE(rows.ok());
  ExpectWholeRows(*rows, 0, group);
}

TEST(Concurrency, ASessionThatEndsTakesItsSequencesFromUnderWritersAndReaders) {
  SharedStore shared(1);
  Store& store = *shared.store;
  const uint64_t id = shared.sequences[0];
  const LayerGroup group = SmallSpec().groups[0];
  ASSERT_TRUE(AppendMarked(store, id, group, 0, 600, 0.0f).ok());
  auto ingest = store.BeginIngest(kTenant, id);
  ASSERT_TRUE(ingest.ok());
  const Marked rows(group, 600, 10, 1.0f);
  ASSERT_TRUE((*ingest)
                  ->Write(600, {.layer = 1, .keys = rows.keys.view(), .values = rows.values.view()})
                  .ok());
  EXPECT_EQ(store.DropSession("session"), 1u);
  EXPECT_EQ((*ingest)->Commit().status().code(), absl::StatusCode::kNotFound);
  ingest->reset();
  EXPECT_EQ(store.ListCaches("").front().used_bytes, 0u);
}

TEST(Concurrency, ADropEndsABuild) {
  SharedStore shared(1);
  Store& store = *shared.store;
  const uint64_t id = shared.sequences[0];
  ASSERT_TRUE(AppendMarked(store, id, SmallSpec().groups[0], 0, 600, 0.0f).ok());
  const absl::Status status =
      store.BuildIndex(kTenant, id, {.index = Pq(2, 4)}, [&](const BuildProgress&) {
        store.DropSession("session");
        return true;
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store.ListCaches("").front().used_bytes, 0u);
}

}  // namespace
}  // namespace pqcached::kvstore
