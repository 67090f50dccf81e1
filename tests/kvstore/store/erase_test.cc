// EraseTenant and DropCache: nothing is left, in memory or in files, and nothing of others is gone.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "kvstore/memory/file_keeper.h"
#include "kvstore/sequence/stored_sequences.h"
#include "tests/kvstore/content.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::Content;
using testing::ContentRows;
using ::testing::ElementsAre;
using testing::ExpectContent;
using testing::IngestContent;
using ::testing::IsEmpty;
using testing::kTenant;
using testing::MemoryKeeper;
using testing::NumberedContent;
using testing::Pq;
using testing::RandomIds;
using testing::SharingStore;
using testing::SmallOptions;
using testing::SmallSpec;

constexpr absl::Duration kPatience = absl::Seconds(60);

// Returns the number of bytes other than 0 in memory as a client maps it.
size_t NonZeroBytes(const SharedMemory& memory) {
  const auto mapped = Mapping::Map(memory.descriptor, memory.size_bytes, Mapping::Access::kRead);
  EXPECT_TRUE(mapped.ok()) << mapped.status();
  if (!mapped.ok()) return ~size_t{0};
  return memory.size_bytes - static_cast<size_t>(std::count(
                                 mapped->data(), mapped->data() + memory.size_bytes, std::byte{0}));
}

size_t PoolBytes(Store& store, std::string_view tenant, uint64_t cache_id) {
  const auto pool = store.OpenPool(tenant, "", cache_id);
  EXPECT_TRUE(pool.ok()) << pool.status();
  return pool.ok() ? NonZeroBytes(*pool) : ~size_t{0};
}

// A tenant with a cache of its own in the store of another one.
struct Neighbour {
  static constexpr char kName[] = "neighbour";

  Neighbour(Store& in, const LayerGroup& group) : store(in) {
    const auto cache = store.OpenCache(kName, SmallSpec());
    EXPECT_TRUE(cache.ok()) << cache.status();
    cache_id = cache->cache_id;
    fresh_bytes = PoolBytes(store, kName, cache_id);
    const auto created = store.CreateSequence(kName, cache_id, {.session = "neighbour#1"});
    EXPECT_TRUE(created.ok()) << created.status();
    sequence_id = created->sequence_id;
    const ContentRows rows(NumberedContent(9, 200), group);
    EXPECT_TRUE(store.Append(kName, sequence_id, 0, rows.layers).ok());
    bytes = PoolBytes(store, kName, cache_id);
  }

  void ExpectUntouched() const {
    EXPECT_EQ(store.DescribeSequence(kName, sequence_id)->token_count, 200u);
    EXPECT_EQ(PoolBytes(store, kName, cache_id), bytes);
  }

  Store& store;
  uint64_t cache_id = 0;
  uint64_t sequence_id = 0;
  size_t fresh_bytes = 0;  // other than 0 in the new pool
  size_t bytes = 0;
};

StoreOptions OptionsWith(bool strict, DescriptorKeeper* keeper = nullptr) {
  StoreOptions options = SmallOptions();
  options.retain = true;
  options.strict_memory = strict;
  options.keeper = keeper;
  return options;
}

// Adds sequences of all kinds: named, retained, pinned, indexed, forked.
void Fill(SharingStore& world) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 3; ++i) {
    const auto ids = RandomIds(random, 400);
    const uint64_t id = world.Create(ids).sequence_id;
    const Content content = NumberedContent(static_cast<uint64_t>(i), 400);
    ASSERT_TRUE(IngestContent(*world.store, id, world.group, 0, content).ok());
    ASSERT_TRUE(
        world.store->BuildIndex(kTenant, id, {.index = Pq(2, 4), .iterations = 2}, {}).ok());
    ASSERT_TRUE(world.store->PinSequence(kTenant, id, absl::Hours(1)).ok());
    if (i == 0) {
      world.Fork(id, 200);
      continue;
    }
    ASSERT_TRUE(world.store->DropSequence(kTenant, id).ok());
  }
}

class EraseTest : public ::testing::TestWithParam<bool> {};

