// What a store finds again of an earlier one; kills are in tests/fault.

#include <chrono>
#include <map>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "kvstore/checksum/checksums.h"
#include "kvstore/clock.h"
#include "kvstore/records/record_table.h"
#include "tests/kvstore/content.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::AppendContent;
using testing::Content;
using testing::ContentOf;
using testing::Dump;
using ::testing::ElementsAre;
using testing::ExpectContent;
using testing::Floats;
using testing::IngestContent;
using testing::kTenant;
using testing::MemoryKeeper;
using testing::NumberedContent;
using testing::Pq;
using testing::RandomFloats;
using testing::RandomIds;
using testing::SharingStore;
using testing::SmallOptions;
using testing::SmallSpec;

class Recovery : public ::testing::Test {
 protected:
  Recovery() { Restart(); }

  static StoreOptions Options(DescriptorKeeper& keeper) {
    StoreOptions options = SmallOptions();
    options.keeper = &keeper;
    return options;
  }
  // As after a kill: nothing of the old store is tidied up.
  void Restart() {
    world_.reset();
    world_.emplace(SmallSpec(), Options(keeper_));
  }
  Store& store() { return *world_->store; }
  const LayerGroup& group() { return world_->group; }
  size_t used_bytes() { return world_->used_bytes(); }
  // The checksums' thread may hold what was dropped as long as it is looking at it.
  void ExpectAllFreed() {
    for (int i = 0; i < 10000 && used_bytes() > 0; ++i) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(used_bytes(), 0u);
  }

  uint64_t Make(const Content& content, std::optional<LiveIndex> live_index = {}) {
    const auto created = store().CreateSequence(kTenant, world_->cache_id,
                                                {.session = "session", .live_index = live_index});
    EXPECT_TRUE(created.ok()) << created.status();
    if (!content.empty()) {
      const auto count = IngestContent(store(), created->sequence_id, group(), 0, content);
      EXPECT_TRUE(count.ok()) << count.status();
    }
    return created->sequence_id;
  }
  void Append(uint64_t id, Content& content, const Content& added) {
    const auto count = AppendContent(store(), id, group(), content.size(), added);
    ASSERT_TRUE(count.ok()) << count.status();
    content.insert(content.end(), added.begin(), added.end());
    ASSERT_EQ(*count, content.size());
  }
  absl::Status Build(uint64_t id, const IndexDescriptor& index) {
    return store().BuildIndex(kTenant, id, {.index = index, .iterations = 2}, {});
  }
  absl::StatusOr<Selected> TopK(uint64_t id, uint32_t count, const IndexDescriptor& index) {
    std::mt19937_64 random(5);
    const Floats query = RandomFloats(random, {1, group().query_heads, group().key_dim});
    return store().TopK(kTenant, id,
                        {.layer = 1, .query_position = count - 1, .queries = query.view()},
                        {.index = index, .budget_ratio = 0.3});
  }

  MemoryKeeper keeper_;
  std::optional<SharingStore> world_;
};

TEST_F(Recovery, FindsAnEmptyStoreToo) {
  EXPECT_FALSE(store().Recovery().recovered);
  Restart();
  const RecoveryReport report = store().Recovery();
  EXPECT_TRUE(report.recovered);
  EXPECT_EQ(report.caches, 1u);
  EXPECT_EQ(report.sequences, 0u);
  EXPECT_EQ(report.dropped_records, 0u);
  EXPECT_EQ(used_bytes(), 0u);
}

