// The staging rings of local sessions: their number, their memory, and when it is freed; and the
// pools whose pages they hold.
#include <gmock/gmock.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "kvstore/share/control_memory.h"
#include "tests/kvstore/share/lease_fixture.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::kTenant;
using testing::MappedClient;
using testing::TestSequence;

size_t AllocatedBytes(const SharedMemory& memory) {
  struct stat info = {};
  EXPECT_EQ(fstat(memory.descriptor.get(), &info), 0);
  return static_cast<size_t>(info.st_blocks) * 512;
}

TEST(SessionStaging, IsAllocatedAndFreedWithItsSessionWhoeverHoldsIt) {
  constexpr size_t kRing = size_t{2} << 20;
  TestSequence sequence;
  Store& store = sequence.store();
  MappedClient client(store, sequence.cache_id(), "client#1");
  const auto held = store.OpenStaging(kTenant, "client#1", 1 << 20, 2);
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_EQ(AllocatedBytes(*held), kRing);
  const auto accounts = store.Stats(kAllTenants).memory;
  const auto staging = std::find_if(accounts.begin(), accounts.end(), [](const auto& account) {
    return account.use == MemoryUse::kStaging;
  });
  ASSERT_NE(staging, accounts.end());
  EXPECT_EQ(staging->tenant, kTenant);
  EXPECT_EQ(staging->promised_bytes, kRing);
  EXPECT_EQ(staging->allocated_bytes, kRing);
  const auto control = std::find_if(accounts.begin(), accounts.end(), [](const auto& account) {
    return account.use == MemoryUse::kControl;
  });
  ASSERT_NE(control, accounts.end());
  EXPECT_EQ(control->promised_bytes, ControlMemory::SizeBytes(StoreOptions{}.max_leases));
  EXPECT_EQ(control->allocated_bytes, control->promised_bytes);
  {
    const auto claim = store.ClaimStaging("client#1", {.slot = 1, .size_bytes = 1});
    ASSERT_TRUE(claim.ok()) << claim.status();
    store.DropSession("client#1");
    EXPECT_EQ(AllocatedBytes(*held), kRing) << "a call still reads it";
  }
  EXPECT_EQ(AllocatedBytes(*held), 0u);
  for (const MemoryAccount& account : store.Stats(kAllTenants).memory) {
    EXPECT_NE(account.use, MemoryUse::kStaging);
    EXPECT_NE(account.use, MemoryUse::kControl);
  }
}

// A client that resumes its session with the next worker sends the rows in its ring again.
TEST(SessionStaging, StaysWhenItsWorkerEnds) {
  auto sequence = std::make_unique<TestSequence>();
  const auto client =
      std::make_unique<MappedClient>(sequence->store(), sequence->cache_id(), "client#1");
  const auto held = sequence->store().OpenStaging(kTenant, "client#1", 1 << 20, 2);
  ASSERT_TRUE(held.ok()) << held.status();
  sequence.reset();
  EXPECT_EQ(AllocatedBytes(*held), size_t{2} << 20);
}

// What the store sees of a machine with little memory.
class Machine {
 public:
  explicit Machine(size_t available_mib) {
    path_ = ::testing::TempDir() + "lease_XXXXXX";
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
    std::filesystem::create_directories(path_ + "/proc");
    SetAvailable(available_mib);
  }
  ~Machine() { std::filesystem::remove_all(path_); }
  void SetAvailable(size_t mib) const {
    std::ofstream(path_ + "/proc/meminfo") << "MemAvailable: " << (mib << 10) << " kB\n";
  }
  StoreOptions Options() const {
    StoreOptions options = testing::SmallOptions();
    options.memory_root = path_;
    return options;
  }

 private:
  std::string path_;
};

CacheSpec FourMib() {
  CacheSpec spec = testing::SmallSpec();
  spec.capacity_bytes = size_t{4} << 20;
  return spec;
}

// Rings of many sessions, each of which would fit.
TEST(SessionStaging, IsNotPromisedTwice) {
  const Machine machine(200);
  TestSequence sequence(FourMib(), machine.Options());
  Store& store = sequence.store();
  const MappedClient first(store, sequence.cache_id(), "client#1");
  const MappedClient second(store, sequence.cache_id(), "client#2");
  ASSERT_TRUE(store.OpenStaging(kTenant, "client#1", 1 << 20, 64).ok());
  machine.SetAvailable(200 - 64);
  const auto refused = store.OpenStaging(kTenant, "client#2", 1 << 20, 80);
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted) << refused.status();
  EXPECT_EQ(FieldOf(refused.status()), "slot_bytes");
  EXPECT_EQ(RetryMsOf(refused.status()), kRetryMemory);
  EXPECT_TRUE(store.OpenStaging(kTenant, "client#2", 1 << 20, 64).ok());
}

