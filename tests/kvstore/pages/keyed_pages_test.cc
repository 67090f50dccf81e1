// Pages under keys: what is put is found whole, by its tenant only, until the pool needs its
// memory; leased pages stay.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kvstore/store.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kTenant;
using testing::SmallOptions;

constexpr size_t kUnit = kMinExtentBytes;
constexpr absl::Duration kNoLease = absl::ZeroDuration();

std::string KeyOf(int number, size_t size = 16) {
  std::string key = "page-" + std::to_string(number) + "-";
  key.resize(size, '.');
  return key;
}

std::vector<std::byte> ContentOf(int number, size_t size_bytes) {
  std::vector<std::byte> content(size_bytes);
  std::mt19937_64 random(static_cast<uint64_t>(number));
  for (std::byte& each : content) each = static_cast<std::byte>(random());
  return content;
}

class PagesTest : public ::testing::Test {
 protected:
  void SetUp() override { Start(SmallOptions()); }

  void Start(const StoreOptions& options) {
    auto store = Store::Create(options);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }

  uint64_t Open(size_t units, const std::string& name = "pages",
                const std::string& tenant = kTenant) {
    const auto opened =
        store_->OpenPageCache(tenant, {.name = name, .capacity_bytes = units * kUnit}, "session");
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.ok() ? opened->cache_id : 0;
  }

  PageOutcome Put(uint64_t cache, int number, size_t size_bytes = kUnit) {
    const std::string key = KeyOf(number);
    const auto content = ContentOf(number, size_bytes);
    const PageSource page{.key = key, .bytes = content};
    const auto outcomes = store_->PutPages(kTenant, cache, std::span(&page, 1));
    EXPECT_TRUE(outcomes.ok()) << outcomes.status();
    return outcomes.ok() ? outcomes->front() : PageOutcome::kNoRoom;
  }

  std::vector<std::byte> Get(uint64_t cache, int number, absl::Duration lease = kNoLease) {
    const std::string key = KeyOf(number);
    const std::string_view view = key;
    const auto found = store_->FindPages(kTenant, cache, std::span(&view, 1), lease);
    EXPECT_TRUE(found.ok()) << found.status();
    if (!found.ok()) return {};
    return {found->front().bytes.begin(), found->front().bytes.end()};
  }

  bool Has(uint64_t cache, int number, absl::Duration lease = kNoLease) {
    return !Get(cache, number, lease).empty();
  }

  std::unique_ptr<Store> store_;
};

TEST_F(PagesTest, APageIsFoundAsItWasPut) {
  const uint64_t cache = Open(16);
  for (const size_t size : {size_t{1}, kUnit - 1, kUnit, kUnit + 1, 3 * kUnit}) {
    const int number = static_cast<int>(size);
    EXPECT_EQ(Put(cache, number, size), PageOutcome::kStored);
    EXPECT_EQ(Get(cache, number), ContentOf(number, size));
  }
  EXPECT_FALSE(Has(cache, 7));
  const PageCounts counts = store_->Stats(kTenant).pages;
  EXPECT_EQ(counts.page_count, 5u);
  EXPECT_EQ(counts.bytes, 6 * kUnit + 1);
  EXPECT_EQ(counts.hits, 5u);
  EXPECT_EQ(counts.misses, 1u);
}

TEST_F(PagesTest, AKeyThatIsStoredKeepsItsPage) {
  const uint64_t cache = Open(16);
  ASSERT_EQ(Put(cache, 1, 100), PageOutcome::kStored);
  const std::string key = KeyOf(1);
  const auto other = ContentOf(2, 200);
  const PageSource page{.key = key, .bytes = other};
  const auto outcomes = store_->PutPages(kTenant, cache, std::span(&page, 1));
  ASSERT_TRUE(outcomes.ok());
  EXPECT_THAT(*outcomes, ElementsAre(PageOutcome::kPresent));
  EXPECT_EQ(Get(cache, 1), ContentOf(1, 100));
}

TEST_F(PagesTest, AKeyThatACallListsTwiceIsStoredOnce) {
  const uint64_t cache = Open(16);
  const std::string key = KeyOf(1);
  const auto first = ContentOf(1, 100), second = ContentOf(2, 100);
  const std::vector<PageSource> pages = {{key, first}, {key, second}};
  const auto outcomes = store_->PutPages(kTenant, cache, pages);
  ASSERT_TRUE(outcomes.ok());
  EXPECT_THAT(*outcomes, ElementsAre(PageOutcome::kStored, PageOutcome::kPresent));
  EXPECT_EQ(Get(cache, 1), first);
}

