#include "kvstore/sequence/sequence.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <thread>

#include "kvstore/rows/ingest.h"
#include "kvstore/rows/snapshot_reads.h"
#include "kvstore/sequence/cache.h"
#include "tests/kvstore/cache_parts.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using testing::CacheParts;
using testing::Floats;
using testing::SmallOptions;
using testing::SmallSpec;

// A sequence of its own, without a store around it, so that a test can hold snapshots as long as it likes.
class SnapshotTest : public ::testing::Test {
 protected:
  SnapshotTest() {
    auto pool = Pool::Create({.capacity_bytes = size_t{64} << 20});
    EXPECT_TRUE(pool.ok());
    cache_ =
        std::make_shared<const Cache>(1, "default", SmallSpec(), *std::move(pool), parts_.shared());
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
    const auto count =
        AppendRows(cache_, *WriteLease::Acquire(sequence_), /*has_live_index=*/false, first, rows);
    ASSERT_TRUE(count.ok()) << count.status();
  }

  void Truncate(uint32_t token_count) {
    ASSERT_TRUE(TruncateRows(*WriteLease::Acquire(sequence_), token_count).ok());
  }

  std::shared_ptr<const Snapshot> Read() const { return *sequence_->Read(); }

  // The first element of a token's row, as a snapshot shows it.
  static float ValueAt(const Snapshot& snapshot, uint32_t token) {
    const SegmentRows* rows = nullptr;
    for (const SegmentEntry& entry : snapshot.list->segments) {
      if (entry.rows->first_position() <= token) rows = entry.rows.get();
    }
    float value = 0;
    std::memcpy(&value, rows->rows(0) + size_t{token - rows->first_position()} * kRowBytes,
                sizeof(value));
    return value;
  }
  static void ExpectValues(const Snapshot& snapshot, uint32_t begin, uint32_t end, float value) {
    for (uint32_t token = begin; token < end; ++token) ASSERT_EQ(ValueAt(snapshot, token), value);
  }

