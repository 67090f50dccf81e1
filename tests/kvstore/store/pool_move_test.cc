// Pools that a store moves to new memory while it recovers them; kills in the middle are in tests/fault/crash.

#include "kvstore/store/pool_move.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "kvstore/memory/file_keeper.h"
#include "kvstore/share/control_memory.h"
#include "tests/kvstore/content.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using ::testing::Contains;
using testing::Content;
using testing::Dump;
using ::testing::ElementsAre;
using testing::ExpectContent;
using ::testing::HasSubstr;
using testing::IngestContent;
using ::testing::IsEmpty;
using testing::kTenant;
using testing::MemoryKeeper;
using ::testing::Not;
using testing::NumberedContent;
using testing::Pq;
using testing::SharingStore;
using testing::SmallOptions;
using testing::SmallSpec;

ino_t FileOf(const DescriptorKeeper& keeper, const std::string& name) {
  struct stat info = {};
  const FileDescriptor memory = keeper.Take(name);
  return memory.valid() && fstat(memory.get(), &info) == 0 ? info.st_ino : 0;
}

class PoolMoveTest : public ::testing::Test {
 protected:
  explicit PoolMoveTest(std::unique_ptr<DescriptorKeeper> keeper = nullptr)
      : keeper_(keeper != nullptr ? std::move(keeper) : std::make_unique<MemoryKeeper>()) {
    Restart();
    const auto created = store().CreateSequence(kTenant, world_->cache_id, {.session = "session"});
    EXPECT_TRUE(created.ok()) << created.status();
    id_ = created->sequence_id;
    EXPECT_TRUE(IngestContent(store(), id_, world_->group, 0, content_).ok());
    EXPECT_TRUE(store().BuildIndex(kTenant, id_, {.index = Pq(2, 4), .iterations = 2}, {}).ok());
    pool_name_ = absl::StrCat("pool-", world_->cache_id);
  }

  void Restart(const std::string& memory_root = "") {
    world_.reset();
    StoreOptions options = SmallOptions();
    options.keeper = keeper_.get();
    options.memory_root = memory_root;
    world_.emplace(SmallSpec(), options);
  }
  Store& store() { return *world_->store; }
  absl::Status Plan() { return store().PlanPoolMove(world_->cache_id); }
  void ExpectAllThere() {
    ExpectContent(store(), id_, world_->group, content_);
    EXPECT_EQ(Dump(store()), before_);
  }

  const std::unique_ptr<DescriptorKeeper> keeper_;
  std::optional<SharingStore> world_;
  const Content content_ = NumberedContent(1, 300);
  uint64_t id_ = 0;
  std::string pool_name_;
  std::string before_;
};

TEST_F(PoolMoveTest, TheNextProcessServesFromNewMemory) {
  store().WaitIdle(SteadyTime::InfiniteFuture());
  before_ = Dump(store());
  const ino_t old_file = FileOf(*keeper_, pool_name_);
  const FileDescriptor old_memory = keeper_->Take(pool_name_);
  ASSERT_TRUE(Plan().ok());
  ASSERT_TRUE(Plan().ok()) << "a second plan changes nothing";
  Restart();
  EXPECT_THAT(store().Recovery().moved_caches, ElementsAre(world_->cache_id));
  EXPECT_THAT(store().Recovery().refused_moves, IsEmpty());
  EXPECT_EQ(store().Recovery().dropped_records, 0u);
  EXPECT_NE(FileOf(*keeper_, pool_name_), old_file);
  ExpectAllThere();
  Restart();
  EXPECT_THAT(store().Recovery().moved_caches, IsEmpty()) << "once";
  ExpectAllThere();
  EXPECT_EQ(keeper_->Names().size(), 3u) << "roots, pool, and record table";
}

// What a client of the earlier process maps stays as it was.
TEST_F(PoolMoveTest, TheOldMemoryIsNotWrittenAnyMore) {
  const FileDescriptor old_memory = keeper_->Take(pool_name_);
  const size_t size_bytes = SizeOf(old_memory);
  const auto mapping = Mapping::Map(old_memory, size_bytes, Mapping::Access::kRead);
  ASSERT_TRUE(mapping.ok());
  ASSERT_TRUE(Plan().ok());
  Restart();
  const std::string old_bytes(reinterpret_cast<const char*>(mapping->data()), size_bytes);
  store().EndQuarantine();
  ASSERT_TRUE(store().DropSequence(kTenant, id_).ok());
  for (int i = 0; i < 4; ++i) {
    const auto other = store().CreateSequence(kTenant, world_->cache_id, {.session = "session"});
    ASSERT_TRUE(other.ok());
    ASSERT_TRUE(
        IngestContent(store(), other->sequence_id, world_->group, 0, NumberedContent(7, 300)).ok());
  }
  EXPECT_TRUE(old_bytes == std::string(reinterpret_cast<const char*>(mapping->data()), size_bytes));
}

