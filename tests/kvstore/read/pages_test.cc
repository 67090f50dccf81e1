#include "kvstore/read/pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kvstore/memory/memfd.h"
#include "kvstore/memory/pool.h"
#include "tests/kvstore/huge_volume.h"
#include "tests/skip.h"

namespace pqcached::kvstore {
namespace {

constexpr size_t kPage = 4096;

FileDescriptor MakeMemory(size_t size_bytes) {
  auto memfd = CreateMemfd("pages-test", size_bytes);
  EXPECT_TRUE(memfd.ok()) << memfd.status();
  return *std::move(memfd);
}

Mapping MakeMapping(const FileDescriptor& memfd, size_t size_bytes,
                    Mapping::Access access = Mapping::Access::kReadWrite) {
  auto mapping = Mapping::Map(memfd, size_bytes, access);
  EXPECT_TRUE(mapping.ok()) << mapping.status();
  return *std::move(mapping);
}

std::byte Pattern(size_t offset) { return static_cast<std::byte>(offset * 131 + offset / 4093); }

// Of the bytes from `address` on, as the kernel tells of the mapping there.
size_t HugeBytes(const std::byte* address) {
  std::ostringstream begin;
  begin << std::hex << reinterpret_cast<uintptr_t>(address) << "-";
  std::ifstream smaps("/proc/self/smaps");
  bool found = false;
  for (std::string line; std::getline(smaps, line);) {
    found = found || line.starts_with(begin.str());
    if (found && line.starts_with("ShmemPmdMapped:")) {
      return std::stoull(line.substr(line.find(':') + 1)) << 10;
    }
  }
  return 0;
}

size_t PresentBytes(const FileDescriptor& memfd) {
  struct stat status = {};
  return fstat(memfd.get(), &status) == 0 ? static_cast<size_t>(status.st_blocks) * 512 : 0;
}

// Of the whole process.
size_t AddressSpacePages() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages;
}

TEST(MapMemory, BeginsWhereHugePagesDoAndKeepsNothingElse) {
  for (const size_t size_bytes :
       {size_t{1}, kPage, kHugePageBytes - 1, kHugePageBytes, kHugePageBytes + 1,
        kHugePageBytes + kPage, 3 * kHugePageBytes + 5 * kPage}) {
    const FileDescriptor memfd = MakeMemory(size_bytes);
    const size_t before = AddressSpacePages();
    std::byte* const data = MapMemory(memfd.get(), size_bytes, PROT_READ | PROT_WRITE);
    ASSERT_NE(data, nullptr) << size_bytes;
    EXPECT_EQ(AddressSpacePages() - before, (size_bytes + kPage - 1) / kPage);
    if (size_bytes >= kHugePageBytes) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % kHugePageBytes, 0u) << size_bytes;
    }
    data[size_bytes - 1] = std::byte{7};
    std::byte read = {};
    EXPECT_EQ(pread(memfd.get(), &read, 1, static_cast<off_t>(size_bytes - 1)), 1);
    EXPECT_EQ(read, std::byte{7});
    munmap(data, size_bytes);
  }
}

TEST(MapMemory, SaysWhyTheKernelRefuses) {
  EXPECT_EQ(MapMemory(-1, kPage, PROT_READ), nullptr);
  EXPECT_EQ(errno, EBADF);
  EXPECT_EQ(MapMemory(-1, kHugePageBytes, PROT_READ), nullptr);
  EXPECT_EQ(errno, EBADF);
  const FileDescriptor memfd = MakeMemory(kPage);
  EXPECT_EQ(MapMemory(memfd.get(), SIZE_MAX - kPage, PROT_READ), nullptr);
  EXPECT_NE(errno, 0);
}

TEST(PopulatePages, MakesAllPresentAndKeepsTheBytes) {
  for (const size_t begin : {size_t{0}, kPage, kHugePageBytes - kPage}) {
    for (const size_t size : {kPage, kHugePageBytes - kPage, kHugePageBytes, kHugePageBytes + kPage,
                              3 * kHugePageBytes + 7 * kPage}) {
      const FileDescriptor memfd = MakeMemory(begin + size);
      const Mapping mapping = MakeMapping(memfd, begin + size);
      // Some pages are there before, in each huge page another part.
      for (size_t offset = begin; offset < begin + size; offset += 5 * kPage) {
        mapping.data()[offset] = Pattern(offset);
      }
      PopulatePages({mapping.data() + begin, size});
      EXPECT_GE(PresentBytes(memfd), size) << begin;
      for (size_t offset = begin; offset < begin + size; offset += kPage) {
        const bool written = (offset - begin) % (5 * kPage) == 0;
        ASSERT_EQ(mapping.data()[offset], written ? Pattern(offset) : std::byte{0}) << offset;
      }
    }
  }
}

