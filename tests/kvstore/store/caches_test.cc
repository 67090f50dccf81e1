#include "kvstore/store/caches.h"

#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kvstore/records/root_records.h"
#include "tests/kvstore/cache_parts.h"
#include "tests/kvstore/fixture.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::CacheParts;
using testing::SmallOptions;
using testing::SmallSpec;

constexpr size_t kMiB = size_t{1} << 20;

// Caches without a store.
struct World {
  explicit World(const StoreOptions& store_options, Caches::Dropper dropper = {})
      : options(store_options),
        parts(options, 1),
        ledger(std::make_shared<MemoryLedger>(options.memory_root)),
        memory(options, parts.shared(), /*root=*/nullptr, *ledger),
        caches(options, memory, std::move(dropper)) {}

  const StoreOptions options;
  CacheParts parts;
  const std::shared_ptr<MemoryLedger> ledger;
  CacheMemory memory;
  Caches caches;
};

CacheSpec Spec(const std::string& name, size_t capacity_bytes = kMiB) {
  CacheSpec spec = SmallSpec(name);
  spec.capacity_bytes = capacity_bytes;
  return spec;
}

void ExpectRefused(const absl::Status& status, StatusCode code, const std::string& field,
                   uint32_t retry_ms) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(FieldOf(status), field) << status;
  EXPECT_EQ(RetryMsOf(status), retry_ms) << status;
}

TEST(Caches, AreOpenedOncePerTenantAndName) {
  World world(SmallOptions());
  const auto first = world.caches.Open("a", Spec("x"), "session");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->is_new);
  const auto again = world.caches.Open("a", Spec("x"), "session");
  ASSERT_TRUE(again.ok());
  EXPECT_FALSE(again->is_new);
  EXPECT_EQ(again->cache, first->cache);
  const auto other = world.caches.Open("b", Spec("x"), "session");
  ASSERT_TRUE(other.ok());
  EXPECT_TRUE(other->is_new);
  EXPECT_EQ(world.caches.All().size(), 2u);
  EXPECT_EQ(world.caches.OfTenant("b").size(), 1u);
}

TEST(Caches, WithAnotherSpecAreRefused) {
  World world(SmallOptions());
  ASSERT_TRUE(world.caches.Open("a", Spec("x"), "session").ok());
  CacheSpec other = Spec("x");
  other.groups[0].key_dim = 64;
  ExpectRefused(world.caches.Open("a", other, "session").status(), StatusCode::kFailedPrecondition,
                "layer_groups[0].key_dim", kNoRetry);
}

// A client of an earlier version does not say how the pairs of its rotary keys lie.
TEST(Caches, MayLeaveTheLayoutOfRotaryPairsOpen) {
  World world{SmallOptions()};
  CacheSpec spec = Spec("a");
  spec.groups[0].rope = {.layout = 2, .theta = 1e4, .rotary_dim = 32};
  ASSERT_TRUE(world.caches.Open("t", spec, "session").ok());
  spec.groups[0].rope.layout = 0;
  EXPECT_TRUE(world.caches.Open("t", spec, "session").ok());
  spec.groups[0].rope.layout = 3;
  ExpectRefused(world.caches.Open("t", spec, "session").status(), StatusCode::kFailedPrecondition,
                "layer_groups[0].rope", kNoRetry);
}

TEST(Caches, AreFoundByTheirTenantOnly) {
  World world(SmallOptions());
  const uint64_t id = world.caches.Open("a", Spec("x"), "session")->cache->cache_id;
  EXPECT_TRUE(world.caches.Find("a", id).ok());
  EXPECT_TRUE(world.caches.FindInAnyTenant(id).ok());
  for (const char* tenant : {"b", ""}) {
    ExpectRefused(world.caches.Find(tenant, id).status(), StatusCode::kNotFound, "cache_id",
                  kNoRetry);
  }
}

