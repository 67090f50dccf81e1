// What is kept, and what of it another store reads back.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "kvstore/memory/file_keeper.h"
#include "kvstore/records/slot_array.h"
#include "tests/kvstore/fixture.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::MemoryKeeper;
using testing::SmallOptions;

// A directory that goes away with the test.
class Directory {
 public:
  Directory() {
    std::string pattern = ::testing::TempDir() + "keeper-XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::unique_ptr<Store> OpenStore(DescriptorKeeper& keeper) {
  StoreOptions options = SmallOptions();
  options.keeper = &keeper;
  auto store = Store::Create(options);
  EXPECT_TRUE(store.ok()) << store.status();
  return *std::move(store);
}

const KeptSession kAda = {.id = "ada#1", .tenant = "default", .client_name = "ada", .token = "aa"};
const KeptSession kBob = {.id = "bob#2", .tenant = "other", .client_name = "", .token = "bb"};

void ExpectSame(const KeptSession& session, const KeptSession& wanted) {
  EXPECT_EQ(session.id, wanted.id);
  EXPECT_EQ(session.tenant, wanted.tenant);
  EXPECT_EQ(session.client_name, wanted.client_name);
  EXPECT_EQ(session.token, wanted.token);
}

// Creates a file of `bytes` under a name.
void KeepFile(FileKeeper& keeper, const std::string& name, size_t bytes) {
  const auto memory = keeper.CreateMemory(name.c_str(), bytes);
  ASSERT_TRUE(memory.ok()) << memory.status();
  ASSERT_EQ(posix_fallocate(memory->get(), 0, static_cast<off_t>(bytes)), 0);
  ASSERT_TRUE(keeper.Keep(name, memory->get()).ok());
}

TEST(FileKeeper, SetsAllFilesAsideUntilAnOperatorRemovesThem) {
  const Directory directory;
  auto keeper = FileKeeper::Open(directory.path());
  ASSERT_TRUE(keeper.ok()) << keeper.status();
  EXPECT_EQ(*(*keeper)->SetAside(), "") << "there is no file";
  EXPECT_EQ((*keeper)->SetAsideBytes(), 0u);
  KeepFile(**keeper, "pool-1", 1 << 20);
  KeepFile(**keeper, "records-1", 1 << 16);
  const auto folder = (*keeper)->SetAside();
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(folder->rfind(directory.path() + "/set-aside@", 0), 0u) << *folder;
  EXPECT_THAT((*keeper)->Names(), IsEmpty());
  EXPECT_TRUE(std::filesystem::exists(*folder + "/pool-1"));
  EXPECT_GE((*keeper)->SetAsideBytes(), (size_t{1} << 20) + (1 << 16));
  KeepFile(**keeper, "pool-1", 1 << 16);  // the name is free again
  const auto second = (*keeper)->SetAside();
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_NE(*second, *folder);
  std::filesystem::remove_all(*folder);
  std::filesystem::remove_all(*second);
  EXPECT_EQ((*keeper)->SetAsideBytes(), 0u);
}

TEST(FileKeeper, FindsWhatAnEarlierOneKept) {
  const Directory directory;
  {
    auto keeper = FileKeeper::Open(directory.path());
    ASSERT_TRUE(keeper.ok()) << keeper.status();
    EXPECT_EQ(FileKeeper::Open(directory.path()).status().code(), absl::StatusCode::kAlreadyExists);
    const auto memory = (*keeper)->CreateMemory("one", 5000);
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_THAT((*keeper)->Names(), IsEmpty());
    ASSERT_EQ(pwrite(memory->get(), "hello", 5, 100), 5);
    ASSERT_TRUE((*keeper)->Keep("one", memory->get()).ok());
    EXPECT_EQ((*keeper)->Keep("one", memory->get()).code(), absl::StatusCode::kAlreadyExists);
    EXPECT_EQ((*keeper)->Keep("../one", memory->get()).code(), absl::StatusCode::kInvalidArgument);
  }
  auto keeper = FileKeeper::Open(directory.path());
  ASSERT_TRUE(keeper.ok()) << keeper.status();
  EXPECT_THAT((*keeper)->Names(), ElementsAre("one"));
  {
    const FileDescriptor found = (*keeper)->Take("one");
    ASSERT_TRUE(found.valid());
    char text[6] = {};
    ASSERT_EQ(pread(found.get(), text, 5, 100), 5);
    EXPECT_STREQ(text, "hello");
    struct stat info = {};
    ASSERT_EQ(fstat(found.get(), &info), 0);
    EXPECT_GE(info.st_size, 5000);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
  }
  EXPECT_TRUE((*keeper)->Release("one").ok());
  EXPECT_TRUE((*keeper)->Release("one").ok());
  EXPECT_FALSE((*keeper)->Take("one").valid());
}

TEST(FileKeeper, RefusesWhatIsNotItsOwn) {
  const Directory directory;
  EXPECT_EQ(FileKeeper::Open(directory.path() + "/none").status().code(),
            absl::StatusCode::kNotFound);
  auto keeper = FileKeeper::Open(directory.path());
  ASSERT_TRUE(keeper.ok()) << keeper.status();
  const auto memfd = CreateMemfd("test", 4096);
  ASSERT_TRUE(memfd.ok());
  EXPECT_FALSE((*keeper)->Keep("memfd", memfd->get()).ok());
  // Somebody else may write to this one.
  const std::string open = directory.path() + "/open";
  close(creat(open.c_str(), 0600));
  ASSERT_EQ(chmod(open.c_str(), 0666), 0);
  EXPECT_FALSE((*keeper)->Take("open").valid());
  ASSERT_EQ(symlink("/etc/passwd", (directory.path() + "/link").c_str()), 0);
  EXPECT_FALSE((*keeper)->Take("link").valid());
  (*keeper).reset();
  ASSERT_EQ(chmod(directory.path().c_str(), 0777), 0);
  EXPECT_EQ(FileKeeper::Open(directory.path()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(FileKeeper, PromisesNoMoreThanThereIs) {
  const Directory directory;
  auto keeper = FileKeeper::Open(directory.path());
  ASSERT_TRUE(keeper.ok()) << keeper.status();
  const size_t left_bytes = std::filesystem::space(directory.path()).available;
  EXPECT_EQ((*keeper)->CreateMemory("large", left_bytes + (size_t{1} << 33)).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(FileKeeper, HoldsAStoreToo) {
  const Directory directory;
  for (const bool is_first : {true, false}) {
    auto keeper = FileKeeper::Open(directory.path());
    ASSERT_TRUE(keeper.ok()) << keeper.status();
    const auto store = OpenStore(**keeper);
    EXPECT_EQ(store->Recovery().caches, is_first ? 0u : 1u);
    const auto cache = store->OpenCache(testing::kTenant, testing::SmallSpec());
    ASSERT_TRUE(cache.ok()) << cache.status();
    EXPECT_EQ(store->Recovery().sequences, is_first ? 0u : 1u);
    if (!is_first) continue;
    EXPECT_TRUE(store->CreateSequence(testing::kTenant, cache->cache_id, {.session = "s"}).ok());
  }
}

TEST(KeptSessions, ComeBackUntilTheyAreDropped) {
  MemoryKeeper keeper;
  {
    auto store = OpenStore(keeper);
    EXPECT_FALSE(store->Recovery().recovered);
    ASSERT_TRUE(store->KeepSession(kAda).ok());
    ASSERT_TRUE(store->KeepSession(kBob).ok());
    EXPECT_EQ(store->KeepSession(kBob).code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(store->KeptSessions(), IsEmpty());  // those are its own
  }
  {
    auto store = OpenStore(keeper);
    EXPECT_TRUE(store->Recovery().recovered);
    EXPECT_EQ(store->Recovery().dropped_records, 0u);
    const auto kept = store->KeptSessions();
    ASSERT_EQ(kept.size(), 2u);
    ExpectSame(kept[0], kAda);
    ExpectSame(kept[1], kBob);
    store->DropSession(kAda.id);
    EXPECT_EQ(store->KeptSessions().size(), 1u);
  }
  auto store = OpenStore(keeper);
  const auto kept = store->KeptSessions();
  ASSERT_EQ(kept.size(), 1u);
  ExpectSame(kept[0], kBob);
}

TEST(KeptSessions, AreBounded) {
  MemoryKeeper keeper;
  auto store = OpenStore(keeper);
  KeptSession session = kAda;
  session.client_name.assign(2000, 'x');
  EXPECT_EQ(store->KeepSession(session).code(), absl::StatusCode::kInvalidArgument);
  absl::Status status;
  for (int i = 0; status.ok() && i < 5000; ++i) {
    session = kAda;
    session.id = std::to_string(i);
    status = store->KeepSession(session);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  store->DropSession("7");
  session.id = "again";
  EXPECT_TRUE(store->KeepSession(session).ok());
}

TEST(KeptSessions, AreNotReadFromForeignMemory) {
  MemoryKeeper keeper;
  const auto memfd = keeper.CreateMemory("records", 100);  // too short for anything
  ASSERT_TRUE(memfd.ok() && keeper.Keep("records", memfd->get()).ok());
  auto store = OpenStore(keeper);
  EXPECT_FALSE(store->Recovery().recovered);
  EXPECT_TRUE(store->KeepSession(kAda).ok());
}

TEST(SlotArray, HoldsAllOfARecordOrNothing) {
  const size_t slot_bytes = SlotArray::SlotBytes(50);
  std::vector<uint64_t> memory(3 * slot_bytes / sizeof(uint64_t));
  const auto bytes = std::as_writable_bytes(std::span(memory));
  SlotArray slots({}, bytes, slot_bytes, 1);
  ASSERT_EQ(slots.count(), 3u);
  EXPECT_EQ(slots.Read(1).state, SlotArray::State::kEmpty);
  for (const size_t size : {size_t{0}, size_t{1}, size_t{50}}) {
    const std::vector<std::byte> content(size, std::byte{7});
    slots.Put(1, content);
    const SlotArray::Content read = slots.Read(1);
    ASSERT_EQ(read.state, SlotArray::State::kFull);
    EXPECT_TRUE(std::equal(read.bytes.begin(), read.bytes.end(), content.begin(), content.end()));
  }
  slots.Open(1)[0] = std::byte{9};  // killed before Commit
  EXPECT_EQ(slots.Read(1).state, SlotArray::State::kEmpty);
  slots.Commit(1, 50);
  EXPECT_EQ(slots.Read(1).state, SlotArray::State::kFull);
  EXPECT_EQ(SlotArray({}, bytes, slot_bytes, 2).Read(1).state, SlotArray::State::kBroken);
  std::memcpy(bytes.data(), bytes.data() + slot_bytes, slot_bytes);  // in a place of another
  EXPECT_EQ(slots.Read(0).state, SlotArray::State::kBroken);
  slots.Clear(0);
  EXPECT_EQ(slots.Read(0).state, SlotArray::State::kEmpty);
}

TEST(SlotArray, NoticesEveryFlippedBit) {
  const size_t slot_bytes = SlotArray::SlotBytes(20);
  std::vector<uint64_t> memory(slot_bytes / sizeof(uint64_t));
  const auto bytes = std::as_writable_bytes(std::span(memory));
  SlotArray slots({}, bytes, slot_bytes, 1);
  const std::vector<std::byte> content(20, std::byte{0x5a});
  slots.Put(0, content);
  for (size_t bit = 0; bit < 8 * (slot_bytes - 4); ++bit) {  // the rest is padding
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_EQ(slots.Read(0).state, SlotArray::State::kBroken) << bit;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  EXPECT_EQ(slots.Read(0).state, SlotArray::State::kFull);
}

TEST(DurableCounter, KnowsWhenItHasRotted) {
  DurableCounter counter{};
  counter.Reset(5);
  EXPECT_EQ(counter.Read(), 5u);
  counter.RaiseTo(4);
  EXPECT_EQ(counter.Read(), 5u);
  counter.RaiseTo(8);
  EXPECT_EQ(counter.Read(), 8u);
  counter.value = 9;  // killed between the two stores
  EXPECT_EQ(counter.Read(), 9u);
  counter.value = 7;
  EXPECT_EQ(counter.Read(), std::nullopt);
  counter.value = uint64_t{1} << 60;
  EXPECT_EQ(counter.Read(), std::nullopt);
}

}  // namespace
}  // namespace pqcached::kvstore
