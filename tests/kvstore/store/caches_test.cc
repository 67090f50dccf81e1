#include "kvstore/store/caches.h"

#include <stdlib.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/kvstore/cache_parts.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::CacheParts;
using testing::SmallOptions;
using testing::SmallSpec;

constexpr size_t kMiB = size_t{1} << 20;

// Caches without a store.
struct World {
  explicit World(const StoreOptions& store_options)
      : options(store_options),
        parts(options, 1),
        ledger(std::make_shared<MemoryLedger>(options.memory_root)),
        memory(options, parts.shared(), /*root=*/nullptr, *ledger),
        caches(options, memory) {}

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
  const auto first = world.caches.Open("a", Spec("x"));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->is_new);
  const auto again = world.caches.Open("a", Spec("x"));
  ASSERT_TRUE(again.ok());
  EXPECT_FALSE(again->is_new);
  EXPECT_EQ(again->cache, first->cache);
  const auto other = world.caches.Open("b", Spec("x"));
  ASSERT_TRUE(other.ok());
  EXPECT_TRUE(other->is_new);
  EXPECT_EQ(world.caches.All().size(), 2u);
  EXPECT_EQ(world.caches.OfTenant("b").size(), 1u);
}

TEST(Caches, WithAnotherSpecAreRefused) {
  World world(SmallOptions());
  ASSERT_TRUE(world.caches.Open("a", Spec("x")).ok());
  CacheSpec other = Spec("x");
  other.groups[0].key_dim = 64;
  ExpectRefused(world.caches.Open("a", other).status(), StatusCode::kFailedPrecondition,
                "layer_groups[0].key_dim", kNoRetry);
}

TEST(Caches, AreFoundByTheirTenantOnly) {
  World world(SmallOptions());
  const uint64_t id = world.caches.Open("a", Spec("x"))->cache->cache_id;
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
  options.tenant_quotas["a"] = {.max_bytes = 3 * kMiB};
  options.tenant_quotas["b"] = {.guaranteed_bytes = 2 * kMiB};
  World world(options);
  ExpectRefused(world.caches.Open("a", Spec("x", 4 * kMiB)).status(),
                StatusCode::kResourceExhausted, "capacity_bytes", kRetryMemory);  // its quota
  ExpectRefused(world.caches.Open("c", Spec("x", 7 * kMiB)).status(),
                StatusCode::kResourceExhausted, "capacity_bytes", kRetryMemory);  // b's guarantee
  ExpectRefused(world.caches.Open("b", Spec("x", 9 * kMiB)).status(),
                StatusCode::kResourceExhausted, "capacity_bytes", kRetryMemory);
  ASSERT_TRUE(world.caches.Open("a", Spec("x", 3 * kMiB)).ok());
  ASSERT_TRUE(world.caches.Open("b", Spec("x", 2 * kMiB)).ok());
  ExpectRefused(world.caches.Open("b", Spec("y")).status(), StatusCode::kResourceExhausted,
                "max_caches", kRetryMemory);
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
  ASSERT_TRUE(world.caches.Open("a", Spec("x", 7 * kMiB)).ok());
  ExpectRefused(world.caches.Open("a", Spec("y", 4 * kMiB)).status(),
                StatusCode::kResourceExhausted, "capacity_bytes", kRetryMemory);
  EXPECT_TRUE(world.caches.Open("a", Spec("y", 3 * kMiB)).ok());
  std::filesystem::remove_all(root);
}

TEST(Caches, OfRanksShareANameAndFitTogether) {
  World world(SmallOptions());
  const auto rank_spec = [](uint32_t rank) {
    CacheSpec spec = Spec("x");
    spec.rank = {.group = "g", .rank = rank, .rank_count = 2, .kv_head_begin = 2 * rank};
    return spec;
  };
  const auto rank0 = world.caches.Open("a", rank_spec(0));
  const auto rank1 = world.caches.Open("a", rank_spec(1));
  ASSERT_TRUE(rank0.ok() && rank1.ok());
  EXPECT_NE(rank0->cache, rank1->cache);
  EXPECT_EQ(world.caches.OfGroup(rank0->cache).size(), 2u);
  CacheSpec overlapping = rank_spec(2);
  overlapping.rank.kv_head_begin = 1;
  EXPECT_FALSE(world.caches.Open("a", overlapping).ok());
  const auto single = world.caches.Open("b", Spec("x"));
  EXPECT_EQ(world.caches.OfGroup(single->cache).size(), 1u);
}

TEST(Caches, AreMadeByOneOfManyThreads) {
  World world(SmallOptions());
  std::atomic<int> made = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i) {
        const auto opened = world.caches.Open("a", Spec("cache " + std::to_string(i)));
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
