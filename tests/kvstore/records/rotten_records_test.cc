// Records with flipped bits, and worse: what comes back is right, what is not comes back dropped and
// counted, and nothing crashes (the sanitizers watch).

#include <algorithm>
#include <cstddef>
#include <map>

#include "absl/time/clock.h"
#include "kvstore/records/record_bytes.h"
#include "kvstore/records/record_table.h"
#include "kvstore/sequence/sequence_record.h"
#include "tests/kvstore/content.h"
#include "tests/kvstore/memory_keeper.h"
#include "tests/kvstore/records/kept_image.h"

namespace pqcached::kvstore {
namespace {

using testing::AppendContent;
using testing::Content;
using testing::ContentOf;
using testing::ExpectContent;
using testing::IngestContent;
using testing::KeptImage;
using testing::kTenant;
using testing::MemoryKeeper;
using testing::Pq;
using testing::RandomIds;
using testing::SharingStore;
using testing::SmallOptions;
using testing::SmallSpec;

CacheSpec Spec() {
  CacheSpec spec = SmallSpec();
  spec.capacity_bytes = size_t{16} << 20;
  return spec;
}

class RottenRecords : public ::testing::Test {
 protected:
  RottenRecords() {
    MemoryKeeper keeper;
    {
      SharingStore world(Spec(), Options(keeper));
      EXPECT_TRUE(world.store->KeepSession({"session", "default", "name", "token"}).ok());
      ids_ = RandomIds(random_, 400);
      const Content named = ContentOf(ids_);
      const uint64_t a = world.Create(ids_).sequence_id;
      EXPECT_TRUE(IngestContent(*world.store, a, group_, 0, named).ok());
      EXPECT_TRUE(
          world.store->BuildIndex(kTenant, a, {.index = Pq(2, 4), .iterations = 1}, {}).ok());
      contents_[a] = named;
      const uint64_t b = world.Fork(a, 333).sequence_id;
      contents_[b] = Content(named.begin(), named.begin() + 333);
      const Content more = ContentOf(RandomIds(random_, 60));
      EXPECT_TRUE(AppendContent(*world.store, b, group_, 333, more).ok());
      contents_[b].insert(contents_[b].end(), more.begin(), more.end());
      const uint64_t c = world.Create().sequence_id;
      contents_[c] = ContentOf(RandomIds(random_, 200));
      EXPECT_TRUE(IngestContent(*world.store, c, group_, 0, contents_[c]).ok());
    }
    image_.emplace(keeper);
  }

  static StoreOptions Options(MemoryKeeper& keeper) {
    StoreOptions options = SmallOptions();
    options.keeper = &keeper;
    return options;
  }

  // Recovers from a spoilt image, compares what is found, and goes on to use it.
  void Check(const KeptImage& spoilt, bool is_noticed = true) {
    MemoryKeeper keeper;
    ASSERT_TRUE(spoilt.Restore(keeper));
    auto created = Store::Create(Options(keeper));
    ASSERT_TRUE(created.ok()) << created.status();
    Store& store = **created;
    const RecoveryReport report = store.Recovery();
    uint32_t found = 0;
    for (const auto& [id, content] : contents_) {
      const auto info = store.DescribeSequence(kTenant, id);
      if (!info.ok()) continue;
      ++found;
      ASSERT_EQ(info->token_count, content.size());
      ExpectContent(store, id, group_, content);
    }
    EXPECT_EQ(found, report.sequences);
    if (found < contents_.size() && report.recovered) {
      if (is_noticed) {
        EXPECT_GT(report.dropped_records, 0u);
      }
      ++trials_with_losses_;
    }
    if (report.caches == 0) return;
    const uint64_t cache_id = store.ListCaches("").front().cache_id;
    const auto match = store.MatchPrefix(kTenant, cache_id, ids_, "");
    ASSERT_TRUE(match.ok());
    EXPECT_LE(*match, 384u);
    for (const auto& [id, content] : contents_) store.DropSequence(kTenant, id).IgnoreError();
    store.EndQuarantine();
    // The checksums' thread may hold what was dropped as long as it is looking at it.
    const auto used_bytes = [&] { return store.ListCaches("").front().used_bytes; };
    for (int i = 0; i < 10000 && used_bytes() > 0; ++i) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(used_bytes(), 0u);
  }

  std::string TableName() const {
    for (const auto& [name, memory] : image_->memories) {
      if (name.starts_with("records-")) return name;
    }
    return "";
  }
  static bool IsTable(const std::string& name) { return !name.starts_with("pool"); }

