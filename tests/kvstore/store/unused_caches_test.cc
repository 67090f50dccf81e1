// Caches that no session uses make room for new ones of their tenant.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/kvstore/content.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::ContentRows;
using ::testing::ElementsAre;
using testing::kTenant;
using testing::MemoryKeeper;
using testing::NumberedContent;
using testing::RandomIds;
using testing::SmallOptions;
using testing::SmallSpec;
using ::testing::UnorderedElementsAre;

constexpr size_t kMiB = size_t{1} << 20;

StoreOptions Options(uint32_t max_caches, DescriptorKeeper* keeper = nullptr) {
  StoreOptions options = SmallOptions();
  options.max_caches = max_caches;
  options.max_pool_bytes = 96 * kMiB;
  options.retain = true;
  options.keeper = keeper;
  return options;
}

class UnusedCaches : public ::testing::Test {
 protected:
  void Start(const StoreOptions& options) {
    store_.reset();
    StoreOptions reporting = options;
    reporting.on_cache_evicted = [this](const std::string& tenant, const CacheInfo& cache) {
      EXPECT_EQ(tenant, kTenant);
      dropped_.push_back(cache.spec.name);
    };
    auto store = Store::Create(reporting);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }

  // Returns the cache's id, or 0 when it is refused.
  uint64_t Open(const std::string& name, const std::string& session,
                const std::string& tenant = kTenant, size_t capacity_bytes = 32 * kMiB) {
    dropped_.clear();
    CacheSpec spec = SmallSpec(name);
    spec.capacity_bytes = capacity_bytes;
    const auto opened = store_->OpenCache(tenant, spec, session);
    if (!opened.ok()) {
      EXPECT_EQ(opened.status().code(), absl::StatusCode::kResourceExhausted) << opened.status();
      return 0;
    }
    return opened->cache_id;
  }

  // Leaves a cached prefix of 256 tokens in a cache, and returns its id.
  uint64_t Retain(uint64_t cache_id) {
    std::mt19937_64 random(1);
    const auto created = store_->CreateSequence(
        kTenant, cache_id, {.session = "writer", .token_ids = RandomIds(random, 256)});
    EXPECT_TRUE(created.ok()) << created.status();
    const ContentRows rows(NumberedContent(1, 256), SmallSpec().groups[0]);
    EXPECT_TRUE(store_->Append(kTenant, created->sequence_id, 0, rows.layers).ok());
    EXPECT_TRUE(store_->DropSequence(kTenant, created->sequence_id).ok());
    const auto left = store_->ListSequences(kTenant, cache_id);
    EXPECT_EQ(left->size(), 1u);
    return left->empty() ? 0 : left->front().sequence_id;
  }

  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const CacheInfo& info : store_->ListCaches(kAllTenants)) names.push_back(info.spec.name);
    return names;
  }

  std::unique_ptr<Store> store_;
  std::vector<std::string> dropped_;  // by the last Open
};

TEST_F(UnusedCaches, LeaveInTheOrderInWhichTheirSessionsEnded) {
  Start(Options(3));
  ASSERT_NE(Open("a", "s1"), 0u);
  const uint64_t b = Open("b", "s2");
  ASSERT_NE(Open("c", "s3"), 0u);
  ASSERT_NE(Open("c", "s1"), 0u);  // used by two
  Retain(b);
  for (const char* session : {"s2", "s3", "s1"}) store_->DropSession(session);
  ASSERT_NE(Open("d", "s4"), 0u);
  EXPECT_THAT(dropped_, ElementsAre("b"));
  EXPECT_THAT(Names(), UnorderedElementsAre("a", "c", "d"));
  ASSERT_NE(Open("c", "s5"), 0u);  // is used again
  ASSERT_NE(Open("b", "s4"), 0u);
  EXPECT_THAT(dropped_, ElementsAre("a"));
  EXPECT_EQ(Open("a", "s4"), 0u) << "all are in use";
  EXPECT_THAT(Names(), UnorderedElementsAre("b", "c", "d"));
}

TEST_F(UnusedCaches, AsManyLeaveAsTheNewOneNeeds) {
  Start(Options(8));
  for (const char* name : {"a", "b", "c"}) ASSERT_NE(Open(name, "s1"), 0u);
  store_->DropSession("s1");
  ASSERT_NE(Open("d", "s2", kTenant, 64 * kMiB), 0u);
  EXPECT_EQ(dropped_.size(), 2u);
  EXPECT_EQ(Names().size(), 2u);
}

TEST_F(UnusedCaches, StayWhenTheyWouldNotSuffice) {
  Start(Options(8));
  ASSERT_NE(Open("a", "s1"), 0u);
  ASSERT_NE(Open("b", "s2"), 0u);
  store_->DropSession("s1");
  EXPECT_EQ(Open("c", "s2", kTenant, 96 * kMiB), 0u);
  EXPECT_EQ(Open("c", "s2", kTenant, 97 * kMiB), 0u);
  EXPECT_THAT(Names(), UnorderedElementsAre("a", "b"));
  EXPECT_NE(Open("a", "s3"), 0u);
}