TEST(SessionStaging, AddsUpOverAllSessions) {
  constexpr size_t kMachineMib = 200, kRingMib = 8;
  const Machine machine(kMachineMib);
  TestSequence sequence(FourMib(), machine.Options());
  const auto session_of = [](int i) { return "client#" + std::to_string(i); };
  std::vector<std::unique_ptr<MappedClient>> clients;
  for (int i = 0; i < 40; ++i) {
    clients.push_back(
        std::make_unique<MappedClient>(sequence.store(), sequence.cache_id(), session_of(i)));
  }
  size_t granted_mib = 0;
  for (int i = 0; i < 40; ++i) {
    if (sequence.store().OpenStaging(kTenant, session_of(i), 1 << 20, kRingMib).ok()) {
      granted_mib += kRingMib;
      machine.SetAvailable(kMachineMib - granted_mib);
    }
  }
  const double share = static_cast<double>(granted_mib) / kMachineMib;
  EXPECT_GT(share, 0.5);
  EXPECT_LE(share, 1);
  RecordProperty("staging_promised_over_available", std::to_string(share));
}

TEST(SessionStaging, OfOneTenantIsBoundOverItsSessions) {
  StoreOptions options = testing::SmallOptions();
  options.tenant_quotas.others.max_staging_bytes = size_t{3} << 20;
  TestSequence sequence(testing::SmallSpec(), options);
  Store& store = sequence.store();
  const MappedClient first(store, sequence.cache_id(), "client#1");
  const MappedClient second(store, sequence.cache_id(), "client#2");
  ASSERT_TRUE(store.OpenStaging(kTenant, "client#1", 1 << 20, 2).ok());
  const auto refused = store.OpenStaging(kTenant, "client#2", 1 << 20, 2);
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(FieldOf(refused.status()), "tenant_limits.staging");
  EXPECT_THAT(TextOf(refused.status()), ::testing::HasSubstr("1048576 bytes short"));
  store.SetTenantQuotas({.others = {.max_staging_bytes = size_t{4} << 20}, .by_tenant = {}});
  EXPECT_TRUE(store.OpenStaging(kTenant, "client#2", 1 << 20, 2).ok());
}

TEST(SessionStaging, IsOncePerLocalSession) {
  StoreOptions options = testing::SmallOptions();
  options.max_staging_bytes = size_t{4} << 20;
  TestSequence sequence(testing::SmallSpec(), options);
  Store& store = sequence.store();
  EXPECT_EQ(store.OpenStaging(kTenant, "client#1", 1 << 20, 1).status().code(),
            StatusCode::kFailedPrecondition);
  MappedClient client(store, sequence.cache_id(), "client#1");
  EXPECT_EQ(store.ClaimStaging("client#1", {}).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(store.OpenStaging(kTenant, "client#1", 1 << 20, 5).status().code(),
            StatusCode::kResourceExhausted);
  ASSERT_TRUE(store.OpenStaging(kTenant, "client#1", 1 << 20, 4).ok());
  EXPECT_EQ(store.OpenStaging(kTenant, "client#1", 1 << 20, 1).status().code(),
            StatusCode::kAlreadyExists);
  EXPECT_TRUE(store.ClaimStaging("client#1", {.slot = 3, .size_bytes = 1}).ok());
  EXPECT_EQ(store.ClaimStaging("client#2", {.slot = 3, .size_bytes = 1}).status().code(),
            StatusCode::kFailedPrecondition);
}

// A pool with rows whose pages a session holds.
class SessionHolds : public ::testing::Test {
 protected:
  SessionHolds() : client_(store(), sequence_.cache_id(), "client#1") {
    sequence_.Append(600);
    auto pool = store().OpenPool(kTenant, "client#1", sequence_.cache_id());
    EXPECT_TRUE(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
    EXPECT_TRUE(store().HoldPool(kTenant, "client#1", sequence_.cache_id()).ok());
    EXPECT_GT(AllocatedBytes(pool_), 0u);
  }

  static StoreOptions WithoutReserve() {
    StoreOptions options = testing::SmallOptions();
    options.idle_reserve_bytes = 0;
    return options;
  }
  Store& store() { return sequence_.store(); }

  TestSequence sequence_{testing::SmallSpec(), WithoutReserve()};
  MappedClient client_;
  SharedMemory pool_;
};

TEST_F(SessionHolds, PagesOfAHeldPoolReturnAfterTheSession) {
  ASSERT_TRUE(store().DropSequence(kTenant, sequence_.id()).ok());
  const size_t before = AllocatedBytes(pool_);
  for (int call = 0; call < 4; ++call) store().ApplyMemoryLimits();
  EXPECT_EQ(AllocatedBytes(pool_), before);
  store().DropSession("client#1");
  for (int call = 0; call < 4; ++call) store().ApplyMemoryLimits();
  EXPECT_LT(AllocatedBytes(pool_), before);
}

TEST_F(SessionHolds, TheMemoryOfADroppedCacheReturns) {
  ASSERT_TRUE(store().DropCache(kTenant, sequence_.cache_id(), /*force=*/true).ok());
  EXPECT_EQ(AllocatedBytes(pool_), 0u);
}

}  // namespace
}  // namespace pqcached::kvstore