TEST_F(Recovery, FindsRowsIndexesForksAndCutsAsTheyWere) {
  Content a = NumberedContent(1, 300);
  const uint64_t a_id = Make(a);
  Append(a_id, a, NumberedContent(2, 1));
  ASSERT_TRUE(Build(a_id, Pq(2, 4)).ok());
  Append(a_id, a, NumberedContent(3, 150));
  ASSERT_TRUE(Build(a_id, Pq(1, 6)).ok());
  Append(a_id, a, NumberedContent(4, 5));
  const uint64_t b_id = world_->Fork(a_id, 200).sequence_id;
  Content b(a.begin(), a.begin() + 200);
  Append(b_id, b, NumberedContent(5, 77));
  ASSERT_TRUE(store().TruncateSequence(kTenant, a_id, 451).ok());
  a.resize(451);
  const uint64_t c_id = Make({});
  const uint64_t gone_id = Make(NumberedContent(6, 140));
  ASSERT_TRUE(store().DropSequence(kTenant, gone_id).ok());
  // What was dropped is held until its checksum is there.
  store().WaitIdle(SteadyTime::InfiniteFuture());
  const std::string before = Dump(store());
  const auto selected = TopK(a_id, 451, Pq(1, 6));
  ASSERT_TRUE(selected.ok()) << selected.status();

  for (int restart = 0; restart < 3; ++restart) {
    Restart();
    store().EndQuarantine();
    EXPECT_EQ(Dump(store()), before);
    EXPECT_EQ(store().Recovery().sequences, 3u);
    EXPECT_EQ(store().Recovery().dropped_records, 0u);
    ExpectContent(store(), a_id, group(), a);
    ExpectContent(store(), b_id, group(), b);
    const auto again = TopK(a_id, 451, Pq(1, 6));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->positions, selected->positions);
    EXPECT_EQ(store().DescribeSequence(kTenant, gone_id).status().code(),
              absl::StatusCode::kNotFound);
  }
  // They go on, with ids that nobody had before.
  Append(a_id, a, NumberedContent(7, 200));
  Append(b_id, b, NumberedContent(8, 200));
  Content c = NumberedContent(9, 10);
  ASSERT_TRUE(AppendContent(store(), c_id, group(), 0, c).ok());
  EXPECT_GT(Make({}), gone_id);
  ExpectContent(store(), a_id, group(), a);
  ExpectContent(store(), b_id, group(), b);
  EXPECT_TRUE(TopK(a_id, 600, Pq(2, 4)).ok());
}

TEST_F(Recovery, FreesAllOfADroppedSequence) {
  Content a = NumberedContent(1, 700);
  const uint64_t a_id = Make(a);
  ASSERT_TRUE(Build(a_id, Pq(2, 4)).ok());
  Restart();
  EXPECT_EQ(store().Recovery().quarantined_bytes, 0u);
  EXPECT_EQ(store().Recovery().bytes, used_bytes());
  EXPECT_EQ(store().DropSession("session"), 1u);
  // Clients of the earlier process may still look at it.
  EXPECT_GT(used_bytes(), 0u);
  EXPECT_EQ(store().Stats(kAllTenants).quarantined_bytes, used_bytes());
  store().EndQuarantine();
  ExpectAllFreed();
  Restart();
  EXPECT_EQ(store().Recovery().sequences, 0u);
  EXPECT_EQ(used_bytes(), 0u);
}

TEST_F(Recovery, QuarantinesWhatNoRecordNames) {
  const uint64_t id = Make({});
  const Content content = NumberedContent(1, 300);
  const testing::ContentRows rows(content, group());
  // Lives longer than its store, as its memory does in a process that is killed.
  auto ingest = store().BeginIngest(kTenant, id);
  ASSERT_TRUE(ingest.ok() && (*ingest)->Write(0, rows.layers[0]).ok());
  const size_t held_bytes = used_bytes();
  ASSERT_GT(held_bytes, 0u);
  Restart();
  EXPECT_EQ(store().Recovery().quarantined_bytes, held_bytes);
  EXPECT_EQ(store().Recovery().bytes, 0u);
  Content other = NumberedContent(2, 300);
  ASSERT_TRUE(IngestContent(store(), id, group(), 0, other).ok());
  Restart();  // still in quarantine
  EXPECT_EQ(store().Recovery().quarantined_bytes, held_bytes);
  ExpectContent(store(), id, group(), other);
  store().EndQuarantine();
  EXPECT_EQ(store().Stats(kAllTenants).quarantined_bytes, 0u);
  ASSERT_TRUE(store().DropSequence(kTenant, id).ok());
  ExpectAllFreed();
}

TEST_F(Recovery, KeepsWhatAForkWasShownOfAnOpenTail) {
  Content a = NumberedContent(1, 100);
  const uint64_t a_id = Make(a);
  const uint64_t b_id = world_->Fork(a_id).sequence_id;
  const Content b = a;
  Restart();
  ASSERT_TRUE(store().TruncateSequence(kTenant, a_id, 40).ok());
  a.resize(40);
  Append(a_id, a, NumberedContent(2, 30));
  ExpectContent(store(), a_id, group(), a);
  ExpectContent(store(), b_id, group(), b);
  Restart();
  ExpectContent(store(), a_id, group(), a);
  ExpectContent(store(), b_id, group(), b);
}