TEST_F(PagesTest, AFullPoolEvictsThePageThatWasUsedLongestAgo) {
  const uint64_t cache = Open(4);
  for (int i = 0; i < 4; ++i) ASSERT_EQ(Put(cache, i), PageOutcome::kStored);
  EXPECT_TRUE(Has(cache, 0));
  EXPECT_EQ(Put(cache, 4), PageOutcome::kStored);
  EXPECT_FALSE(Has(cache, 1));
  for (const int kept : {0, 2, 3, 4}) EXPECT_EQ(Get(cache, kept), ContentOf(kept, kUnit)) << kept;
  EXPECT_EQ(store_->Stats(kTenant).pages.evicted_pages, 1u);
  EXPECT_EQ(store_->Stats(kTenant).pages.page_count, 4u);
}

TEST_F(PagesTest, ALargePageEvictsAsManyAsItNeeds) {
  const uint64_t cache = Open(4);
  for (int i = 0; i < 4; ++i) ASSERT_EQ(Put(cache, i), PageOutcome::kStored);
  EXPECT_EQ(Put(cache, 9, 3 * kUnit), PageOutcome::kStored);
  EXPECT_EQ(Get(cache, 9), ContentOf(9, 3 * kUnit));
  EXPECT_LE(store_->ListCaches(kTenant).front().used_bytes, 4 * kUnit);
  EXPECT_GE(store_->Stats(kTenant).pages.evicted_pages, 3u);
}

TEST_F(PagesTest, APageThatCannotFitEvictsNothing) {
  const uint64_t cache = Open(4);
  for (int i = 0; i < 4; ++i) ASSERT_EQ(Put(cache, i), PageOutcome::kStored);
  EXPECT_EQ(Put(cache, 9, 5 * kUnit), PageOutcome::kNoRoom);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(Has(cache, i)) << i;
}

TEST_F(PagesTest, ACallEvictsNoPageOfItsOwn) {
  const uint64_t cache = Open(2);
  std::vector<std::string> keys;
  std::vector<std::vector<std::byte>> contents;
  for (int i = 0; i < 3; ++i) {
    keys.push_back(KeyOf(i));
    contents.push_back(ContentOf(i, kUnit));
  }
  const std::vector<PageSource> pages = {
      {keys[0], contents[0]}, {keys[1], contents[1]}, {keys[2], contents[2]}};
  const auto outcomes = store_->PutPages(kTenant, cache, pages);
  ASSERT_TRUE(outcomes.ok());
  EXPECT_THAT(*outcomes,
              ElementsAre(PageOutcome::kStored, PageOutcome::kStored, PageOutcome::kNoRoom));
  EXPECT_TRUE(Has(cache, 0));
  EXPECT_TRUE(Has(cache, 1));
}

TEST_F(PagesTest, TheFirstPageOfAChainIsEvictedLast) {
  const uint64_t cache = Open(3);
  std::vector<std::string> keys;
  std::vector<std::vector<std::byte>> contents;
  std::vector<PageSource> pages;
  for (int i = 0; i < 3; ++i) {
    keys.push_back(KeyOf(i));
    contents.push_back(ContentOf(i, kUnit));
  }
  for (size_t i = 0; i < 3; ++i) pages.push_back({keys[i], contents[i]});
  ASSERT_TRUE(store_->PutPages(kTenant, cache, pages).ok());
  ASSERT_EQ(Put(cache, 7), PageOutcome::kStored);
  EXPECT_FALSE(Has(cache, 2));
  const std::vector<std::string_view> chain = {keys[0], keys[1]};
  ASSERT_TRUE(store_->FindPages(kTenant, cache, chain, kNoLease).ok());
  ASSERT_EQ(Put(cache, 8), PageOutcome::kStored);
  ASSERT_EQ(Put(cache, 9), PageOutcome::kStored);
  EXPECT_TRUE(Has(cache, 0));
  EXPECT_FALSE(Has(cache, 1));
}

TEST_F(PagesTest, ALeasedPageIsNotEvicted) {
  const uint64_t cache = Open(2);
  ASSERT_EQ(Put(cache, 0), PageOutcome::kStored);
  ASSERT_EQ(Put(cache, 1), PageOutcome::kStored);
  ASSERT_TRUE(Has(cache, 0, absl::Minutes(5)));
  EXPECT_TRUE(Has(cache, 1));  // so that page 0 was used longest ago
  EXPECT_EQ(Put(cache, 2), PageOutcome::kStored);
  EXPECT_TRUE(Has(cache, 0));
  EXPECT_FALSE(Has(cache, 1));
  ASSERT_TRUE(Has(cache, 2, absl::Minutes(5)));
  EXPECT_EQ(Put(cache, 3), PageOutcome::kNoRoom);
  EXPECT_TRUE(Has(cache, 0));
  EXPECT_TRUE(Has(cache, 2));
}

