// Pages that a store finds again of an earlier one; kills are in tests/fault.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kvstore/memory/memfd.h"
#include "kvstore/store.h"
#include "tests/kvstore/fixture.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::kTenant;
using testing::MemoryKeeper;
using testing::SmallOptions;

constexpr size_t kUnit = kMinExtentBytes;

class PagesRecovery : public ::testing::Test {
 protected:
  PagesRecovery() { Restart(); }

  // As after a kill: nothing of the old store is tidied up.
  void Restart() {
    store_.reset();
    StoreOptions options = SmallOptions();
    options.keeper = &keeper_;
    auto store = Store::Create(options);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    store_->EndQuarantine();
    const auto opened =
        store_->OpenPageCache(kTenant, {.name = "pages", .capacity_bytes = 4 * kUnit}, "session");
    ASSERT_TRUE(opened.ok()) << opened.status();
    cache_id_ = opened->cache_id;
  }

  static std::string KeyOf(int number) {
    return "the page of number " + std::to_string(number) + std::string(43 - (number > 9), '.');
  }
  static std::vector<std::byte> ContentOf(int number, size_t size_bytes = kUnit) {
    return std::vector<std::byte>(size_bytes, static_cast<std::byte>(number));
  }
  PageOutcome Put(int number, size_t size_bytes = kUnit) {
    const std::string key = KeyOf(number);
    const auto content = ContentOf(number, size_bytes);
    const PageSource page{.key = key, .bytes = content};
    const auto outcomes = store_->PutPages(kTenant, cache_id_, std::span(&page, 1));
    EXPECT_TRUE(outcomes.ok()) << outcomes.status();
    return outcomes.ok() ? outcomes->front() : PageOutcome::kNoRoom;
  }
  std::vector<std::byte> Get(int number, absl::Duration lease = absl::ZeroDuration()) {
    const std::string key = KeyOf(number);
    const std::string_view view = key;
    const auto found = store_->FindPages(kTenant, cache_id_, std::span(&view, 1), lease);
    EXPECT_TRUE(found.ok()) << found.status();
    if (!found.ok()) return {};
    return {found->front().bytes.begin(), found->front().bytes.end()};
  }
  // Changes the first place that has these bytes in the kept memory whose name contains `name`.
  void Damage(const std::string& name, std::span<const std::byte> bytes) {
    for (const std::string& kept : keeper_.Names()) {
      if (kept.find(name) == std::string::npos) continue;
      const FileDescriptor memory = keeper_.Take(kept);
      const auto mapping = Mapping::Map(memory, SizeOf(memory), Mapping::Access::kReadWrite);
      ASSERT_TRUE(mapping.ok());
      void* const place = memmem(mapping->data(), SizeOf(memory), bytes.data(), bytes.size());
      ASSERT_NE(place, nullptr) << kept;
      static_cast<std::byte*>(place)[bytes.size() / 2] ^= std::byte{4};
      return;
    }
    FAIL() << "nothing is kept under " << name;
  }

  MemoryKeeper keeper_;
  std::unique_ptr<Store> store_;
  uint64_t cache_id_ = 0;
};

TEST_F(PagesRecovery, FindsPagesAsTheyWere) {
  const uint64_t before = cache_id_;
  ASSERT_EQ(Put(1, 10), PageOutcome::kStored);
  ASSERT_EQ(Put(2, 2 * kUnit), PageOutcome::kStored);
  Restart();
  EXPECT_EQ(cache_id_, before);
  EXPECT_EQ(store_->Recovery().pages, 2u);
  EXPECT_EQ(store_->Recovery().dropped_records, 0u);
  EXPECT_EQ(Get(1), ContentOf(1, 10));
  EXPECT_EQ(Get(2), ContentOf(2, 2 * kUnit));
  EXPECT_EQ(Put(1, 10), PageOutcome::kPresent);
  EXPECT_EQ(store_->Stats(kTenant).pages.bytes, 10 + 2 * kUnit);
  EXPECT_EQ(store_->ListCaches(kTenant).front().used_bytes, 3 * kUnit);
  EXPECT_TRUE(Get(3).empty());
}

TEST_F(PagesRecovery, EvictedPagesDoNotReturn) {
  for (int i = 0; i < 6; ++i) ASSERT_EQ(Put(i), PageOutcome::kStored);
  Restart();
  EXPECT_EQ(store_->Recovery().pages, 4u);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(Get(i).empty(), i < 2) << i;
}

