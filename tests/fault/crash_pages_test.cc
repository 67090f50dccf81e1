// A page cache loses no acknowledged page, and shows no part of one, whichever store into memory
// that outlives the process is its last.
//
// A process puts pages into a small page cache, which evicts the oldest ones, and is killed at each
// crash point in turn. The next process recovers, and compares.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvstore/store.h"
#include "tests/fault/crash/crash_points.h"
#include "tests/fault/crash/kept_memory.h"

namespace pqcached::kvstore::testing {
namespace {

constexpr char kTenant[] = "tenant";
constexpr uint32_t kUnits = 4;  // of the page cache, which each page has one of
constexpr uint32_t kPages = 7;  // so that three are evicted

struct Shared {
  std::atomic<uint64_t> reached = 0;       // crash points
  std::atomic<uint32_t> acknowledged = 0;  // pages [0, acknowledged) were put
};

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "crash_pages_test: %s\n", what.c_str());
  _exit(1);
}

std::string KeyOf(uint32_t number) { return "the page of number " + std::to_string(number); }

std::vector<std::byte> ContentOf(uint32_t number) {
  std::vector<std::byte> content(kMinExtentBytes - number);
  for (size_t i = 0; i < content.size(); ++i) {
    content[i] = static_cast<std::byte>(i * 7 + number * 31 + (i >> 8));
  }
  return content;
}

struct World {
  std::unique_ptr<Store> store;
  uint64_t cache_id = 0;
};

World OpenWorld(SharedKeeper& keeper) {
  keeper.Begin();
  StoreOptions options;
  options.max_pool_bytes = size_t{16} << 20;
  options.threads = 1;
  options.keeper = &keeper;
  auto store = Store::Create(options);
  if (!store.ok()) Fail(store.status().ToString());
  World world{.store = *std::move(store)};
  world.store->EndQuarantine();
  const auto opened = world.store->OpenPageCache(
      kTenant, {.name = "pages", .capacity_bytes = kUnits * kMinExtentBytes}, "session");
  if (!opened.ok()) Fail(opened.status().ToString());
  world.cache_id = opened->cache_id;
  return world;
}

// Puts all pages, and is killed at a crash point, unless there are fewer.
void PutPages(SharedKeeper& keeper, uint64_t point, Shared& shared) {
  const World world = OpenWorld(keeper);
  ArmCrashPoints({.point = point}, shared.reached);
  for (uint32_t i = 0; i < kPages; ++i) {
    const std::string key = KeyOf(i);
    const auto content = ContentOf(i);
    const PageSource page{.key = key, .bytes = content};
    const auto outcomes = world.store->PutPages(kTenant, world.cache_id, std::span(&page, 1));
    if (!outcomes.ok() || outcomes->front() != PageOutcome::kStored) Fail("a put has failed");
    shared.acknowledged = i + 1;
  }
  DisarmCrashPoints();
}

// Recovers, and compares with what was acknowledged.
void CheckPages(SharedKeeper& keeper, const Shared& shared) {
  const World world = OpenWorld(keeper);
  Store& store = *world.store;
  const std::string where = "killed at store " + std::to_string(shared.reached) + ": ";
  if (store.Recovery().dropped_records != 0) Fail(where + "records were dropped");
  const uint32_t acknowledged = shared.acknowledged;
  for (uint32_t i = 0; i < kPages; ++i) {
    const std::string key = KeyOf(i);
    const std::string_view view = key;
    const auto found =
        store.FindPages(kTenant, world.cache_id, std::span(&view, 1), absl::ZeroDuration());
    if (!found.ok()) Fail(where + found.status().ToString());
    const auto& bytes = found->front().bytes;
    const std::string page = where + "page " + std::to_string(i);
    // The put in progress may have evicted the oldest page.
    const bool must_be_there = i < acknowledged && acknowledged - i < kUnits;
    if (bytes.empty() && must_be_there) Fail(page + " is lost");
    if (!bytes.empty() && i > acknowledged) Fail(page + " was never put");
    const auto content = ContentOf(i);
    if (!bytes.empty() && !std::equal(bytes.begin(), bytes.end(), content.begin(), content.end())) {
      Fail(page + " has other bytes");
    }
  }
  const StoreStats stats = store.Stats(kAllTenants);
  if (stats.data_loss_count != 0) Fail(where + "a page failed its checksum");
  const size_t used_bytes = store.ListCaches(kTenant).front().used_bytes;
  if (used_bytes != stats.pages.page_count * kMinExtentBytes) Fail(where + "memory has leaked");
}

// Runs `work` in a process of its own. Returns whether it has ended by itself.
template <class Work>
bool RunInChild(const Work& work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    _exit(0);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) Fail("waitpid");
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0) Fail("a process has failed");
  if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL) Fail("a process has crashed");
  return WIFEXITED(status);
}

int Main() {
  SharedKeeper keeper;
  Shared& shared = *MakeShared<Shared>();
  uint64_t kills = 0;
  for (bool has_ended = false; !has_ended; ++kills) {
    keeper.Clear();
    shared.reached = 0;
    shared.acknowledged = 0;
    has_ended = RunInChild([&] { PutPages(keeper, kills + 1, shared); });
    if (!RunInChild([&] { CheckPages(keeper, shared); })) Fail("the check was killed");
  }
  std::printf("%llu kills\n", static_cast<unsigned long long>(kills - 1));
  return kills > 50 ? 0 : 1;
}

}  // namespace
}  // namespace pqcached::kvstore::testing

int main() { return pqcached::kvstore::testing::Main(); }