TEST_F(PoolMoveTest, AMoveThatWasInterruptedIsFinished) {
  store().WaitIdle(SteadyTime::InfiniteFuture());
  before_ = Dump(store());
  ASSERT_TRUE(Plan().ok());
  Restart();
  // As a process leaves it that was killed after it had released the old pool.
  const FileDescriptor copy = keeper_->Take(pool_name_);
  world_.reset();
  ASSERT_TRUE(keeper_->Keep(absl::StrCat("moved-", pool_name_.substr(5)), copy.get()).ok());
  ASSERT_TRUE(keeper_->Release(pool_name_).ok());
  Restart();
  EXPECT_EQ(store().Recovery().moved_caches.size(), 1u);
  ExpectAllThere();
  EXPECT_EQ(keeper_->Names().size(), 3u);
}

TEST_F(PoolMoveTest, WithoutMemoryThePoolStaysWhereItIs) {
  store().WaitIdle(SteadyTime::InfiniteFuture());
  before_ = Dump(store());
  const ino_t old_file = FileOf(*keeper_, pool_name_);
  ASSERT_TRUE(Plan().ok());
  const std::filesystem::path root =
      std::filesystem::path(::testing::TempDir()) / absl::StrCat("pool_move_", getpid());
  std::filesystem::create_directories(root / "proc");
  std::ofstream(root / "proc/meminfo") << "MemTotal: 1048576 kB\nMemAvailable: 66000 kB\n";
  Restart(root.string());
  std::filesystem::remove_all(root);
  EXPECT_THAT(store().Recovery().moved_caches, IsEmpty());
  EXPECT_THAT(store().Recovery().refused_moves, ElementsAre(HasSubstr("short")));
  EXPECT_EQ(FileOf(*keeper_, pool_name_), old_file);
  ExpectAllThere();
  Restart();
  EXPECT_THAT(store().Recovery().refused_moves, IsEmpty()) << "the plan was dropped";
  EXPECT_EQ(FileOf(*keeper_, pool_name_), old_file);
}

TEST_F(PoolMoveTest, DroppedCachesLeaveNoPlan) {
  ASSERT_TRUE(Plan().ok());
  EXPECT_THAT(keeper_->Names(), Contains(absl::StrCat("move-", world_->cache_id)));
  ASSERT_TRUE(store().DropCache(kAllTenants, world_->cache_id, /*force=*/true).ok());
  EXPECT_THAT(keeper_->Names(), ElementsAre("records"));
}

TEST_F(PoolMoveTest, OnlyPoolsThatOutliveTheProcessCanMove) {
  EXPECT_EQ(store().PlanPoolMove(world_->cache_id + 1).code(), absl::StatusCode::kNotFound);
  const SharingStore without_keeper(SmallSpec(), SmallOptions());
  EXPECT_EQ(without_keeper.store->PlanPoolMove(without_keeper.cache_id).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(PoolMove(*keeper_, 1).Plan(/*strict=*/true).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(OpenedPoolsTest, AreThoseThatWereNotedUntilTheyAreForgotten) {
  MemoryKeeper keeper;
  const auto writable = ControlMemory::Create(2, 17, &keeper);
  ASSERT_TRUE(writable.ok());
  const auto kept = (*writable)->ShareWithKeeper();
  (*writable)->NotePool(5);
  (*writable)->NotePool(6);
  (*writable)->NotePool(5);
  EXPECT_TRUE(OpenedPoolsOf(kept->get()).MayInclude(5));
  EXPECT_TRUE(OpenedPoolsOf(kept->get()).MayInclude(6));
  EXPECT_FALSE(OpenedPoolsOf(kept->get()).MayInclude(7));
  ForgetOpenedPool(kept->get(), 5);
  EXPECT_FALSE(OpenedPoolsOf(kept->get()).MayInclude(5));
  EXPECT_TRUE(OpenedPoolsOf(kept->get()).MayInclude(6));
  for (uint64_t id = 100; id < 500; ++id) (*writable)->NotePool(id);
  EXPECT_TRUE(OpenedPoolsOf(kept->get()).MayInclude(7)) << "the list is too short";
}

TEST(OpenedPoolsTest, MayBeAnyWhereNoListIsKnown) {
  const auto other = CreateMemfd("other", 4096);
  ASSERT_TRUE(other.ok());
  EXPECT_TRUE(OpenedPoolsOf(other->get()).MayInclude(1));
  EXPECT_TRUE(OpenedPoolsOf(-1).MayInclude(1));
}

}  // namespace
}  // namespace pqcached::kvstore