TEST_F(PagesTest, ALeaseEnds) {
  const uint64_t cache = Open(1);
  ASSERT_EQ(Put(cache, 0), PageOutcome::kStored);
  ASSERT_TRUE(Has(cache, 0, absl::Milliseconds(1)));
  const SteadyTime end = SteadyTime::Now() + absl::Milliseconds(2);
  while (SteadyTime::Now() < end) std::this_thread::yield();
  EXPECT_EQ(Put(cache, 1), PageOutcome::kStored);
}

TEST_F(PagesTest, APageThatIsReadStaysReadable) {
  const uint64_t cache = Open(1);
  ASSERT_EQ(Put(cache, 0), PageOutcome::kStored);
  const std::string key = KeyOf(0);
  const std::string_view view = key;
  auto found = store_->FindPages(kTenant, cache, std::span(&view, 1), kNoLease);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(Put(cache, 1), PageOutcome::kNoRoom);
  const auto erased = store_->EraseTenant(kTenant, absl::Milliseconds(1));
  ASSERT_TRUE(erased.ok()) << erased.status();
  EXPECT_EQ(erased->remaining_bytes, kUnit);
  EXPECT_FALSE(Has(cache, 0));
  const auto& bytes = found->front().bytes;
  EXPECT_EQ(std::vector(bytes.begin(), bytes.end()), ContentOf(0, kUnit));
  found->clear();
  EXPECT_EQ(Put(cache, 1), PageOutcome::kStored);
}

TEST_F(PagesTest, KeysAndSizesOutsideTheLimitsAreRefusedBeforeAnythingIsStored) {
  const uint64_t cache = Open(1024);
  const std::string good = KeyOf(1), longest = KeyOf(2, kMaxPageKeyBytes);
  const std::string tiny = KeyOf(1, kMinPageKeyBytes - 1), huge = KeyOf(1, kMaxPageKeyBytes + 1);
  const std::vector<std::byte> some(10), large(kMaxPageBytes + 1);
  const auto refusal = [&](const PageSource& page) {
    const std::vector<PageSource> pages = {{good, some}, page};
    return std::string(store_->PutPages(kTenant, cache, pages).status().message());
  };
  EXPECT_THAT(refusal({tiny, some}), AllOf(HasSubstr("pages[1].key"), HasSubstr("[16, 64]")));
  EXPECT_THAT(refusal({huge, some}), HasSubstr("pages[1].key"));
  EXPECT_THAT(refusal({longest, {}}), HasSubstr("pages[1].bytes"));
  EXPECT_THAT(refusal({longest, large}),
              AllOf(HasSubstr("pages[1].bytes"), HasSubstr(std::to_string(kMaxPageBytes))));
  EXPECT_EQ(store_->Stats(kTenant).pages.page_count, 0u);
  const std::vector<PageSource> pages = {{longest, std::span(large).first(kMaxPageBytes)}};
  const auto stored = store_->PutPages(kTenant, cache, pages);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_THAT(*stored, ElementsAre(PageOutcome::kStored));

  const std::vector<std::string_view> keys = {good, tiny};
  const auto find = [&](std::span<const std::string_view> wanted, absl::Duration lease) {
    return std::string(store_->FindPages(kTenant, cache, wanted, lease).status().message());
  };
  EXPECT_THAT(find(keys, kNoLease), HasSubstr("keys[1]"));
  EXPECT_THAT(find(std::span(keys).first(1), -absl::Seconds(1)), HasSubstr("lease"));
  EXPECT_THAT(find(std::span(keys).first(1), kMaxPageLease + absl::Seconds(1)),
              AllOf(HasSubstr("lease"), HasSubstr("3600")));
}

TEST_F(PagesTest, AnotherTenantDoesNotReachPages) {
  const uint64_t cache = Open(16);
  ASSERT_EQ(Put(cache, 1), PageOutcome::kStored);
  const std::string key = KeyOf(1);
  const std::string_view view = key;
  const auto content = ContentOf(1, 10);
  const PageSource page{key, content};
  EXPECT_TRUE(
      absl::IsNotFound(store_->FindPages("other", cache, std::span(&view, 1), kNoLease).status()));
  EXPECT_TRUE(absl::IsNotFound(store_->PutPages("other", cache, std::span(&page, 1)).status()));
  const uint64_t others = Open(16, "pages", "other");
  EXPECT_NE(others, cache);
  const auto found = store_->FindPages("other", others, std::span(&view, 1), kNoLease);
  ASSERT_TRUE(found.ok());
  EXPECT_TRUE(found->front().bytes.empty());
  EXPECT_EQ(store_->Stats("other").pages.page_count, 0u);
}

