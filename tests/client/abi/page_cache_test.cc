// Page caches against the daemon: what is put is got whole, also after the worker was killed, and
// by its tenant only.
#include "pqcached/page_cache.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "tests/client/daemon.h"

namespace pqcached {
namespace {

using testing::Daemon;
using ::testing::ElementsAre;
using testing::Must;
using testing::MustBeOk;
using testing::SpecOf;

constexpr uint64_t kUnit = 65536;

std::string KeyOf(int number) {
  return "the key of page " + std::to_string(100 + number) + ", which is a text";
}

std::vector<std::byte> ContentOf(int number, size_t size_bytes) {
  std::vector<std::byte> content(size_bytes);
  std::mt19937_64 random(static_cast<uint64_t>(number));
  for (size_t i = 0; i < size_bytes; i += 61) content[i] = static_cast<std::byte>(random());
  return content;
}

class PageCacheTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  Result<PageCache> Open(uint64_t capacity_bytes, const std::string& name = "pages") {
    return PageCache::Open(client_, {.name = name, .capacity_bytes = capacity_bytes});
  }
  static pqc_page_outcome Put(PageCache& cache, int number, size_t size_bytes) {
    const std::string key = KeyOf(number);
    const auto content = ContentOf(number, size_bytes);
    PageSource page{.key = key, .data = content};
    MustBeOk(cache.Put({&page, 1}));
    return page.outcome;
  }
  // Returns the page; empty when it is missing.
  static std::vector<std::byte> Get(PageCache& cache, int number, size_t capacity_bytes) {
    const std::string key = KeyOf(number);
    std::vector<std::byte> buffer(capacity_bytes);
    PageTarget page{.key = key, .data = buffer};
    MustBeOk(cache.Get({&page, 1}));
    buffer.resize(page.outcome == PQC_PAGE_FOUND ? page.size_bytes : 0);
    return buffer;
  }
  static uint64_t SizeOf(PageCache& cache, int number, uint64_t lease_ms = 0) {
    const std::string key = KeyOf(number);
    const std::string_view view = key;
    return Must(cache.Exists({&view, 1}, lease_ms)).front();
  }
  // Repeats a call while it is UNAVAILABLE with a retry time: for the worker that has ended.
  static void AwaitWorker(PageCache& cache) {
    const std::string key = KeyOf(0);
    const std::string_view view = key;
    while (true) {
      const auto sizes = cache.Exists({&view, 1});
      if (sizes.ok()) return;
      ASSERT_EQ(sizes.status().code(), PQC_UNAVAILABLE) << sizes.status().ToString();
      ASSERT_GT(sizes.status().retry_ms(), 0u) << sizes.status().ToString();
      poll(nullptr, 0, 1);
    }
  }
  void KillWorker() {
    const std::string pid = std::to_string(daemon_.process().pid());
    std::ifstream workers("/proc/" + pid + "/task/" + pid + "/children");
    pid_t worker = 0;
    ASSERT_TRUE(workers >> worker);
    ASSERT_EQ(kill(worker, SIGKILL), 0);
    while (kill(worker, 0) == 0) poll(nullptr, 0, 1);  // until the supervisor has noticed it
  }