// A mapping of hugetlbfs has whole pages, also where the memory that is asked for ends in one.
TEST(MapMemory, MeetsNoOtherMappingOnHugetlbfs) {
  constexpr size_t kSize = 4 * kHugePageBytes + kPage;
  constexpr uint64_t kMappings = 8;
  const testing::HugeVolume volume(kMappings * 5);
  if (!volume.complete()) PQC_SKIP("hugetlbfs") << "this user gets no huge pages";
  std::vector<FileDescriptor> files;
  {
    std::vector<Mapping> mappings;
    for (uint64_t i = 0; i < kMappings; ++i) {
      files.emplace_back(open(volume.path().c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
      ASSERT_EQ(ftruncate(files.back().get(), 5 * kHugePageBytes), 0);
      mappings.push_back(MakeMapping(files.back(), kSize));
      std::byte* const data = mappings.back().data();
      EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % kHugePageBytes, 0u);
      ASSERT_TRUE(PopulatePages({data, kSize}).present);
      for (const size_t at : {size_t{0}, kSize - 1}) data[at] = static_cast<std::byte>(i + 1);
    }
    for (uint64_t i = 0; i < kMappings; ++i) {
      EXPECT_EQ(mappings[i].data()[0], static_cast<std::byte>(i + 1));
      EXPECT_EQ(mappings[i].data()[kSize - 1], static_cast<std::byte>(i + 1));
    }
  }
  files.clear();
  struct statfs system = {};
  ASSERT_EQ(statfs(volume.path().c_str(), &system), 0);
  EXPECT_EQ(system.f_bfree, system.f_blocks) << "a mapping has not ended";
}

TEST(PopulatePages, NothingIsFine) {
  EXPECT_TRUE(PopulatePages({}).present);
  EXPECT_FALSE(PopulatePages({}).huge);
}

TEST(PopulatePages, AreHugeInEveryMappingWhenItSaysSo) {
  constexpr size_t kSize = 4 * kHugePageBytes;
  const FileDescriptor memfd = MakeMemory(kSize);
  const Mapping writer = MakeMapping(memfd, kSize);
  if (!PopulatePages({writer.data(), kSize}).huge) {
    PQC_SKIP("huge_pages") << "this machine gives shared memory no huge pages";
  }
  EXPECT_EQ(HugeBytes(writer.data()), kSize);
  const Mapping reader = MakeMapping(memfd, kSize, Mapping::Access::kRead);
  std::byte sum{};
  for (size_t offset = 0; offset < kSize; offset += kPage) sum |= reader.data()[offset];
  EXPECT_EQ(sum, std::byte{0});
  EXPECT_EQ(HugeBytes(reader.data()), kSize);
}

TEST(PopulatePages, IsUnseenByThoseWhoReadAndWriteMeanwhile) {
  constexpr size_t kSize = 16 * kHugePageBytes;
  constexpr size_t kStride = 3 * kPage + 64;
  const FileDescriptor memfd = MakeMemory(kSize);
  const Mapping writer = MakeMapping(memfd, kSize);
  const Mapping reader = MakeMapping(memfd, kSize, Mapping::Access::kRead);
  std::atomic<size_t> written{0};  // all before it
  std::atomic<size_t> wrong{0};
  std::thread writes([&] {
    for (size_t offset = 0; offset < kSize; offset += kStride) {
      writer.data()[offset] = Pattern(offset);
      written.store(offset, std::memory_order_release);
    }
  });
  std::thread reads([&] {
    while (written.load(std::memory_order_acquire) + kStride < kSize) {
      const size_t end = written.load(std::memory_order_acquire);
      for (size_t offset = 0; offset < end; offset += 7 * kStride) {
        if (reader.data()[offset] != Pattern(offset)) ++wrong;
      }
    }
  });
  for (size_t offset = 0; offset < kSize; offset += kHugePageBytes) {
    PopulatePages({writer.data() + offset, kHugePageBytes});
  }
  writes.join();
  reads.join();
  EXPECT_EQ(wrong, 0u);
  for (size_t offset = 0; offset < kSize; offset += kStride) {
    ASSERT_EQ(reader.data()[offset], Pattern(offset)) << offset;
  }
}

TEST(Pool, TellsOfThePagesThatItsMemoryHas) {
  constexpr size_t kSize = 4 * kHugePageBytes;
  const auto pool = Pool::Create({.capacity_bytes = kSize, .idle_reserve_bytes = kSize});
  ASSERT_TRUE(pool.ok()) << pool.status();
  (*pool)->TouchReserve();
  const bool huge = HugeBytes((*pool)->data(ExtentRef{.unit = 0, .order = 0})) > 0;
  EXPECT_EQ((*pool)->page_bytes(), huge ? kHugePageBytes : kPage);
}

TEST(Pool, GivesFreePagesBackOutOfTheMidstOfHugeOnes) {
  constexpr size_t kUnits = 4 * kHugePageBytes / kMinExtentBytes;
  const auto made = Pool::Create({.capacity_bytes = kUnits * kMinExtentBytes});
  ASSERT_TRUE(made.ok()) << made.status();
  Pool& pool = **made;
  auto extents = pool.Allocate(std::vector<size_t>(kUnits, kMinExtentBytes));
  ASSERT_TRUE(extents.ok()) << extents.status();
  for (const Extent& extent : *extents) {
    std::memset(extent.data(), static_cast<int>(extent.ref().unit % 251), extent.size_bytes());
  }
  ASSERT_EQ(pool.absent_bytes(), 0u);
  std::vector<Extent> kept;
  for (size_t i = 0; i < kUnits; i += 2) kept.push_back(std::move((*extents)[i]));
  extents->clear();  // every second unit is free: none has a free neighbour

  EXPECT_EQ(pool.ReturnFreePages(kUnits * kMinExtentBytes), kUnits / 2 * kMinExtentBytes);
  EXPECT_EQ(pool.absent_bytes(), kUnits / 2 * kMinExtentBytes);
  for (const Extent& extent : kept) {
    for (size_t i = 0; i < extent.size_bytes(); i += 512) {
      ASSERT_EQ(extent.data()[i], static_cast<std::byte>(extent.ref().unit % 251));
    }
  }
}

}  // namespace
}  // namespace pqcached::kvstore