TEST_F(PagesTest, TheTwoKindsOfCachesRefuseEachOthersCalls) {
  const uint64_t pages = Open(16);
  const auto rows = store_->OpenCache(kTenant, testing::SmallSpec("rows"));
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_TRUE(absl::IsFailedPrecondition(
      store_->CreateSequence(kTenant, pages, {.session = "session"}).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->Admit(kTenant, pages, {}).status()));
  EXPECT_TRUE(
      absl::IsFailedPrecondition(store_->MatchPrefix(kTenant, pages, TokenNames(), "").status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      store_->FindPages(kTenant, rows->cache_id, {}, kNoLease).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->PutPages(kTenant, rows->cache_id, {}).status()));
  const auto same_name = store_->OpenCache(kTenant, testing::SmallSpec("pages"));
  EXPECT_TRUE(absl::IsFailedPrecondition(same_name.status()));
  EXPECT_THAT(std::string(same_name.status().message()), HasSubstr("name"));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      store_->OpenPageCache(kTenant, {.name = "rows", .capacity_bytes = kUnit}, "session")
          .status()));
}

TEST_F(PagesTest, OpeningAgainJoinsTheCache) {
  const uint64_t cache = Open(16);
  ASSERT_EQ(Put(cache, 1), PageOutcome::kStored);
  EXPECT_EQ(Open(16), cache);
  EXPECT_TRUE(Has(cache, 1));
}

TEST_F(PagesTest, AQuotaLimitsThePages) {
  const auto opened = store_->OpenPageCache(
      kTenant, {.name = "pages", .capacity_bytes = 8 * kUnit, .quota_bytes = 2 * kUnit}, "session");
  ASSERT_TRUE(opened.ok()) << opened.status();
  for (int i = 0; i < 8; ++i) EXPECT_EQ(Put(opened->cache_id, i), PageOutcome::kStored);
  EXPECT_EQ(store_->ListCaches(kTenant).front().used_bytes, 2 * kUnit);
}

TEST_F(PagesTest, ACacheWithALeasedPageIsNotDropped) {
  const uint64_t cache = Open(16);
  ASSERT_EQ(Put(cache, 1), PageOutcome::kStored);
  ASSERT_TRUE(Has(cache, 1, absl::Minutes(5)));
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->DropCache(kTenant, cache, false).status()));
  EXPECT_TRUE(Has(cache, 1));
  EXPECT_TRUE(store_->DropCache(kTenant, cache, true).ok());
  const std::string key = KeyOf(1);
  const std::string_view view = key;
  EXPECT_TRUE(
      absl::IsNotFound(store_->FindPages(kTenant, cache, std::span(&view, 1), kNoLease).status()));
}

TEST_F(PagesTest, CallsThatRunAtOnceAgree) {
  constexpr int kKeys = 24, kThreads = 4, kRounds = 300;
  const uint64_t cache = Open(16);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      for (int i = 0; i < kRounds; ++i) {
        const int number = static_cast<int>(random() % kKeys);
        const size_t size = 1000 + 7 * static_cast<size_t>(number);
        if (random() % 2 == 0) {
          Put(cache, number, size);
        } else if (const auto content = Get(cache, number); !content.empty()) {
          ASSERT_EQ(content, ContentOf(number, size));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const PageCounts counts = store_->Stats(kTenant).pages;
  EXPECT_LE(counts.page_count, 16u);
  EXPECT_GT(counts.hits, 0u);
  EXPECT_EQ(store_->ListCaches(kTenant).front().used_bytes, counts.page_count * kUnit);
}

// Compares random calls with a plain map: a page that is found has the bytes of its key, and a
// page that is leased is found.
TEST_F(PagesTest, RandomCallsAgreeWithAMap) {
  const uint64_t cache = Open(32);
  std::mt19937 random(7);
  std::map<int, bool> leased;
  size_t leased_units = 0;
  for (int i = 0; i < 3000; ++i) {
    const int number = static_cast<int>(random() % 60);
    const size_t units = 1 + static_cast<size_t>(number) % 3;
    const size_t size = units * kUnit - static_cast<size_t>(number);
    if (random() % 2 == 0) {
      const bool was_there = leased[number];
      const PageOutcome outcome = Put(cache, number, size);
      if (was_there) {
        ASSERT_EQ(outcome, PageOutcome::kPresent) << number;
      }
      if (outcome != PageOutcome::kNoRoom) {
        ASSERT_EQ(Get(cache, number), ContentOf(number, size)) << number;
      }
      continue;
    }
    const bool lease = random() % 8 == 0 && leased_units + units <= 16;
    const auto content = Get(cache, number, lease ? absl::Minutes(30) : kNoLease);
    if (leased[number]) {
      ASSERT_FALSE(content.empty()) << number;
    }
    if (content.empty()) continue;
    ASSERT_EQ(content, ContentOf(number, size)) << number;
    if (lease && !leased[number]) {
      leased[number] = true;
      leased_units += units;
    }
  }
  EXPECT_GT(store_->Stats(kTenant).pages.evicted_pages, 100u);
}

}  // namespace
}  // namespace pqcached::kvstore