TEST_F(UnusedCaches, StayWithAPinnedPrefixASequenceOrAnotherTenant) {
  Start(Options(4));
  const uint64_t pinned = Open("pinned", "s1"), used = Open("used", "s1");
  ASSERT_NE(Open("foreign", "s2", "other"), 0u);
  const uint64_t prefix = Retain(pinned);
  ASSERT_TRUE(store_->PinSequence(kTenant, prefix, absl::Hours(1)).ok());
  // A session that has not opened it may still have a sequence there.
  const auto sequence = store_->CreateSequence(kTenant, used, {.session = "guest"});
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  for (const char* session : {"s1", "s2"}) store_->DropSession(session);
  EXPECT_EQ(Open("new", "s3", kTenant, 33 * kMiB), 0u);
  EXPECT_THAT(Names(), UnorderedElementsAre("pinned", "used", "foreign"));
  ASSERT_TRUE(store_->PinSequence(kTenant, prefix, absl::ZeroDuration()).ok());
  ASSERT_NE(Open("new", "s3", kTenant, 32 * kMiB), 0u);
  EXPECT_THAT(dropped_, ElementsAre("pinned"));
}

class ShortMachine : public UnusedCaches {
 protected:
  ShortMachine() {
    root_ = (std::filesystem::temp_directory_path() / "unused_XXXXXX").string();
    EXPECT_NE(mkdtemp(root_.data()), nullptr);
    std::filesystem::create_directories(root_ + "/proc");
  }
  ~ShortMachine() override { std::filesystem::remove_all(root_); }

  void SetAvailable(size_t bytes) const {
    std::ofstream(root_ + "/proc/meminfo") << "MemAvailable: " << (bytes >> 10) << " kB\n";
  }
  // A store that may have more than the machine has.
  void StartWith(size_t available_bytes) {
    SetAvailable(available_bytes);
    StoreOptions options = Options(8);
    options.max_pool_bytes = 1024 * kMiB;
    options.memory_root = root_;
    Start(options);
  }

  std::string root_;
};

TEST_F(ShortMachine, GetsTheMemoryOfUnusedCaches) {
  StartWith(100 * kMiB);
  for (const char* name : {"a", "b", "c"}) ASSERT_NE(Open(name, "s1"), 0u);
  EXPECT_EQ(Open("d", "s2"), 0u);
  store_->DropSession("s1");
  ASSERT_NE(Open("d", "s2", kTenant, 64 * kMiB), 0u);
  EXPECT_THAT(dropped_, ElementsAre("a", "b"));
}

TEST_F(ShortMachine, KeepsThemWhenTheirMemoryWouldNotSuffice) {
  StartWith(100 * kMiB);
  ASSERT_NE(Open("a", "s1", kTenant, 16 * kMiB), 0u);
  ASSERT_NE(Open("b", "s2", kTenant, 64 * kMiB), 0u);
  store_->DropSession("s1");
  EXPECT_EQ(Open("c", "s2", kTenant, 40 * kMiB), 0u);
  EXPECT_THAT(Names(), UnorderedElementsAre("a", "b"));
  EXPECT_THAT(dropped_, ElementsAre());
}

// The machine's memory is not all that a cache needs.
TEST_F(UnusedCaches, StayWhenTheyAreNotTheReason) {
  MemoryKeeper keeper;
  Start(Options(8, &keeper));
  ASSERT_NE(Open("a", "s1"), 0u);
  store_->DropSession("s1");
  keeper.max_kept = keeper.Names().size();
  EXPECT_EQ(Open("b", "s2"), 0u);
  EXPECT_THAT(Names(), ElementsAre("a"));
  store_.reset();
}

TEST_F(UnusedCaches, WithoutASessionOrOfKeptSessionsAreInUse) {
  MemoryKeeper keeper;
  Start(Options(2, &keeper));
  ASSERT_TRUE(store_->KeepSession({"s1", kTenant, "name", "token"}).ok());
  ASSERT_NE(Open("a", "s1"), 0u);
  ASSERT_TRUE(store_->OpenCache(kTenant, SmallSpec("b")).ok());
  EXPECT_EQ(Open("c", "s2"), 0u);
  Start(Options(2, &keeper));
  EXPECT_EQ(Open("c", "s2"), 0u) << "the client of s1 may come back";
  store_->DropSession("s1");
  ASSERT_NE(Open("c", "s2"), 0u);
  EXPECT_EQ(dropped_.size(), 1u);
}

}  // namespace
}  // namespace pqcached::kvstore
