#include "kvstore/limits/memory_ledger.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;

constexpr size_t kMiB = size_t{1} << 20;

// A machine with made-up memory.
class MemoryLedgerTest : public ::testing::Test {
 protected:
  MemoryLedgerTest() {
    EXPECT_NE(mkdtemp(root_.data()), nullptr);
    std::filesystem::create_directories(root_ + "/proc");
    SetAvailable(500);
    ledger_ = std::make_shared<MemoryLedger>(root_);
  }
  ~MemoryLedgerTest() override { std::filesystem::remove_all(root_); }

  void SetAvailable(size_t mib) const {
    std::ofstream(root_ + "/proc/meminfo") << "MemTotal: " << (1000 << 10) << " kB\n"
                                           << "MemAvailable: " << (mib << 10) << " kB\n";
  }
  absl::StatusOr<std::shared_ptr<MemoryPromise>> Promise(size_t mib) const {
    return ledger_->Promise("a", MemoryUse::kPool, mib * kMiB, "capacity_bytes");
  }

  std::string root_ = ::testing::TempDir() + "ledger_XXXXXX";
  std::shared_ptr<MemoryLedger> ledger_;
};

void ExpectShort(const absl::Status& status, const char* field, uint32_t retry_ms, size_t mib) {
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(FieldOf(status), field) << status;
  EXPECT_EQ(RetryMsOf(status), retry_ms) << status;
  EXPECT_EQ(ShortageOf(status), Shortage::kMemory) << status;
  EXPECT_THAT(std::string(status.message()),
              ::testing::HasSubstr(std::to_string(mib * kMiB) + " bytes short"));
}

TEST_F(MemoryLedgerTest, PromisesNoMemoryTwice) {
  auto first = Promise(300);
  ASSERT_TRUE(first.ok()) << first.status();
  ExpectShort(Promise(201).status(), "capacity_bytes", kRetryMemory, 1);
  EXPECT_TRUE(Promise(200).ok());
  (*first)->SetAllocated(100 * kMiB);  // of 300; the machine has 100 less
  SetAvailable(400);
  ExpectShort(Promise(201).status(), "capacity_bytes", kRetryMemory, 1);
  EXPECT_TRUE(Promise(200).ok());
  first->reset();
  EXPECT_TRUE(Promise(400).ok());
}

TEST_F(MemoryLedgerTest, MoreThanTheMachineHasIsNeverPromised) {
  ExpectShort(Promise(1001).status(), "capacity_bytes", kNoRetry, 1);
  ExpectShort(Promise(1000).status(), "capacity_bytes", kRetryMemory, 500);
}

TEST_F(MemoryLedgerTest, AllocatesOnlyWhatIsThereNow) {
  const auto promise = Promise(300);
  ASSERT_TRUE(promise.ok()) << promise.status();
  int runs = 0;
  const auto make_present = [&] {
    ++runs;
    return true;
  };
  EXPECT_TRUE((*promise)->Allocate(100 * kMiB, make_present).ok());
  SetAvailable(64 + 99);  // another program has taken memory
  ExpectShort((*promise)->Allocate(100 * kMiB, make_present), "", kRetryMemory, 1);
  EXPECT_EQ(runs, 1) << "refused before the kernel is asked";
  EXPECT_TRUE((*promise)->Allocate(99 * kMiB, make_present).ok());
}

TEST_F(MemoryLedgerTest, APoolThatGrowsLeavesWhatIsPromisedToOthers) {
  const auto promise = Promise(300);
  ASSERT_TRUE(promise.ok()) << promise.status();
  const auto grows = ledger_->Restore("b", MemoryUse::kPool, 0);
  const auto make_present = [] { return true; };
  ExpectShort(grows->Allocate(137 * kMiB, make_present), "", kRetryMemory, 1);
  EXPECT_TRUE(grows->Allocate(136 * kMiB, make_present).ok());
  EXPECT_TRUE((*promise)->Allocate(300 * kMiB, make_present).ok());
}

TEST_F(MemoryLedgerTest, AnAllocationInProgressCountsForOthers) {
  const auto promise = Promise(300);
  ASSERT_TRUE(promise.ok()) << promise.status();
  SetAvailable(64 + 150);
  const auto inner = [&] { return (*promise)->Allocate(51 * kMiB, [] { return true; }); };
  absl::Status refused;
  EXPECT_TRUE((*promise)
                  ->Allocate(100 * kMiB,
                             [&] {
                               refused = inner();
                               return true;
                             })
                  .ok());
  ExpectShort(refused, "", kRetryMemory, 1);
  EXPECT_TRUE(inner().ok()) << "it has ended";
}

TEST_F(MemoryLedgerTest, AKernelThatRefusesIsARefusal) {
  const auto promise = Promise(1);
  ASSERT_TRUE(promise.ok()) << promise.status();
  const absl::Status status = (*promise)->Allocate(kMiB, [] { return false; });
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(RetryMsOf(status), kRetryMemory);
  EXPECT_EQ(ShortageOf(status), Shortage::kMemory);
}

TEST_F(MemoryLedgerTest, AccountsAddUpByTenantAndUse) {
  const auto one = *Promise(10);
  const auto two = *Promise(20);
  two->SetAllocated(5 * kMiB);
  const auto ring = *ledger_->Promise("b", MemoryUse::kStaging, 7 * kMiB, "slot_bytes");
  const auto records = ledger_->Restore("b", MemoryUse::kRecords, 0);
  records->SetAllocated(kMiB);
  const auto accounts = ledger_->Accounts();
  ASSERT_EQ(accounts.size(), 3u);
  const auto expect = [&](size_t i, const char* tenant, MemoryUse use, size_t promised,
                          size_t allocated) {
    EXPECT_EQ(accounts[i].tenant, tenant);
    EXPECT_EQ(accounts[i].use, use);
    EXPECT_EQ(accounts[i].promised_bytes, promised * kMiB);
    EXPECT_EQ(accounts[i].allocated_bytes, allocated * kMiB);
  };
  expect(0, "a", MemoryUse::kPool, 30, 5);
  expect(1, "b", MemoryUse::kRecords, 1, 1);
  expect(2, "b", MemoryUse::kStaging, 7, 0);
}

}  // namespace
}  // namespace pqcached::kvstore