  Daemon daemon_;
  Client client_ = daemon_.OpenClient("default", GetParam());
};

TEST_P(PageCacheTest, ABatchIsPutAndGotWhole) {
  PageCache cache = Must(Open(256 << 20));
  const std::vector<size_t> sizes = {1, kUnit - 1, kUnit, 20 << 20, 20 << 20, 32 << 20, 77};
  std::vector<std::string> keys;
  std::vector<std::vector<std::byte>> contents, buffers;
  for (size_t i = 0; i < sizes.size(); ++i) {
    keys.push_back(KeyOf(static_cast<int>(i)));
    contents.push_back(ContentOf(static_cast<int>(i), sizes[i]));
    buffers.emplace_back(sizes[i] + 3, std::byte{9});
  }
  std::vector<PageSource> sources;
  std::vector<PageTarget> targets;
  for (size_t i = 0; i < sizes.size(); ++i) {
    sources.push_back({.key = keys[i], .data = contents[i]});
    targets.push_back({.key = keys[i], .data = buffers[i]});
  }
  const std::string missing = KeyOf(50);
  targets.push_back({.key = missing, .data = buffers[0]});
  MustBeOk(cache.Put(sources));
  for (const PageSource& source : sources) EXPECT_EQ(source.outcome, PQC_PAGE_STORED);
  MustBeOk(cache.Get(targets));
  for (size_t i = 0; i < sizes.size(); ++i) {
    ASSERT_EQ(targets[i].outcome, PQC_PAGE_FOUND) << i;
    ASSERT_EQ(targets[i].size_bytes, sizes[i]) << i;
    EXPECT_TRUE(std::equal(contents[i].begin(), contents[i].end(), buffers[i].begin())) << i;
    EXPECT_EQ(buffers[i].back(), std::byte{9}) << "beyond the page";
  }
  EXPECT_EQ(targets.back().outcome, PQC_PAGE_MISSING);
  EXPECT_EQ(targets.back().size_bytes, 0u);
  MustBeOk(cache.Put(sources));
  for (const PageSource& source : sources) EXPECT_EQ(source.outcome, PQC_PAGE_PRESENT);
}

TEST_P(PageCacheTest, LargePagesPassThroughStagingOnTheLocalPath) {
  PageCache cache = Must(Open(64 << 20));
  ASSERT_EQ(Put(cache, 0, 100), PQC_PAGE_STORED);
  const auto staging_bytes = [&] {
    const std::string stats = Must(client_.AdminJson("Stats"));
    const std::string name = "\"staging_bytes\":\"";
    const size_t at = stats.find(name);
    return at == std::string::npos ? 0 : std::stoull(stats.substr(at + name.size()));
  };
  EXPECT_EQ(staging_bytes(), 0u) << "for small pages";
  ASSERT_EQ(Put(cache, 1, 3 << 20), PQC_PAGE_STORED);
  EXPECT_EQ(staging_bytes() > 0, GetParam() == PQC_PATH_ONLY_LOCAL);
  EXPECT_EQ(Get(cache, 1, 3 << 20), ContentOf(1, 3 << 20));
}

// More pages than one call of the sidecar takes, and more bytes than a slot has.
TEST_P(PageCacheTest, ManyPagesAreSplit) {
  constexpr int kPages = 700;
  PageCache cache = Must(Open(uint64_t{kPages} * kUnit));
  std::vector<std::string> keys;
  std::vector<std::vector<std::byte>> contents, buffers;
  for (int i = 0; i < kPages; ++i) {
    const auto size = static_cast<size_t>(i < 350 ? kUnit - i : 1000 + i);
    keys.push_back(KeyOf(i));
    contents.push_back(ContentOf(i, size));
    buffers.emplace_back(size);
  }
  std::vector<PageSource> sources;
  std::vector<PageTarget> targets;
  for (size_t i = 0; i < keys.size(); ++i) {
    sources.push_back({.key = keys[i], .data = contents[i]});
    targets.push_back({.key = keys[i], .data = buffers[i]});
  }
  MustBeOk(cache.Put(sources));
  MustBeOk(cache.Get(targets));
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_EQ(sources[i].outcome, PQC_PAGE_STORED) << i;
    ASSERT_EQ(targets[i].outcome, PQC_PAGE_FOUND) << i;
    ASSERT_TRUE(buffers[i] == contents[i]) << i;
  }
}

TEST_P(PageCacheTest, ABufferThatIsTooSmallStaysUnchanged) {
  PageCache cache = Must(Open(1 << 20));
  ASSERT_EQ(Put(cache, 1, 1000), PQC_PAGE_STORED);
  const std::string key = KeyOf(1);
  std::vector<std::byte> buffer(999, std::byte{9});
  PageTarget page{.key = key, .data = buffer};
  MustBeOk(cache.Get({&page, 1}));
  EXPECT_EQ(page.outcome, PQC_PAGE_TOO_LARGE);
  EXPECT_EQ(page.size_bytes, 1000u);
  EXPECT_EQ(buffer, std::vector<std::byte>(999, std::byte{9}));
}