TEST(Caches, AreBoundByCountPoolBytesAndQuota) {
  StoreOptions options = SmallOptions();
  options.max_caches = 2;
  options.max_pool_bytes = 8 * kMiB;
  options.tenant_quotas.by_tenant["a"] = {.max_bytes = 3 * kMiB};
  options.tenant_quotas.by_tenant["b"] = {.guaranteed_bytes = 2 * kMiB};
  World world(options);
  ExpectRefused(world.caches.Open("a", Spec("x", 4 * kMiB), "session").status(),
                StatusCode::kResourceExhausted, "capacity_bytes", kRetryMemory);  // its quota
  ExpectRefused(world.caches.Open("c", Spec("x", 7 * kMiB), "session").status(),
                StatusCode::kResourceExhausted, "capacity_bytes", kRetryMemory);  // b's guarantee
  ExpectRefused(world.caches.Open("b", Spec("x", 9 * kMiB), "session").status(),
                StatusCode::kResourceExhausted, "capacity_bytes", kNoRetry);  // never fits
  ASSERT_TRUE(world.caches.Open("a", Spec("x", 3 * kMiB), "session").ok());
  ASSERT_TRUE(world.caches.Open("b", Spec("x", 2 * kMiB), "session").ok());
  ExpectRefused(world.caches.Open("b", Spec("y"), "session").status(),
                StatusCode::kResourceExhausted, "max_caches", kRetryMemory);
}

TEST(Caches, OfOneTenantAreBoundAndTheBoundChanges) {
  StoreOptions options = SmallOptions();
  options.tenant_quotas.others.max_caches = 2;
  World world(options);
  ASSERT_TRUE(world.caches.Open("a", Spec("x"), "session").ok());
  ASSERT_TRUE(world.caches.Open("a", Spec("y"), "session").ok());
  ExpectRefused(world.caches.Open("a", Spec("z"), "session").status(),
                StatusCode::kResourceExhausted, "tenant_limits.caches", kRetryMemory);
  EXPECT_TRUE(world.caches.Open("b", Spec("x"), "session").ok()) << "has its own limit";
  world.caches.SetQuotas({.others = {.max_caches = 1}, .by_tenant = {{"a", {.max_caches = 3}}}});
  EXPECT_TRUE(world.caches.Open("a", Spec("z"), "session").ok());
  EXPECT_TRUE(world.caches.Open("b", Spec("x"), "session").ok()) << "is open";
  ExpectRefused(world.caches.Open("b", Spec("y"), "session").status(),
                StatusCode::kResourceExhausted, "tenant_limits.caches", kRetryMemory);
}

// A pool's pages are the machine's until they are touched, but no other cache may have them.
TEST(Caches, DoNotGetWhatOpenPoolsWillTouch) {
  std::string root = (std::filesystem::temp_directory_path() / "caches_XXXXXX").string();
  ASSERT_NE(mkdtemp(root.data()), nullptr);
  std::filesystem::create_directories(root + "/proc");
  std::ofstream(root + "/proc/meminfo") << "MemAvailable: " << 10 * (kMiB >> 10) << " kB\n";
  StoreOptions options = SmallOptions();
  options.memory_root = root;
  World world(options);
  ASSERT_TRUE(world.caches.Open("a", Spec("x", 7 * kMiB), "session").ok());
  ExpectRefused(world.caches.Open("a", Spec("y", 4 * kMiB), "session").status(),
                StatusCode::kResourceExhausted, "capacity_bytes", kRetryMemory);
  EXPECT_TRUE(world.caches.Open("a", Spec("y", 3 * kMiB), "session").ok());
  std::filesystem::remove_all(root);
}

TEST(Caches, OfRanksShareANameAndFitTogether) {
  World world(SmallOptions());
  const auto rank_spec = [](uint32_t rank) {
    CacheSpec spec = Spec("x");
    spec.rank = {.group = "g", .rank = rank, .rank_count = 2, .kv_head_begin = 2 * rank};
    return spec;
  };
  const auto rank0 = world.caches.Open("a", rank_spec(0), "session");
  const auto rank1 = world.caches.Open("a", rank_spec(1), "session");
  ASSERT_TRUE(rank0.ok() && rank1.ok());
  EXPECT_NE(rank0->cache, rank1->cache);
  EXPECT_EQ(world.caches.OfGroup(rank0->cache).size(), 2u);
  CacheSpec overlapping = rank_spec(2);
  overlapping.rank.kv_head_begin = 1;
  EXPECT_FALSE(world.caches.Open("a", overlapping, "session").ok());
  const auto single = world.caches.Open("b", Spec("x"), "session");
  EXPECT_EQ(world.caches.OfGroup(single->cache).size(), 1u);
}