TEST_P(EraseTest, LeavesNoByteOfTheTenantAndAllOfTheOthers) {
  SharingStore world(SmallSpec(), OptionsWith(GetParam()));
  Fill(world);
  const Neighbour neighbour(*world.store, world.group);
  ASSERT_GT(PoolBytes(*world.store, kTenant, world.cache_id), 100'000u);
  const auto erased = world.store->EraseTenant(kTenant, kPatience);
  ASSERT_TRUE(erased.ok()) << erased.status();
  EXPECT_EQ(erased->sequences, 2u);
  EXPECT_EQ(erased->cached_prefixes, 2u);
  EXPECT_GT(erased->bytes, 100'000u);
  EXPECT_EQ(erased->remaining_bytes, 0u);
  EXPECT_EQ(PoolBytes(*world.store, kTenant, world.cache_id), 0u);
  EXPECT_THAT(*world.store->ListSequences(kTenant, world.cache_id), IsEmpty());
  neighbour.ExpectUntouched();
  const Content again = NumberedContent(7, 300);
  const uint64_t id = world.Create().sequence_id;
  ASSERT_TRUE(IngestContent(*world.store, id, world.group, 0, again).ok());
  ExpectContent(*world.store, id, world.group, again);
}

// A snapshot in use keeps its bytes: they are reported, and gone after a repetition.
TEST_P(EraseTest, ReportsBytesThatACallStillUses) {
  SharingStore world(SmallSpec(), OptionsWith(GetParam()));
  const uint64_t id = world.Create().sequence_id;
  ASSERT_TRUE(IngestContent(*world.store, id, world.group, 0, NumberedContent(1, 300)).ok());
  auto ingest = world.store->BeginIngest(kTenant, id);
  ASSERT_TRUE(ingest.ok()) << ingest.status();
  auto erased = world.store->EraseTenant(kTenant, absl::Milliseconds(10));
  ASSERT_TRUE(erased.ok()) << erased.status();
  EXPECT_GT(erased->remaining_bytes, 0u);
  ingest->reset();
  erased = world.store->EraseTenant(kTenant, kPatience);
  ASSERT_TRUE(erased.ok()) << erased.status();
  EXPECT_EQ(erased->remaining_bytes, 0u);
  EXPECT_EQ(PoolBytes(*world.store, kTenant, world.cache_id), 0u);
}

// What clients of an earlier process may still map is in quarantine: it stays there, and is zero.
TEST(EraseRecoveredTest, ErasesQuarantinedMemoryToo) {
  MemoryKeeper keeper;
  std::optional<SharingStore> world;
  world.emplace(SmallSpec(), OptionsWith(/*strict=*/false, &keeper));
  Fill(*world);
  world.reset();
  world.emplace(SmallSpec(), OptionsWith(/*strict=*/false, &keeper));
  const uint64_t id = world->Create().sequence_id;
  ASSERT_TRUE(IngestContent(*world->store, id, world->group, 0, NumberedContent(5, 300)).ok());
  ASSERT_TRUE(world->store->EraseTenant(kTenant, kPatience).ok());
  EXPECT_EQ(PoolBytes(*world->store, kTenant, world->cache_id), 0u);
  world->store->EndQuarantine();
  const Content again = NumberedContent(7, 300);
  const uint64_t next = world->Create().sequence_id;
  ASSERT_TRUE(IngestContent(*world->store, next, world->group, 0, again).ok());
  ExpectContent(*world->store, next, world->group, again);
}

TEST_P(EraseTest, ATenantReceivesZeroedMemory) {
  SharingStore world(SmallSpec(), OptionsWith(GetParam()));
  Fill(world);
  ASSERT_TRUE(world.store->EraseTenant(kTenant, kPatience).ok());
  const Neighbour neighbour(*world.store, world.group);
  EXPECT_EQ(neighbour.fresh_bytes, 0u);
  for (int i = 0; i < 3; ++i) {  // rings and control words, after those of another tenant
    for (const char* tenant : {kTenant, Neighbour::kName}) {
      const std::string session = std::string(tenant) + "#1";
      ASSERT_TRUE(world.store->OpenLocalSession(tenant, session, 1).ok());
      const auto ring = world.store->OpenStaging(tenant, session, 1 << 20, 2);
      ASSERT_TRUE(ring.ok()) << ring.status();
      EXPECT_EQ(NonZeroBytes(*ring), 0u);
      auto mapped = Mapping::Map(ring->descriptor, ring->size_bytes, Mapping::Access::kReadWrite);
      ASSERT_TRUE(mapped.ok());
      std::fill_n(mapped->data(), mapped->size_bytes(), std::byte{0x5a});
      world.store->DropSession(session);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Memory, EraseTest, ::testing::Bool(),
                         [](const auto& strict) { return strict.param ? "Strict" : "Plain"; });

TEST(DropCacheTest, RefusesWhatSessionsUseAndPinnedPrefixes) {
  SharingStore world(SmallSpec(), OptionsWith(/*strict=*/false));
  std::mt19937_64 random(1);
  const auto ids = RandomIds(random, 400);
  const uint64_t id = world.Create(ids).sequence_id;
  ASSERT_TRUE(IngestContent(*world.store, id, world.group, 0, NumberedContent(1, 400)).ok());
  const auto drop = [&](std::string_view tenant, bool force) {
    return world.store->DropCache(tenant, world.cache_id, force);
  };
  EXPECT_EQ(drop("another", true).status().code(), absl::StatusCode::kNotFound);
  const absl::Status used = drop(kTenant, false).status();
  EXPECT_EQ(used.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldOf(used), "cache_id");
  EXPECT_THAT(TextOf(used), ::testing::HasSubstr("session session has sequence"));
  ASSERT_TRUE(world.store->PinSequence(kTenant, id, absl::Hours(1)).ok());
  ASSERT_TRUE(world.store->DropSequence(kTenant, id).ok());  // leaves a pinned prefix
  EXPECT_THAT(TextOf(drop(kTenant, false).status()), ::testing::HasSubstr("is pinned"));
  const auto prefixes = world.store->ListSequences(kTenant, world.cache_id);
  ASSERT_EQ(prefixes->size(), 1u);
  ASSERT_TRUE(
      world.store->PinSequence(kTenant, prefixes->front().sequence_id, absl::ZeroDuration()).ok());
  const auto dropped = drop(kTenant, false);
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_EQ(dropped->sequences, 1u);
  EXPECT_EQ(drop(kTenant, false).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(world.store->CreateSequence(kTenant, world.cache_id, {.session = "s"}).status().code(),
            absl::StatusCode::kNotFound);
}

// Its memory is free at once: for the limits of the store, the ledger, and the machine.
TEST(DropCacheTest, GivesBackItsMemoryAndItsPlace) {
  StoreOptions options = OptionsWith(/*strict=*/false);
  options.max_caches = 1;
  options.max_pool_bytes = size_t{32} << 20;
  SharingStore world(SmallSpec(), options);
  const auto mapped = world.store->OpenPool(kTenant, "", world.cache_id);
  ASSERT_TRUE(mapped.ok());
  const uint64_t id = world.Create().sequence_id;
  ASSERT_TRUE(IngestContent(*world.store, id, world.group, 0, NumberedContent(1, 400)).ok());
  EXPECT_FALSE(world.store->OpenCache(kTenant, SmallSpec("another")).ok());
  const auto dropped = world.store->DropCache(kAllTenants, world.cache_id, /*force=*/true);
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_GT(dropped->bytes, 100'000u);
  EXPECT_EQ(NonZeroBytes(*mapped), 0u) << "a client still maps it";
  for (const MemoryAccount& account : world.store->Stats(kTenant).memory) {
    EXPECT_NE(account.use, MemoryUse::kPool) << account.promised_bytes;
  }
  const auto again = world.store->OpenCache(kTenant, SmallSpec("another"));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_NE(again->cache_id, world.cache_id);
}

TEST(DropCacheTest, IsNotRecovered) {
  MemoryKeeper keeper;
  const StoreOptions options = OptionsWith(/*strict=*/false, &keeper);
  std::optional<SharingStore> world(std::in_place, SmallSpec(), options);
  const auto other = world->store->OpenCache(kTenant, SmallSpec("another"));
  ASSERT_TRUE(other.ok()) << other.status();
  Fill(*world);
  ASSERT_TRUE(world->store->DropCache(kTenant, world->cache_id, /*force=*/true).ok());
  EXPECT_EQ(keeper.Names().size(), 3u) << "the root records, and two of the other cache";
  world.reset();
  const auto store = Store::Create(options);
  ASSERT_TRUE(store.ok()) << store.status();
  const auto caches = (*store)->ListCaches(kTenant);
  ASSERT_EQ(caches.size(), 1u);
  EXPECT_EQ(caches[0].cache_id, other->cache_id);
  EXPECT_EQ((*store)->Recovery().dropped_records, 0u);
}

// Sequences that are being created when the cache is dropped are refused or dropped with it.
TEST(DropCacheTest, ClosesTheCacheBeforeItsEnd) {
  StoredSequences sequences;
  ASSERT_TRUE(sequences.Reserve(7, 10).ok());
  EXPECT_EQ(sequences.CloseCache(7, /*force=*/false).code(),
            absl::StatusCode::kFailedPrecondition);  // a sequence is being created
  sequences.Cancel(7);
  ASSERT_TRUE(sequences.CloseCache(7, /*force=*/false).ok());
  EXPECT_EQ(sequences.Reserve(7, 10).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(sequences.Reserve(8, 10).ok());
}

TEST(DropCacheTest, WhileOthersCreateSequences) {
  SharingStore world(SmallSpec(), OptionsWith(/*strict=*/false));
  for (int round = 0; round < 20; ++round) {
    const auto cache = world.store->OpenCache(kTenant, SmallSpec("round"));
    ASSERT_TRUE(cache.ok()) << cache.status();
    std::atomic<bool> begun = false;
    std::vector<std::thread> creators;
    for (int i = 0; i < 3; ++i) {
      creators.emplace_back([&] {
        while (true) {
          const auto made =
              world.store->CreateSequence(kTenant, cache->cache_id, {.session = "session"});
          begun = true;
          if (made.ok() || absl::IsResourceExhausted(made.status())) continue;  // it is full
          EXPECT_EQ(made.status().code(), absl::StatusCode::kNotFound) << made.status();
          return;
        }
      });
    }
    while (!begun) std::this_thread::yield();
    const auto dropped = world.store->DropCache(kTenant, cache->cache_id, /*force=*/true);
    ASSERT_TRUE(dropped.ok()) << dropped.status();
    for (std::thread& creator : creators) creator.join();
  }
  EXPECT_EQ(world.store->ListCaches(kTenant).size(), 1u);
  EXPECT_EQ(world.used_bytes(), 0u);
}

class EraseFilesTest : public ::testing::Test {
 protected:
  EraseFilesTest() {
    std::string pattern = ::testing::TempDir() + "erase-XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~EraseFilesTest() override { std::filesystem::remove_all(directory_); }

  // Leaves files of both tenants, or of the first one alone, in a folder of their own.
  std::string SetAside(bool both) {
    auto keeper = FileKeeper::Open(directory_);
    EXPECT_TRUE(keeper.ok()) << keeper.status();
    StoreOptions options = SmallOptions();
    options.keeper = keeper->get();
    {
      SharingStore world(SmallSpec(), options);
      if (both) const Neighbour neighbour(*world.store, world.group);
    }
    const auto folder = (*keeper)->SetAside();
    EXPECT_TRUE(folder.ok()) << folder.status();
    return *folder;
  }
  absl::StatusOr<ErasedTenant> Erase(std::string_view tenant) {
    auto keeper = FileKeeper::Open(directory_);
    if (!keeper.ok()) return keeper.status();
    StoreOptions options = SmallOptions();
    options.keeper = keeper->get();
    auto store = Store::Create(options);
    if (!store.ok()) return store.status();
    return (*store)->EraseTenant(tenant, kPatience);
  }
  static std::vector<std::string> NamesIn(const std::string& folder) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  std::string directory_;
};

TEST_F(EraseFilesTest, RemovesTheTenantsFilesAmongThoseSetAside) {
  const std::string mixed = SetAside(/*both=*/true);
  const std::string own = SetAside(/*both=*/false);
  ASSERT_EQ(NamesIn(mixed).size(), 5u);  // the root records, and two files per cache
  auto erased = Erase(kTenant);
  ASSERT_TRUE(erased.ok()) << erased.status();
  EXPECT_EQ(erased->set_aside_files, 2u + 3u);
  EXPECT_GT(erased->set_aside_bytes, 0u);
  EXPECT_THAT(erased->unreadable_folders, IsEmpty());
  EXPECT_EQ(NamesIn(mixed).size(), 3u);
  EXPECT_FALSE(std::filesystem::exists(own));
  erased = Erase(Neighbour::kName);
  ASSERT_TRUE(erased.ok()) << erased.status();
  EXPECT_EQ(erased->set_aside_files, 3u);
  EXPECT_FALSE(std::filesystem::exists(mixed));
}

TEST_F(EraseFilesTest, NamesFoldersWhoseOwnersCannotBeRead) {
  const std::string folder = SetAside(/*both=*/false);
  ASSERT_EQ(truncate((folder + "/records").c_str(), 100), 0);
  const auto erased = Erase(kTenant);
  ASSERT_TRUE(erased.ok()) << erased.status();
  EXPECT_EQ(erased->set_aside_files, 0u);
  EXPECT_THAT(erased->unreadable_folders, ElementsAre("set-aside@1"));
  EXPECT_EQ(NamesIn(folder).size(), 3u);
}

}  // namespace
}  // namespace pqcached::kvstore