  std::mt19937_64 random_{7};
  LayerGroup group_ = Spec().groups[0];
  std::vector<uint32_t> ids_;
  std::map<uint64_t, Content> contents_;
  std::optional<KeptImage> image_;
  uint32_t trials_with_losses_ = 0;
};

TEST_F(RottenRecords, NothingIsLostWithoutRot) {
  Check(*image_);
  EXPECT_EQ(trials_with_losses_, 0u);
}

TEST_F(RottenRecords, FlippedBitsAreNoticed) {
  constexpr int kTrials = 150;
  for (int trial = 0; trial < kTrials && !HasFatalFailure(); ++trial) {
    SCOPED_TRACE(trial);
    KeptImage spoilt = *image_;
    for (size_t flips = 1 + random_() % 8; flips > 0;) {
      auto memory = spoilt.memories.begin();
      std::advance(memory, static_cast<ptrdiff_t>(random_() % spoilt.memories.size()));
      if (!IsTable(memory->first)) continue;
      auto page = memory->second.pages.begin();
      std::advance(page, static_cast<ptrdiff_t>(random_() % memory->second.pages.size()));
      // Near what is written, where it hurts.
      const size_t byte = random_() % KeptImage::kPageBytes;
      const auto begin = page->second.begin() + static_cast<ptrdiff_t>(byte / 64 * 64);
      if (std::all_of(begin, begin + 64, [](std::byte b) { return b == std::byte{0}; })) continue;
      page->second[byte] ^= std::byte{1} << (random_() % 8);
      --flips;
    }
    Check(spoilt);
  }
  EXPECT_GT(trials_with_losses_, 10u);
}

// Cross-checks find most changes of a list; a bit without a meaning is found by its checksum only.
TEST_F(RottenRecords, AnyBitOfAListIsNoticed) {
  MemoryKeeper keeper;
  ASSERT_TRUE(image_->Restore(keeper));
  const CacheSpec spec = Spec();
  const StoredLayers layers(spec);
  const auto table =
      RecordTable::Open({}, keeper.Take(TableName()),
                        {.unit_count = static_cast<uint32_t>(spec.capacity_bytes / kMinExtentBytes),
                         .head_count = layers.head_count,
                         .layer_count = layers.size(),
                         .sequence_slots = 2 * Options(keeper).max_sequences,
                         .heap_bytes = uint64_t{16} << 20});
  ASSERT_TRUE(table.ok()) << table.status();
  uint32_t lists = 0;
  for (uint32_t slot = 0; slot < 2 * contents_.size(); ++slot) {
    const SlotArray::Content content = (*table)->states().Read(slot);
    if (content.state != SlotArray::State::kFull) continue;
    RecordReader reader(content.bytes);
    const auto state = reader.Get<StateRecord>();
    if (!state.list.valid()) continue;  // the state of a sequence that had just been created
    (*table)->bytes(state.list)[offsetof(ListRecord, reserved)] ^= std::byte{1};
    ++lists;
  }
  ASSERT_GE(lists, contents_.size());
  const auto created = Store::Create(Options(keeper));
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ((*created)->Recovery().sequences, 0u);
  EXPECT_EQ((*created)->Recovery().dropped_records, contents_.size());
}

// A prompt with another token would find rows that are not its own.
TEST_F(RottenRecords, NamesThatHaveChangedFindNothing) {
  KeptImage spoilt = *image_;
  const auto wanted = std::as_bytes(std::span(ids_).first(64));
  uint32_t found = 0;
  for (auto& [offset, page] : spoilt.memories[TableName()].pages) {
    const auto at = std::search(page.begin(), page.end(), wanted.begin(), wanted.end());
    if (at == page.end()) continue;
    *(at + 5 * sizeof(uint32_t)) ^= std::byte{1};
    ++found;
  }
  ASSERT_GE(found, 1u);
  MemoryKeeper keeper;
  ASSERT_TRUE(spoilt.Restore(keeper));
  const auto created = Store::Create(Options(keeper));
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_GT((*created)->Recovery().dropped_records, 0u);
  std::vector<uint32_t> changed = ids_;
  changed[5] ^= 1;
  const auto match =
      (*created)->MatchPrefix(kTenant, (*created)->ListCaches("").front().cache_id, changed, "");
  ASSERT_TRUE(match.ok()) << match.status();
  EXPECT_EQ(*match, 0u);
}

TEST_F(RottenRecords, PagesOfNoiseAreNoticed) {
  for (const auto& [name, memory] : image_->memories) {
    if (!IsTable(name)) continue;
    for (const auto& [offset, page] : memory.pages) {
      SCOPED_TRACE(name + " at " + std::to_string(offset));
      KeptImage spoilt = *image_;
      for (std::byte& byte : spoilt.memories[name].pages[offset]) {
        byte = static_cast<std::byte>(random_());
      }
      Check(spoilt);
      spoilt.memories[name].pages.erase(offset);  // as if never written
      Check(spoilt, /*is_noticed=*/false);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(RottenRecords, MemoryOfAnotherSizeIsNotMapped) {
  for (const auto& [name, memory] : image_->memories) {
    SCOPED_TRACE(name);
    KeptImage spoilt = *image_;
    KeptImage::Memory& shorter = spoilt.memories[name];
    shorter.size_bytes /= 2;
    shorter.pages.erase(shorter.pages.lower_bound(shorter.size_bytes), shorter.pages.end());
    Check(spoilt);
  }
}

TEST_F(RottenRecords, OldMemoriesOfTwoMomentsDoNotMix) {
  // The root of this moment beside tables of another: everything is found, or dropped.
  KeptImage spoilt = *image_;
  for (auto& [name, memory] : spoilt.memories) {
    if (name == "records") continue;
    memory.pages.clear();
  }
  Check(spoilt);
}

}  // namespace
}  // namespace pqcached::kvstore