// Not absl's Notification, whose order ThreadSanitizer does not see.
class Gate {
 public:
  void Open() {
    const MutexLock lock(&mutex_);
    open_ = true;
    opened_.SignalAll();
  }
  void Await() {
    const MutexLock lock(&mutex_);
    while (!open_) opened_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar opened_;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
};

// A keeper that holds up the first pool that it is asked to keep, and then answers `answer`.
class SlowKeeper final : public DescriptorKeeper {
 public:
  absl::Status Keep(std::string_view name, int descriptor) override {
    if (name.starts_with("pool-") && !asked_.exchange(true)) {
      at_keep.Open();
      go_on.Await();
      RETURN_IF_ERROR(answer);
    }
    return kept_.Keep(name, descriptor);
  }
  absl::Status Release(std::string_view name) override { return kept_.Release(name); }
  FileDescriptor Take(std::string_view name) const override { return kept_.Take(name); }
  std::vector<std::string> Names() const override { return kept_.Names(); }

  Gate at_keep, go_on;
  absl::Status answer;

 private:
  std::atomic<bool> asked_ = false;
  testing::MemoryKeeper kept_;
};

class SlowCaches : public ::testing::Test {
 protected:
  static StoreOptions Options(DescriptorKeeper& keeper) {
    StoreOptions options = SmallOptions();
    options.keeper = &keeper;
    options.max_caches = 4;
    return options;
  }

  SlowKeeper keeper_;
  const StoreOptions options_ = Options(keeper_);
  CacheParts parts_{options_, 1};
  const std::unique_ptr<RootRecords> root_ = *RootRecords::Open(options_.exec, keeper_);
  const std::shared_ptr<MemoryLedger> ledger_ =
      std::make_shared<MemoryLedger>(options_.memory_root);
  CacheMemory memory_{options_, parts_.shared(), root_.get(), *ledger_};
  Caches caches_{options_, memory_};
};

// The keeper is another process, which may be stopped.
TEST_F(SlowCaches, DoNotHoldUpOthers) {
  absl::StatusOr<Caches::Opened> slow, same;
  std::thread opener([&] { slow = caches_.Open("a", Spec("x"), "session"); });
  keeper_.at_keep.Await();
  const auto other = caches_.Open("b", Spec("x"), "session");
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_TRUE(other->is_new);
  EXPECT_TRUE(caches_.Find("b", other->cache->cache_id).ok());
  EXPECT_FALSE(caches_.Open("b", Spec("x"), "session")->is_new);
  EXPECT_EQ(caches_.All().size(), 1u);
  ASSERT_TRUE(caches_.Open("b", Spec("y"), "session").ok());
  ASSERT_TRUE(caches_.Open("b", Spec("z"), "session").ok());
  ExpectRefused(caches_.Open("b", Spec("one too many"), "session").status(),
                StatusCode::kResourceExhausted, "max_caches", kRetryMemory);
  std::thread joiner([&] { same = caches_.Open("a", Spec("x"), "session"); });
  keeper_.go_on.Open();
  opener.join();
  joiner.join();
  ASSERT_TRUE(slow.ok()) << slow.status();
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(slow->cache, same->cache);
  EXPECT_NE(slow->is_new, same->is_new);
  EXPECT_EQ(caches_.All().size(), 4u);
}

TEST_F(SlowCaches, LeaveTheirPlaceWhenTheyFail) {
  keeper_.answer = absl::UnavailableError("the keeper is gone");
  absl::StatusOr<Caches::Opened> slow, same;
  std::thread opener([&] { slow = caches_.Open("a", Spec("x"), "session"); });
  keeper_.at_keep.Await();
  std::thread joiner([&] { same = caches_.Open("a", Spec("x"), "session"); });
  keeper_.go_on.Open();
  opener.join();
  joiner.join();
  EXPECT_EQ(slow.status().code(), StatusCode::kUnavailable) << slow.status();
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_TRUE(same->is_new);
  for (const char* name : {"1", "2", "3"}) {
    EXPECT_TRUE(caches_.Open("b", Spec(name), "session").ok()) << name;
  }
}

TEST_F(SlowCaches, AreAwaitedForALimitedTime) {
  absl::StatusOr<Caches::Opened> slow;
  std::thread opener([&] { slow = caches_.Open("a", Spec("x"), "session"); });
  keeper_.at_keep.Await();
  auto joiner = std::async(std::launch::async,
                           [&] { return caches_.Open("a", Spec("x"), "session").status(); });
  joiner.wait_for(std::chrono::seconds(20));  // so that a failure ends
  keeper_.go_on.Open();
  opener.join();
  ExpectRefused(joiner.get(), StatusCode::kAborted, "name", kRetryConflict);
  EXPECT_TRUE(slow.ok()) << slow.status();
}

// Two caches of tenant "a", of 6 MiB, that no session uses, under a limit of 12 MiB. `drop` is called for each one that
// is dropped, without the lock.
struct FullWorld {
  explicit FullWorld(std::function<void(const Caches::CachePointer&)> drop)
      : world(Options(), {.held = [this] { return held; }, .drop = std::move(drop)}) {
    for (const char* name : {"1", "2"}) {
      const auto opened = world.caches.Open("a", Spec(name, 6 * kMiB), "session");
      ids.push_back(opened.ok() ? opened->cache->cache_id : 0);
    }
    world.caches.Leave("session");
  }
  static StoreOptions Options() {
    StoreOptions options = SmallOptions();
    options.max_pool_bytes = 12 * kMiB;
    return options;
  }
  absl::Status Open(const std::string& tenant, const std::string& name, size_t capacity_bytes) {
    return world.caches.Open(tenant, Spec(name, capacity_bytes), "other").status();
  }