TEST_F(Recovery, FindsNamesAndSharesByThem) {
  std::mt19937_64 random(1);
  const std::vector<uint32_t> ids = RandomIds(random, 1000);
  const Content content = ContentOf(ids);
  const uint64_t id = world_->Create(ids).sequence_id;
  ASSERT_TRUE(IngestContent(store(), id, group(), 0, content).ok());
  ASSERT_TRUE(store().TruncateSequence(kTenant, id, 900).ok());
  Restart();
  EXPECT_EQ(world_->Match(ids), 896u);
  const CreatedSequence twin = world_->Create(ids);
  EXPECT_EQ(twin.token_count, 896u);
  ExpectContent(store(), twin.sequence_id, group(), std::span(content).first(896));
  // Names go on where they ended.
  ASSERT_TRUE(store().NameTokens(kTenant, id, 900, std::span(ids).subspan(900)).ok());
  ASSERT_TRUE(
      AppendContent(store(), id, group(), 900, std::span<const uint64_t>(content).subspan(900))
          .ok());
  Restart();
  EXPECT_EQ(world_->Match(ids), 896u);
  EXPECT_FALSE(store().NameTokens(kTenant, id, 1001, std::span(ids).first(1)).ok());
  EXPECT_TRUE(store().NameTokens(kTenant, id, 1000, std::span(ids).first(1)).ok());
}