TEST_P(PageCacheTest, PagesOutliveAKilledWorker) {
  PageCache cache = Must(Open(4 * kUnit));
  for (int i = 0; i < 4; ++i) ASSERT_EQ(Put(cache, i, 50000), PQC_PAGE_STORED);
  ASSERT_EQ(SizeOf(cache, 1, /*lease_ms=*/600000), 50000u);
  KillWorker();
  AwaitWorker(cache);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Get(cache, i, 50000), ContentOf(i, 50000)) << i;
  EXPECT_EQ(Put(cache, 2, 50000), PQC_PAGE_PRESENT);
}

TEST_P(PageCacheTest, ALeaseKeepsWhatExistsHasFound) {
  PageCache cache = Must(Open(2 * kUnit));
  ASSERT_EQ(Put(cache, 0, kUnit), PQC_PAGE_STORED);
  ASSERT_EQ(Put(cache, 1, kUnit), PQC_PAGE_STORED);
  EXPECT_EQ(SizeOf(cache, 0, /*lease_ms=*/600000), kUnit);
  EXPECT_EQ(SizeOf(cache, 7, /*lease_ms=*/600000), 0u);
  for (int i = 2; i < 10; ++i) EXPECT_EQ(Put(cache, i, kUnit), PQC_PAGE_STORED);
  Client other = daemon_.OpenClient("default", GetParam());  // a worker of the same engine
  PageCache same = Must(PageCache::Open(other, {.name = "pages", .capacity_bytes = 2 * kUnit}));
  EXPECT_EQ(Get(same, 0, kUnit), ContentOf(0, kUnit));
  EXPECT_EQ(SizeOf(same, 1), 0u);
  EXPECT_EQ(same.Drop().code(), PQC_FAILED_PRECONDITION);
}

TEST_P(PageCacheTest, AnotherTenantHasPagesOfItsOwn) {
  PageCache cache = Must(Open(1 << 20));
  ASSERT_EQ(Put(cache, 1, 100), PQC_PAGE_STORED);
  Client other = daemon_.OpenClient("other", GetParam());
  PageCache theirs = Must(PageCache::Open(other, {.name = "pages", .capacity_bytes = 1 << 20}));
  EXPECT_EQ(SizeOf(theirs, 1), 0u);
  EXPECT_TRUE(Get(theirs, 1, 100).empty());
  EXPECT_EQ(Put(theirs, 1, 50), PQC_PAGE_STORED);
  EXPECT_EQ(Get(cache, 1, 100), ContentOf(1, 100));
}

TEST_P(PageCacheTest, PagesAreInTheStatistics) {
  PageCache cache = Must(Open(1 << 20));
  ASSERT_EQ(Put(cache, 1, 100), PQC_PAGE_STORED);
  const std::string stats = Must(client_.AdminJson("Stats"));
  EXPECT_NE(stats.find("\"page_count\":\"1\""), std::string::npos) << stats;
  const std::string caches = Must(client_.AdminJson("ListCaches"));
  EXPECT_NE(caches.find("\"page_count\":\"1\""), std::string::npos) << caches;
}

TEST_P(PageCacheTest, ADroppedPageCacheIsNotFound) {
  PageCache cache = Must(Open(1 << 20));
  ASSERT_EQ(Put(cache, 1, 100), PQC_PAGE_STORED);
  MustBeOk(cache.Drop());
  EXPECT_EQ(cache.Drop().code(), PQC_NOT_FOUND);
  const std::string key = KeyOf(1);
  const std::string_view view = key;
  EXPECT_EQ(cache.Exists({&view, 1}).status().code(), PQC_NOT_FOUND);
}