  std::set<uint64_t> held;
  World world;
  std::vector<uint64_t> ids;
};

// What leaves counts until it has left, and its room is the caller's afterwards.
TEST(ReplacedCaches, LeaveTheirRoomToTheCaller) {
  FullWorld* full = nullptr;
  std::vector<absl::Status> thieves;
  FullWorld made([&](const Caches::CachePointer& cache) {
    thieves.push_back(full->Open("thief", "x", kMiB));
    EXPECT_EQ(full->world.caches.Remove(cache->cache_id), cache);
    thieves.push_back(full->Open("thief", "x", kMiB));
  });
  full = &made;
  EXPECT_TRUE(made.Open("a", "new", 12 * kMiB).ok());
  EXPECT_EQ(thieves.size(), 4u);
  for (const absl::Status& status : thieves) {
    ExpectRefused(status, StatusCode::kResourceExhausted, "capacity_bytes", kRetryMemory);
  }
  EXPECT_EQ(made.world.caches.All().size(), 1u);
}

TEST(ReplacedCaches, CountWhenTheyStay) {
  FullWorld full([](const Caches::CachePointer&) {});  // a session uses them meanwhile
  ExpectRefused(full.Open("a", "new", 6 * kMiB), StatusCode::kResourceExhausted, "capacity_bytes",
                kRetryMemory);
  EXPECT_EQ(full.world.caches.All().size(), 2u);
  EXPECT_TRUE(full.Open("a", "1", 6 * kMiB).ok());
  ExpectRefused(full.Open("thief", "x", kMiB), StatusCode::kResourceExhausted, "capacity_bytes",
                kRetryMemory);
}

TEST(ReplacedCaches, AreNeverHeldOnes) {
  std::vector<uint64_t> dropped;
  FullWorld* full = nullptr;
  FullWorld made([&](const Caches::CachePointer& cache) {
    dropped.push_back(cache->cache_id);
    full->world.caches.Remove(cache->cache_id);
  });
  full = &made;
  made.held = {made.ids[0]};
  ExpectRefused(made.Open("a", "new", 7 * kMiB), StatusCode::kResourceExhausted, "capacity_bytes",
                kRetryMemory);
  EXPECT_TRUE(dropped.empty());
  EXPECT_TRUE(made.Open("a", "new", 6 * kMiB).ok());
  EXPECT_EQ(dropped, std::vector<uint64_t>{made.ids[1]});
}

// A call that opens one that is leaving waits, and makes it anew.
TEST(ReplacedCaches, AreMadeAnewForOthers) {
  FullWorld* full = nullptr;
  std::future<absl::Status> joiner;
  FullWorld made([&](const Caches::CachePointer& cache) {
    if (!joiner.valid()) {
      joiner = std::async(std::launch::async, [&] { return full->Open("a", "1", kMiB); });
      EXPECT_EQ(joiner.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
    }
    full->world.caches.Remove(cache->cache_id);
  });
  full = &made;
  EXPECT_TRUE(made.Open("a", "new", 8 * kMiB).ok());
  const absl::Status joined = joiner.get();
  EXPECT_TRUE(joined.ok()) << joined;
  EXPECT_EQ(made.world.caches.All().size(), 2u);
}

TEST(Caches, AreMadeByOneOfManyThreads) {
  World world(SmallOptions());
  std::atomic<int> made = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i) {
        const auto opened = world.caches.Open("a", Spec("cache " + std::to_string(i)), "session");
        ASSERT_TRUE(opened.ok()) << opened.status();
        if (opened->is_new) ++made;
        EXPECT_TRUE(world.caches.Find("a", opened->cache->cache_id).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made.load(), 10);
  EXPECT_EQ(world.caches.All().size(), 10u);
}

}  // namespace
}  // namespace pqcached::kvstore