TEST_F(PagesRecovery, EvictionGoesOnWithTheOldestPage) {
  for (int i = 0; i < 4; ++i) ASSERT_EQ(Put(i), PageOutcome::kStored);
  Restart();
  for (int i = 4; i < 7; ++i) ASSERT_EQ(Put(i), PageOutcome::kStored);
  Restart();
  for (int i = 0; i < 7; ++i) EXPECT_EQ(Get(i).empty(), i < 3) << i;
  Restart();
  ASSERT_EQ(Put(7), PageOutcome::kStored);
  EXPECT_TRUE(Get(3).empty());
  for (int i = 4; i < 8; ++i) EXPECT_EQ(Get(i), ContentOf(i)) << i;
}

TEST_F(PagesRecovery, LeasesEndWithTheProcess) {
  for (int i = 0; i < 4; ++i) ASSERT_EQ(Put(i), PageOutcome::kStored);
  for (int i = 0; i < 4; ++i) ASSERT_FALSE(Get(i, absl::Minutes(5)).empty());
  ASSERT_EQ(Put(4), PageOutcome::kNoRoom);
  Restart();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Get(i), ContentOf(i)) << i;
  EXPECT_EQ(Put(4), PageOutcome::kStored);
}

TEST_F(PagesRecovery, APageWithAChangedByteIsMissingAndCanBePutAgain) {
  ASSERT_EQ(Put(1), PageOutcome::kStored);
  ASSERT_EQ(Put(2), PageOutcome::kStored);
  Damage("pool", ContentOf(2, 1000));
  Restart();
  EXPECT_EQ(Get(1), ContentOf(1));
  EXPECT_TRUE(Get(2).empty());
  EXPECT_EQ(store_->Stats(kAllTenants).data_loss_count, 1u);
  EXPECT_EQ(Put(2), PageOutcome::kStored);
  EXPECT_EQ(Get(2), ContentOf(2));
}

TEST_F(PagesRecovery, APutOverAChangedPageStoresItAgain) {
  ASSERT_EQ(Put(2), PageOutcome::kStored);
  Damage("pool", ContentOf(2, 1000));
  Restart();
  EXPECT_EQ(Put(2), PageOutcome::kStored);
  EXPECT_EQ(Get(2), ContentOf(2));
}

TEST_F(PagesRecovery, APageWithAChangedKeyIsDropped) {
  ASSERT_EQ(Put(1), PageOutcome::kStored);
  ASSERT_EQ(Put(2), PageOutcome::kStored);
  const std::string key = KeyOf(2);
  Damage("records-", std::as_bytes(std::span(key.data(), key.size())));
  Restart();
  EXPECT_EQ(store_->Recovery().pages, 1u);
  EXPECT_EQ(store_->Recovery().dropped_records, 1u);
  EXPECT_EQ(Get(1), ContentOf(1));
  EXPECT_TRUE(Get(2).empty());
}

TEST_F(PagesRecovery, ErasedPagesAreGoneFromMemory) {
  ASSERT_EQ(Put(7), PageOutcome::kStored);
  ASSERT_FALSE(Get(7, absl::Minutes(5)).empty());
  const auto erased = store_->EraseTenant(kTenant, absl::Seconds(1));
  ASSERT_TRUE(erased.ok()) << erased.status();
  EXPECT_EQ(erased->bytes, kUnit);
  for (const std::string& kept : keeper_.Names()) {
    const FileDescriptor memory = keeper_.Take(kept);
    const auto mapping = Mapping::Map(memory, SizeOf(memory), Mapping::Access::kRead);
    ASSERT_TRUE(mapping.ok());
    const auto content = ContentOf(7, 1000);
    EXPECT_EQ(memmem(mapping->data(), SizeOf(memory), content.data(), content.size()), nullptr)
        << kept;
  }
  Restart();
  EXPECT_EQ(store_->Recovery().pages, 0u);
  EXPECT_TRUE(Get(7).empty());
}

TEST_F(PagesRecovery, AMovedPoolKeepsItsPages) {
  for (int i = 0; i < 3; ++i) ASSERT_EQ(Put(i), PageOutcome::kStored);
  ASSERT_TRUE(store_->PlanPoolMove(cache_id_).ok());
  Restart();
  EXPECT_EQ(store_->Recovery().moved_caches.size(), 1u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Get(i), ContentOf(i)) << i;
}

}  // namespace
}  // namespace pqcached::kvstore