TEST_P(PageCacheTest, RefusalsNameTheFieldAndTheLimit) {
  const Status none = Open(0).status();
  EXPECT_EQ(none.code(), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(none.field(), "spec.capacity_bytes");
  const Status unnamed = Open(1 << 20, "").status();
  EXPECT_EQ(unnamed.field(), "spec.name");
  ASSERT_TRUE(client_.OpenCache(SpecOf("rows", {0})).ok());
  const Status rows = Open(1 << 20, "rows").status();
  EXPECT_EQ(rows.code(), PQC_FAILED_PRECONDITION);
  EXPECT_EQ(rows.field(), "spec.name");

  PageCache cache = Must(Open(64 << 20));
  const std::string good = KeyOf(1), tiny(15, 'k'), huge(65, 'k');
  std::vector<std::byte> some(10), large((32 << 20) + 1);
  const auto refusal = [&](const PageSource& page) {
    std::vector<PageSource> pages = {{.key = good, .data = some}, page};
    return cache.Put(pages);
  };
  EXPECT_EQ(refusal({.key = tiny, .data = some}).field(), "pages[1].key_bytes");
  EXPECT_NE(refusal({.key = huge, .data = some}).message().find("[16, 64]"), std::string::npos);
  EXPECT_EQ(refusal({.key = good, .data = large}).field(), "pages[1].data_bytes");
  EXPECT_EQ(refusal({.key = good, .data = {some.data(), 0}}).field(), "pages[1].data_bytes");
  EXPECT_EQ(refusal({.key = good, .data = {}}).field(), "pages[1].data");
  EXPECT_EQ(SizeOf(cache, 1), 0u) << "nothing was stored";

  PageTarget target{.key = tiny, .data = some};
  EXPECT_EQ(cache.Get({&target, 1}).field(), "pages[0].key_bytes");
  const std::string_view keys[] = {good, huge};
  EXPECT_EQ(cache.Exists(keys).status().field(), "keys[1].key_bytes");
  EXPECT_EQ(cache.Exists({keys, 1}, 3600001).status().field(), "lease_ms");
  EXPECT_EQ(cache.Exists({}).status().field(), "key_count");
  EXPECT_EQ(pqc_page_put(nullptr, nullptr, 1), PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(pqc_last_error_field(), "cache");
  pqc_page_cache* opened = nullptr;
  EXPECT_EQ(pqc_page_cache_open(client_.get(), nullptr, &opened), PQC_INVALID_ARGUMENT);
  pqc_page_cache_close(nullptr);
}

// A page that fits neither into a slot nor into a message, behind one that passes through staging.
TEST(PageCacheMessageTest, AnErrorHasTheNumberOfTheWholeCall) {
  Daemon daemon({"--max-message-bytes", "1mib"});
  Client client = daemon.OpenClient("default", PQC_PATH_ONLY_LOCAL);
  PageCache cache = Must(PageCache::Open(client, {.name = "pages", .capacity_bytes = 64 << 20}));
  const std::string keys[] = {KeyOf(0), KeyOf(1)};
  const std::vector<std::byte> some(2 << 20), large(20 << 20);
  PageSource pages[] = {{.key = keys[0], .data = some}, {.key = keys[1], .data = large}};
  const Status status = cache.Put(pages);
  EXPECT_EQ(status.code(), PQC_OUT_OF_RANGE) << status.ToString();
  EXPECT_EQ(status.field(), "pages[1].data_bytes");
  EXPECT_EQ(pages[0].outcome, PQC_PAGE_STORED);
  EXPECT_EQ(pages[1].outcome, PQC_PAGE_UNKNOWN);
  std::vector<std::byte> buffer(2 << 20, std::byte{1});
  PageTarget target{.key = keys[0], .data = buffer};
  MustBeOk(cache.Get({&target, 1}));
  EXPECT_EQ(buffer, some) << "staging has no limit of messages";
}

INSTANTIATE_TEST_SUITE_P(Paths, PageCacheTest,
                         ::testing::Values(PQC_PATH_ONLY_LOCAL, PQC_PATH_ONLY_REMOTE),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