  // One closed segment with the rows of [begin, end), copied from a snapshot.
  SegmentEntry Merged(const Snapshot& snapshot, uint32_t begin, uint32_t end) {
    const uint32_t capacity = (end - begin + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
    const NewSegment wanted{parts_.counters.next_segment_id++, begin, capacity};
    auto created = CreateSegments(*cache_->pool, cache_->layers, {&wanted, 1}, {});
    EXPECT_TRUE(created.ok()) << created.status();
    SegmentEntry merged = std::move(created->front());
    for (const SegmentEntry& entry : snapshot.list->segments) {
      const uint32_t first = entry.rows->first_position();
      if (first < begin || first >= end) continue;
      for (uint32_t head = 0; head < cache_->layers.head_count; ++head) {
        std::memcpy(merged.rows->rows(head) + size_t{first - begin} * kRowBytes,
                    entry.rows->rows(head), size_t{entry.token_end - first} * kRowBytes);
      }
    }
    merged.closed = true;
    merged.token_end = end;
    return merged;
  }
  // Merges segments [first, last] of a snapshot.
  absl::Status Merge(const Snapshot& snapshot, size_t first, size_t last) {
    const std::vector<SegmentEntry>& segments = snapshot.list->segments;
    std::vector<uint64_t> ids;
    for (size_t i = first; i <= last; ++i) ids.push_back(segments[i].rows->segment_id());
    std::vector<SegmentEntry> replacement;
    replacement.push_back(
        Merged(snapshot, segments[first].rows->first_position(), segments[last].token_end));
    return sequence_->ReplaceSegments(ids, std::move(replacement));
  }
  // Codes of a segment that mean nothing, ready in layer slots below `ready_layers`.
  std::shared_ptr<const SegmentIndex> Codes(const SegmentEntry& entry, uint32_t ready_layers) {
    std::vector<size_t> sizes;
    for (const auto& layer : cache_->layers.layers) {
      sizes.push_back(Codebook::SizeBytes(kIndex, layer.shape));
    }
    SegmentIndex::AppendSizes(cache_->layers, kIndex, entry.rows->slot_capacity(), sizes);
    std::vector<Extent> extents = *cache_->pool->Allocate(sizes);
    std::vector<std::shared_ptr<const Codebook>> codebooks;
    std::vector<Extent> data;
    for (uint32_t slot = 0; slot < cache_->layers.size(); ++slot) {
      codebooks.push_back(std::make_shared<Codebook>(std::move(extents[slot]), kIndex,
                                                     cache_->layers.layers[slot].shape, 0));
      data.push_back(std::move(extents[cache_->layers.size() + slot]));
    }
    auto index = std::make_shared<SegmentIndex>(cache_->layers, entry.rows->slot_capacity(), 0,
                                                std::move(data), std::move(codebooks));
    index->BeginLayers();
    for (uint32_t slot = 0; slot < ready_layers; ++slot) index->MarkReady(slot);
    return index;
  }

  static constexpr size_t kRowBytes = (32 + 40) * sizeof(float);
  const IndexDescriptor kIndex = testing::Pq(2, 4);

  CacheParts parts_{SmallOptions(), 2};
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

// What a watcher heard, as text.
class Diary : public SequenceWatcher {
 public:
  explicit Diary(bool looks_on = false) : looks_on_(looks_on) {}
  void OnPublish(const Snapshot& next) override {
    text += "publish " + std::to_string(next.token_count()) + (next.list == list_ ? ";" : " new;");
    list_ = next.list;
  }
  bool OnTruncate(uint32_t token_count, uint64_t own_lease) override {
    text += "truncate " + std::to_string(token_count) + " " + std::to_string(own_lease) + ";";
    return looks_on_;
  }
  void OnSuspend(bool suspended) override { text += suspended ? "suspend;" : "resume;"; }
  void OnDrop() override { text += "drop;"; }

  std::string text;

 private:
  const bool looks_on_;
  std::shared_ptr<const SegmentList> list_;
};

TEST_F(SnapshotTest, AWatcherHearsOfEveryChangeInOrder) {
  const auto diary = std::make_shared<Diary>();
  ASSERT_TRUE(sequence_->Watch(diary).ok());
  Append(0, 10, 1.0f);
  Append(10, 5, 1.0f);
  ASSERT_TRUE(TruncateRows(*WriteLease::Acquire(sequence_), 12, 77).ok());
  ASSERT_TRUE(sequence_->Suspend(true).ok());
  ASSERT_TRUE(sequence_->Suspend(true).ok());
  ASSERT_TRUE(sequence_->Suspend(false).ok());
  Append(12, 116, 1.0f);
  Append(128, 1, 1.0f);
  const auto shown = Read();
  ASSERT_TRUE(Merge(*shown, 0, 0).ok());
  sequence_->Drop();
  EXPECT_EQ(diary->text,
            "publish 10 new;publish 15;truncate 12 77;publish 12;suspend;resume;publish 128;"
            "publish 129 new;publish 129 new;drop;");
}

TEST_F(SnapshotTest, AWatcherThatLeftHearsNothing) {
  const auto diary = std::make_shared<Diary>();
  ASSERT_TRUE(sequence_->Watch(diary).ok());
  Append(0, 10, 1.0f);
  sequence_->Unwatch(diary.get());
  Append(10, 10, 1.0f);
  EXPECT_EQ(diary->text, "publish 10 new;");
}

TEST_F(SnapshotTest, RolledBackSlotsThatALeaseShowsAreNotWrittenAgain) {
  Append(0, 20, 1.0f);
  const auto rows = Read()->list->segments.front().rows;
  const auto lease = std::make_shared<Diary>(/*looks_on=*/true);
  ASSERT_TRUE(sequence_->Watch(lease).ok());
  Truncate(10);
  Append(10, 10, 2.0f);
  const auto fresh = Read()->list->segments.front().rows;
  EXPECT_NE(fresh, rows);
  float value = 0;
  std::memcpy(&value, rows->rows(0) + 15 * kRowBytes, sizeof(value));
  EXPECT_EQ(value, 1.0f);
  ExpectValues(*Read(), 0, 10, 1.0f);
  ExpectValues(*Read(), 10, 20, 2.0f);
  Append(20, 5, 2.0f);  // nobody looked at these
  EXPECT_EQ(Read()->list->segments.front().rows, fresh);
}

TEST_F(SnapshotTest, ReplacedSegmentsKeepTheirTokensForReadersToo) {
  Append(0, 500, 1.0f);  // closed: 128, 256, 384
  const auto old = Read();
  ASSERT_TRUE(Merge(*old, 0, 1).ok());
  const auto merged = Read();
  ASSERT_EQ(merged->list->segments.size(), 3u);
  EXPECT_EQ(merged->list->segments[0].token_end, 256u);
  ExpectValues(*merged, 0, 500, 1.0f);
  ExpectValues(*old, 0, 500, 1.0f);
  Append(500, 100, 2.0f);
  ASSERT_TRUE(Merge(*Read(), 0, 2).ok());
  ExpectValues(*Read(), 0, 500, 1.0f);
  ExpectValues(*Read(), 500, 600, 2.0f);
}

TEST_F(SnapshotTest, AWriterPublishesOnTopOfSegmentsThatWereReplacedMeanwhile) {
  Append(0, 500, 1.0f);
  auto writer = SegmentWriter::Begin(cache_, *WriteLease::Acquire(sequence_), 128);
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Reserve(600).ok());  // closes the tail and opens another
  ASSERT_TRUE(Merge(*Read(), 0, 2).ok());
  const std::vector<SegmentEntry> before = Read()->list->segments;
  const LayerGroup& group = cache_->spec.groups[0];
  for (const uint32_t layer : group.layers) {
    Floats keys{.shape = {100, group.kv_heads, group.key_dim}, .data = {}};
    keys.data.assign(size_t{100} * group.kv_heads * group.key_dim, 2.0f);
    Floats values{.shape = {100, group.kv_heads, group.value_dim}, .data = {}};
    values.data.assign(size_t{100} * group.kv_heads * group.value_dim, 2.0f);
    const auto rows =
        CheckRows(*cache_, {.layer = layer, .keys = keys.view(), .values = values.view()});
    ASSERT_TRUE(rows.ok());
    ASSERT_TRUE(writer->Write(*rows).ok());
  }
  ASSERT_TRUE(writer->Commit().ok());
  const auto shown = Read();
  ASSERT_EQ(shown->list->segments.size(), 3u);
  EXPECT_EQ(shown->list->segments[0].rows, before[0].rows);
  EXPECT_EQ(shown->list->segments[1].rows, before[1].rows);
  ExpectValues(*shown, 0, 500, 1.0f);
  ExpectValues(*shown, 500, 600, 2.0f);
}

TEST_F(SnapshotTest, AWriterThatBeganBeforeASuspensionPublishesNothingUntilItsEnd) {
  Append(0, 300, 1.0f);
  const auto before = Read();
  const auto writer = WriteLease::Acquire(sequence_);
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(sequence_->Suspend(true).ok());
  const std::vector<uint32_t> fewer(before->layer_tokens.size(), 290);
  const auto refused = [&](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(*sequence_->Peek(), before);
  };
  refused(sequence_->PublishRows(fewer));
  refused(sequence_->PublishRows(fewer, ListEdit{.begin = 256, .entries = {}}));
  refused(sequence_->CloseActiveSegment());
  refused(sequence_->Truncate(10, /*own_lease=*/0));
  ASSERT_TRUE(sequence_->Suspend(false).ok());
  EXPECT_TRUE(sequence_->PublishRows(fewer).ok());
  EXPECT_EQ(Read()->token_count(), 290u);
}

TEST_F(SnapshotTest, AWriterKeepsCodesThatAreAddedWhileItWrites) {
  Append(0, 300, 1.0f);
  const auto writer = WriteLease::Acquire(sequence_);
  ASSERT_TRUE(writer.ok());
  const auto base = Read();
  ListEdit edit{.begin = base->active_begin(), .entries = {base->list->segments.back()}};
  edit.entries.back().closed = true;
  std::vector<IndexedSegment> indexed;
  for (const SegmentEntry& entry : base->list->segments) {
    indexed.push_back({entry.rows->segment_id(), Codes(entry, cache_->layers.size())});
  }
  ASSERT_TRUE(sequence_->PublishIndex(kIndex, indexed).ok());
  ASSERT_TRUE(sequence_->PublishRows(base->layer_tokens, std::move(edit)).ok());
  const auto shown = Read();
  ASSERT_EQ(shown->list->segments.size(), indexed.size());
  EXPECT_TRUE(shown->list->segments.back().closed);
  for (size_t i = 0; i < indexed.size(); ++i) {
    ASSERT_EQ(shown->list->segments[i].indexes.size(), 1u);
    EXPECT_EQ(shown->list->segments[i].indexes[0], indexed[i].index) << i;
  }
  EXPECT_TRUE(shown->list->index_ready(0));
}

TEST_F(SnapshotTest, ReplacesNothingThatHasChangedMeanwhile) {
  Append(0, 500, 1.0f);
  const auto old = Read();
  const auto refused = [&](absl::StatusCode code, size_t first, size_t last) {
    const auto before = Read();
    EXPECT_EQ(Merge(*old, first, last).code(), code);
    EXPECT_EQ(Read(), before);
  };
  ASSERT_TRUE(Merge(*old, 1, 2).ok());
  refused(absl::StatusCode::kAborted, 0, 1);
  refused(absl::StatusCode::kAborted, 2, 2);
  const auto now = Read();
  Truncate(300);
  EXPECT_EQ(Merge(*now, 1, 1).code(), absl::StatusCode::kAborted);
  std::vector<SegmentEntry> wrong = {Merged(*Read(), 0, 128)};
  const uint64_t id = Read()->list->segments[0].rows->segment_id();
  wrong[0].token_end = 120;
  EXPECT_EQ(sequence_->ReplaceSegments({&id, 1}, wrong).code(), absl::StatusCode::kAborted);
  wrong[0].closed = false;
  EXPECT_EQ(sequence_->ReplaceSegments({&id, 1}, wrong).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(sequence_->ReplaceSegments({&id, 1}, {}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(sequence_->ReplaceSegments({}, wrong).code(), absl::StatusCode::kInvalidArgument);
  Append(300, 10, 1.0f);
  const uint64_t tail = Read()->list->segments.back().rows->segment_id();
  EXPECT_EQ(sequence_->ReplaceSegments({&tail, 1}, {Merged(*Read(), 0, 128)}).code(),
            absl::StatusCode::kAborted);
  ExpectValues(*Read(), 0, 310, 1.0f);
  sequence_->Drop();
  EXPECT_EQ(Merge(*now, 0, 0).code(), absl::StatusCode::kNotFound);
}

TEST_F(SnapshotTest, AnIndexBecomesReadyLayerByLayerInAllSegments) {
  Append(0, 300, 1.0f);  // two closed segments and a tail
  const auto ready = [&] {
    const auto shown = Read();
    std::string text;
    for (size_t i = 0; i < shown->list->indexes.size(); ++i) {
      for (uint32_t slot = 0; slot < cache_->layers.size(); ++slot) {
        text += shown->list->index_ready(i, slot) ? "1" : "0";
      }
    }
    return text;
  };
  const auto publish = [&](size_t segment, uint32_t layers) {
    const SegmentEntry& entry = Read()->list->segments[segment];
    const IndexedSegment indexed{entry.rows->segment_id(), Codes(entry, layers)};
    return sequence_->PublishIndex(kIndex, {&indexed, 1});
  };
  ASSERT_TRUE(publish(0, 2).ok());
  EXPECT_EQ(ready(), "00");
  ASSERT_TRUE(publish(1, 1).ok());
  EXPECT_EQ(ready(), "00");
  ASSERT_TRUE(publish(2, 2).ok());
  EXPECT_EQ(ready(), "10");
  // A layer that is not ready is refused by name; the other one is not.
  Floats query{.shape = {1, 4, 32}, .data = std::vector<float>(128, 1.0f)};
  const auto score = [&](uint32_t layer, TokenRange tokens = {0, 300}) {
    return Score({cache_, Read()}, {.layer = layer, .query_position = 299, .queries = query.view()},
                 kIndex, tokens)
        .status();
  };
  EXPECT_TRUE(score(1).ok()) << score(1);
  EXPECT_EQ(score(3).code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(score(3).message()), ::testing::HasSubstr("layer 3: index pq m=2 b=4"));
  // Tokens of segments with codes can be scored before the layer is ready in all segments.
  EXPECT_TRUE(score(3, {0, 128}).ok()) << score(3, {0, 128});
  EXPECT_EQ(score(3, {0, 129}).code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(publish(1, 2).ok());
  EXPECT_EQ(ready(), "11");
  EXPECT_TRUE(score(3).ok());
  Append(300, 200, 1.0f);  // new segments take the codebooks of the one before
  EXPECT_EQ(ready(), "11");
  const uint64_t unknown = 999;
  const IndexedSegment gone{unknown, Codes(Read()->list->segments[0], 2)};
  EXPECT_EQ(sequence_->PublishIndex(kIndex, {&gone, 1}).code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(sequence_->RemoveIndex(kIndex).ok());
  EXPECT_EQ(ready(), "");
  EXPECT_TRUE(Read()->list->segments[0].indexes.empty());
}

TEST_F(SnapshotTest, AnAppendKeepsTheListWhenItChangesNothingInIt) {
  Append(0, 10, 1.0f);
  const auto list = Read()->list;
  for (uint32_t token = 10; token < 128; ++token) Append(token, 1, 1.0f);
  EXPECT_EQ(Read()->list, list);
  Append(128, 1, 1.0f);
  EXPECT_NE(Read()->list, list);
}

TEST_F(SnapshotTest, ReadersSharersAndMergesGoOnBesideAWriter) {
  std::atomic<bool> stop = false;
  std::atomic<int> rounds = 0;
  std::atomic<int> merges = 0;
  Append(0, 200, 200.0f);
  // A token's value is the version of the append that wrote it, so versions never fall along a
  // sequence, whatever was rolled back.
  const auto check = [](const Snapshot& snapshot) {
    float last = 0;
    for (uint32_t token = 0; token < snapshot.token_count(); ++token) {
      const float value = ValueAt(snapshot, token);
      ASSERT_GE(value, last) << "token " << token;
      last = value;
    }
  };
  std::vector<std::thread> threads;
  threads.emplace_back([&] {  // reader
    while (!stop) {
      check(*Read());
      ++rounds;
    }
  });
  threads.emplace_back([&] {  // sharer
    std::mt19937 random(1);
    while (!stop) {
      const auto count = static_cast<uint32_t>(random() % (Read()->token_count() + 1));
      const auto shared = sequence_->Share(count, false);
      if (!shared.ok()) continue;  // rolled back meanwhile
      const float end =
          (*shared)->token_count() == 0 ? 0.0f : ValueAt(**shared, (*shared)->token_count() - 1);
      check(**shared);
      if (end > 0) {
        ASSERT_EQ(ValueAt(**shared, (*shared)->token_count() - 1), end);
      }
      ++rounds;
    }
  });
  threads.emplace_back([&] {  // merger
    while (!stop) {
      const auto shown = Read();
      size_t closed = 0;
      while (closed < shown->list->segments.size() && shown->list->segments[closed].closed)
        ++closed;
      if (closed < 2) {
        std::this_thread::yield();
        continue;
      }
      const absl::Status status = Merge(*shown, 0, closed - 1);
      if (status.ok()) ++merges;
      ASSERT_TRUE(status.ok() || status.code() == absl::StatusCode::kAborted) << status;
    }
  });
  std::mt19937 random(2);
  uint32_t tokens = 200;
  float version = 201.0f;
  for (int step = 0; step < 300 || rounds < 100 || merges < 5; ++step) {
    if (tokens > 1500 || random() % 3 == 0) {
      tokens -= std::min(tokens, tokens > 1500 ? 1200u : static_cast<uint32_t>(random() % 60));
      Truncate(tokens);
    }
    const auto count = static_cast<uint32_t>(1 + random() % 60);
    Append(tokens, count, version);
    tokens += count;
    version += 1.0f;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Read()->token_count(), tokens);
  check(*Read());
  sequence_->Drop();
  EXPECT_EQ(cache_->pool->usage().used_bytes, 0u);
}

// The thread of the short work does not run.
TEST_F(SnapshotTest, WritersDoNotWaitForShortWorkForEver) {
  auto stopped = WriteLease::TakeShort(sequence_, SteadyTime::InfinitePast());
  ASSERT_TRUE(stopped.ok()) << stopped.status();
  auto writer =
      std::async(std::launch::async, [&] { return WriteLease::Acquire(sequence_).status(); });
  writer.wait_for(std::chrono::seconds(20));  // so that a failure ends
  { const WriteLease done = *std::move(stopped); }
  EXPECT_EQ(writer.get().code(), absl::StatusCode::kAborted);
}

TEST_F(SnapshotTest, WritersWaitForShortWork) {
  auto work = WriteLease::TakeShort(sequence_, SteadyTime::InfinitePast());
  ASSERT_TRUE(work.ok()) << work.status();
  absl::Status status;
  std::thread writer([&] { status = WriteLease::Acquire(sequence_).status(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  { const WriteLease done = *std::move(work); }
  writer.join();
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace pqcached::kvstore
