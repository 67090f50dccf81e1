#include "kvstore/read/pages.h"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <string>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace pqcached::kvstore {
namespace {

std::byte* MapUnaligned(int descriptor, size_t size_bytes, int protection) {
  void* const data = mmap(nullptr, size_bytes, protection, MAP_SHARED, descriptor, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

size_t SmallPageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Returns the size of the pages that a mapping of the descriptor consists of.
size_t PageBytesOf(int descriptor) {
  struct statfs system = {};
  const bool huge =
      fstatfs(descriptor, &system) == 0 && static_cast<uint64_t>(system.f_type) == HUGETLBFS_MAGIC;
  return huge ? static_cast<size_t>(system.f_bsize) : SmallPageBytes();
}

// Returns true when the kernel backs shared memory with huge pages on request.
bool SharedHugePages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string line;
  std::getline(file, line);
  return line.find("[advise]") != std::string::npos || line.find("[always]") != std::string::npos ||
         line.find("[force]") != std::string::npos;
}

// Faults whole pages in. The kernel (5.14 and later) does so without a store that would race with a
// writer's; on older kernels an atomic store that changes nothing does it. Returns false when the
// kernel refuses a page.
bool FaultIn(std::span<std::byte> pages) {
  if (madvise(pages.data(), pages.size(), MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;
  const size_t page_bytes = SmallPageBytes();
  for (size_t offset = 0; offset < pages.size(); offset += page_bytes) {
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(pages.data() + offset), 0, __ATOMIC_RELAXED);
  }
  return true;
}

// Returns the part of the memory that consists of whole, aligned huge pages.
std::span<std::byte> HugePart(std::span<std::byte> memory) {
  const size_t misaligned_bytes = reinterpret_cast<uintptr_t>(memory.data()) % kHugePageBytes;
  const size_t before_bytes = (kHugePageBytes - misaligned_bytes) % kHugePageBytes;
  if (memory.size() < before_bytes + kHugePageBytes) return {};
  const size_t size_bytes = (memory.size() - before_bytes) / kHugePageBytes * kHugePageBytes;
  return memory.subspan(before_bytes, size_bytes);
}

// Collapses each huge-page range into a huge page. One small page of each range has to be present,
// because the kernel does not collapse a hole.
bool CollapsePages(std::span<std::byte> memory) {
  for (size_t offset = 0; offset < memory.size(); offset += kHugePageBytes) {
    if (!FaultIn(memory.subspan(offset, SmallPageBytes()))) return false;
  }
  return !memory.empty() && madvise(memory.data(), memory.size(), MADV_COLLAPSE) == 0;
}

}  // namespace

std::byte* MapMemory(int descriptor, size_t size_bytes, int protection) {
  // The kernel maps whole pages, and at a fixed address it replaces what a longer mapping meets.
  const size_t page_bytes = PageBytesOf(descriptor);
  const size_t mapped_bytes = RoundUp(size_bytes, page_bytes);
  const size_t alignment = std::max(page_bytes, kHugePageBytes);
  // The reservation is longer than the mapping, so that it contains an aligned start.
  const size_t reserved_bytes = mapped_bytes + alignment;
  if (size_bytes < kHugePageBytes || reserved_bytes < size_bytes) {
    return MapUnaligned(descriptor, size_bytes, protection);
  }
  void* const reserved =
      mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(reserved);
  const size_t misaligned_bytes = reinterpret_cast<uintptr_t>(begin) % alignment;
  std::byte* const data = begin + (alignment - misaligned_bytes) % alignment;
  if (mmap(data, size_bytes, protection, MAP_SHARED | MAP_FIXED, descriptor, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(reserved, reserved_bytes);
    errno = error;
    return nullptr;
  }
  std::byte* const end = data + mapped_bytes;
  if (data > begin) munmap(begin, static_cast<size_t>(data - begin));
  if (end < begin + reserved_bytes) munmap(end, static_cast<size_t>(begin + reserved_bytes - end));
  return data;
}

void UnmapMemory(std::byte* data, size_t size_bytes) {
  // The kernel unmaps whole pages only, and those of hugetlbfs have one of two sizes.
  constexpr size_t kLargestPageBytes = size_t{1} << 30;
  for (const size_t page_bytes : {SmallPageBytes(), kHugePageBytes, kLargestPageBytes}) {
    if (munmap(data, RoundUp(size_bytes, page_bytes)) == 0 || errno != EINVAL) return;
  }
}

Population PopulatePages(std::span<std::byte> memory) {
  const bool huge = CollapsePages(HugePart(memory));
  return {.present = FaultIn(memory), .huge = huge};
}

void PopulateForReading(std::span<const std::byte> memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  const size_t before_bytes = address % SmallPageBytes();
  void* const begin = const_cast<std::byte*>(memory.data() - before_bytes);
  const int saved_errno = errno;
  static_cast<void>(madvise(begin, before_bytes + memory.size(), MADV_POPULATE_READ));
  errno = saved_errno;
}

size_t AdviseHugePages(int descriptor, std::span<std::byte> memory) {
  const size_t page_bytes = PageBytesOf(descriptor);
  if (page_bytes > SmallPageBytes()) return page_bytes;
  const bool huge = SharedHugePages() && madvise(memory.data(), memory.size(), MADV_HUGEPAGE) == 0;
  return huge ? kHugePageBytes : SmallPageBytes();
}

}  // namespace pqcached::kvstore