TEST_F(Recovery, KeepsSuspendedSequencesSuspended) {
  const uint64_t id = Make(NumberedContent(1, 10));
  ASSERT_TRUE(store().SuspendSequence(kTenant, id).ok());
  Restart();
  EXPECT_EQ(store().FetchBlocks(kTenant, id, 1, {0, 1}, RowPart::kRow).status().code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(store().ResumeSequence(kTenant, id).ok());
  Restart();
  ExpectContent(store(), id, group(), NumberedContent(1, 10));
}

TEST_F(Recovery, PinsOutliveTheProcess) {
  Content a = NumberedContent(1, 10);
  const uint64_t pinned_id = Make(a);
  const uint64_t other_id = Make(a);
  const auto left = [this](uint64_t id) { return world_->Describe(id).pin_left; };
  ASSERT_TRUE(store().PinSequence(kTenant, pinned_id, absl::Hours(1)).ok());
  const absl::Duration before = left(pinned_id);
  for (int restart = 0; restart < 3; ++restart) {
    Append(pinned_id, a, NumberedContent(2, 3));  // what is written next says it, too
    Restart();
    EXPECT_LT(left(pinned_id), before);
    EXPECT_GT(left(pinned_id), absl::Minutes(50));
    EXPECT_EQ(left(other_id), absl::ZeroDuration());
    EXPECT_EQ(store().EvictSequence(kAllTenants, pinned_id).code(),
              absl::StatusCode::kFailedPrecondition);
  }
  ASSERT_TRUE(store().PinSequence(kTenant, pinned_id, absl::ZeroDuration()).ok());
  Restart();
  EXPECT_EQ(left(pinned_id), absl::ZeroDuration());
  ASSERT_TRUE(store().PinSequence(kTenant, other_id, absl::Milliseconds(50)).ok());
  Restart();
  while (left(other_id) > absl::ZeroDuration()) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_TRUE(store().EvictSequence(kAllTenants, other_id).ok());
  ExpectContent(store(), pinned_id, group(), a);
}

TEST_F(Recovery, GoesOnWithLiveIndexes) {
  const LiveIndex live{.index = Pq(2, 4), .iterations = 2};
  Content a = NumberedContent(1, 500);
  const uint64_t id = Make(a, live);
  Restart();  // in the midst of it
  Append(id, a, NumberedContent(2, 600));
  Restart();
  ASSERT_TRUE(Build(id, Pq(2, 4)).ok());
  ExpectContent(store(), id, group(), a);
  EXPECT_TRUE(TopK(id, 1100, Pq(2, 4)).ok());
  Restart();
  EXPECT_TRUE(TopK(id, 1100, Pq(2, 4)).ok());
  ASSERT_TRUE(store().DropSequence(kTenant, id).ok());
  store().EndQuarantine();
  // Threads of the store that looked after the indexes let go of what they saw.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (used_bytes() != 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_EQ(used_bytes(), 0u);
}

TEST_F(Recovery, DropsAnIndexThatWasHalfBuilt) {
  Content a = NumberedContent(1, 600);
  const uint64_t id = Make(a);
  // The first report comes when a layer is published; the store is left there.
  std::atomic<bool> reported = false;
  std::atomic<bool> keep_going = false;
  std::thread builder([&, old = &store()] {
    old->BuildIndex(kTenant, id, {.index = Pq(2, 4), .iterations = 2},
                    [&](const BuildProgress& progress) {
                      if (progress.layers_done == 0) return true;
                      reported = true;
                      while (!keep_going) std::this_thread::yield();
                      return false;
                    })
        .IgnoreError();
  });
  while (!reported) std::this_thread::yield();
  // What the next process would find: a copy of all that is kept.
  MemoryKeeper copy;
  for (const std::string& name : keeper_.Names()) {
    const FileDescriptor from = keeper_.Take(name);
    const size_t size_bytes = SizeOf(from);
    const auto to = copy.CreateMemory("copy", size_bytes);
    ASSERT_TRUE(to.ok() && copy.Keep(name, to->get()).ok());
    const auto source = Mapping::Map(from, size_bytes, Mapping::Access::kRead);
    const auto target = Mapping::Map(*to, size_bytes, Mapping::Access::kReadWrite);
    ASSERT_TRUE(source.ok() && target.ok());
    std::copy_n(source->data(), size_bytes, target->data());
  }
  keep_going = true;
  builder.join();
  { const SharingStore once(SmallSpec(), Options(copy)); }  // what it leaves out, is out
  const SharingStore next(SmallSpec(), Options(copy));
  EXPECT_EQ(next.store->Recovery().dropped_records, 0u);
  const auto info = next.store->DescribeSequence(kTenant, id);
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_TRUE(info->indexes.empty());
  ExpectContent(*next.store, id, next.group, a);
  ASSERT_TRUE(next.store->BuildIndex(kTenant, id, {.index = Pq(2, 4), .iterations = 2}, {}).ok());
}

TEST_F(Recovery, LeavesStrictPoolsBehindWhereNoMappingIsKept) {
  StoreOptions options = Options(keeper_);
  options.strict_memory = true;
  options.max_pool_bytes = size_t{2} << 30;
  world_.reset();
  MemoryKeeper keeper;
  options.keeper = &keeper;
  { const SharingStore strict(SmallSpec(), options); }
  const auto store = Store::Create(options);
  ASSERT_TRUE(store.ok());
  EXPECT_TRUE((*store)->Recovery().recovered);
  EXPECT_EQ((*store)->Recovery().caches, 0u);
}

TEST_F(Recovery, LetsGoOfACacheWhoseMemoryIsGone) {
  const uint64_t id = Make(NumberedContent(1, 10));
  world_.reset();
  ASSERT_TRUE(keeper_.Release("pool-1").ok());
  Restart();
  EXPECT_EQ(store().Recovery().caches, 0u);
  EXPECT_EQ(store().Recovery().dropped_records, 1u);
  EXPECT_THAT(store().Recovery().dropped, ElementsAre("cache 1: the pool is missing or too short"));
  EXPECT_EQ(store().DescribeSequence(kTenant, id).status().code(), absl::StatusCode::kNotFound);
  EXPECT_GT(world_->cache_id, 1u);
}

// The bytes of everything that is kept, by name.
std::map<std::string, std::string> BytesOf(const MemoryKeeper& keeper) {
  std::map<std::string, std::string> bytes;
  for (const std::string& name : keeper.Names()) {
    const FileDescriptor kept = keeper.Take(name);
    const auto mapping = Mapping::Map(kept, SizeOf(kept), Mapping::Access::kRead);
    EXPECT_TRUE(mapping.ok());
    bytes[name].assign(reinterpret_cast<const char*>(mapping->data()), mapping->size_bytes());
  }
  return bytes;
}

TEST_F(Recovery, RefusesMemoryOfAnotherVersionAndTouchesNothing) {
  const uint64_t id = Make(NumberedContent(1, 600));
  ASSERT_TRUE(Build(id, Pq(2, 4)).ok());
  ASSERT_TRUE(store().KeepSession({"session", "default", "name", "token"}).ok());
  world_.reset();

  // Header of RootRecords: magic, then counters of 16 bytes each (a number and its complement).
  constexpr size_t kVersionsOffset = 8 + 3 * 16;
  const FileDescriptor kept = keeper_.Take("records");
  const auto root = Mapping::Map(kept, SizeOf(kept), Mapping::Access::kReadWrite);
  ASSERT_TRUE(root.ok());
  auto* const magic = reinterpret_cast<uint64_t*>(root->data());
  auto* const versions = reinterpret_cast<uint64_t*>(root->data() + kVersionsOffset);
  const uint64_t our_magic = *magic;
  const uint64_t ours = versions[0];
  ASSERT_EQ(ours, uint64_t{kRecordVersion} << 32 | kLayoutVersion);
  ASSERT_EQ(versions[1], ~ours);

  const auto expect_refused = [&](uint32_t layout_version, uint32_t record_version) {
    SCOPED_TRACE(layout_version);
    const auto before = BytesOf(keeper_);
    const auto created = Store::Create(Options(keeper_));
    ASSERT_EQ(created.status().code(), absl::StatusCode::kFailedPrecondition) << created.status();
    EXPECT_THAT(std::string(created.status().message()),
                ::testing::AllOf(
                    ::testing::HasSubstr("have layout_version " + std::to_string(layout_version) +
                                         " and record_version " + std::to_string(record_version)),
                    ::testing::HasSubstr("reads layout_version " + std::to_string(kLayoutVersion) +
                                         " and record_version " + std::to_string(kRecordVersion))));
    EXPECT_TRUE(BytesOf(keeper_) == before);
  };
  const auto set_versions = [&](uint32_t layout_version, uint32_t record_version) {
    versions[0] = uint64_t{record_version} << 32 | layout_version;
    versions[1] = ~versions[0];
  };
  set_versions(kOldestExtentVersion - 1, kRecordVersion);
  expect_refused(kOldestExtentVersion - 1, kRecordVersion);
  set_versions(kLayoutVersion + 1, kRecordVersion);
  expect_refused(kLayoutVersion + 1, kRecordVersion);
  set_versions(kLayoutVersion, kRecordVersion + 1);
  expect_refused(kLayoutVersion, kRecordVersion + 1);
  // Records of before there were versions: the magic's last digit was 1, and zeros followed.
  set_versions(0, 0);
  *magic = our_magic - (uint64_t{1} << 56);
  expect_refused(1, 1);
  // The earlier sidecar still finds all that it left.
  *magic = our_magic;
  set_versions(kLayoutVersion, kRecordVersion);
  Restart();
  EXPECT_EQ(store().Recovery().sequences, 1u);
  EXPECT_EQ(store().Recovery().dropped_records, 0u);
  EXPECT_EQ(store().KeptSessions().size(), 1u);
  ExpectContent(store(), id, group(), NumberedContent(1, 600));
  // A version that has rotted is written again.
  world_.reset();
  versions[1] ^= 1;
  Restart();
  EXPECT_EQ(store().Recovery().sequences, 1u);
  EXPECT_EQ(versions[1], ~ours);
}

TEST_F(Recovery, AnIncrementalIndexOfASuspendedSequenceHasNotFailed) {
  const uint64_t id = Make(NumberedContent(1, 300), LiveIndex{.index = Pq(2, 4), .iterations = 1});
  ASSERT_TRUE(store().SuspendSequence(kTenant, id).ok());
  Restart();  // the work on the index begins while the sequence is suspended
  ASSERT_TRUE(store().WaitIdle(SteadyTime::InfiniteFuture()));
  const auto info = store().DescribeSequence(kTenant, id);
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_TRUE(info->live_index.ok()) << info->live_index;
  ASSERT_TRUE(store().ResumeSequence(kTenant, id).ok());
  const absl::Status closed = store().ClosePrefill(kTenant, id);
  EXPECT_TRUE(closed.ok()) << closed;
}

TEST_F(Recovery, FailsWhenMemoryCannotBeKept) {
  keeper_.max_kept = 3;
  CacheSpec spec = SmallSpec("other");
  EXPECT_EQ(store().OpenCache(kTenant, spec).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(keeper_.Names().size(), 3u);
  keeper_.max_kept = 5;
  EXPECT_TRUE(store().OpenCache(kTenant, spec).ok());
}

}  // namespace
}  // namespace pqcached::kvstore
