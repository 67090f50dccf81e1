#include "kvstore/pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace pqcached::kvstore {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kTouchBytes =
    size_t{16} << 20;  // per step of a toucher: 40 ms at 0.4 GB/s, so that it stops soon

uint32_t OrderFor(size_t size_bytes) {
  const size_t units = std::max<size_t>(1, (size_bytes + kMinExtentBytes - 1) >> kExtentUnitShift);
  return static_cast<uint32_t>(std::bit_width(units - 1));
}

// Whether the kernel backs shared memory with huge pages when asked to.
bool SharedHugePages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string line;
  std::getline(file, line);
  return line.find("[advise]") != std::string::npos || line.find("[always]") != std::string::npos ||
         line.find("[force]") != std::string::npos;
}

absl::Status SystemError(absl::string_view what, size_t capacity_bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " of a pool of ", capacity_bytes, " bytes: ", std::strerror(errno)));
}

// Maps the memory at an address that huge pages can back; null when refused.
std::byte* MapAligned(int descriptor, size_t capacity_bytes) {
  const size_t reserved_bytes = capacity_bytes + kHugePageBytes;
  void* reserved =
      mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(reserved);
  const size_t misaligned = reinterpret_cast<uintptr_t>(begin) % kHugePageBytes;
  std::byte* base = begin + (misaligned == 0 ? 0 : kHugePageBytes - misaligned);
  std::byte* end = base + capacity_bytes;
  if (mmap(base, capacity_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0) ==
      MAP_FAILED) {
    munmap(reserved, reserved_bytes);
    return nullptr;
  }
  if (base > begin) munmap(begin, static_cast<size_t>(base - begin));
  const auto behind_bytes = static_cast<size_t>(begin + reserved_bytes - end);
  if (behind_bytes > 0) munmap(end, behind_bytes);
  return base;
}

// Makes the pages present without a change of their bytes.
void TouchPages(std::byte* begin, size_t size_bytes, size_t page_bytes) {
  if (madvise(begin, size_bytes, MADV_POPULATE_WRITE) == 0) return;
  for (size_t offset = 0; offset < size_bytes; offset += page_bytes) {
    // Atomic, because a writer may be at work in the same page.
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(begin + offset), 0, __ATOMIC_RELAXED);
  }
}

size_t ReadNumber(const std::string& path) {
  std::ifstream file(path);
  size_t value = std::numeric_limits<size_t>::max();
  if (!(file >> value)) return std::numeric_limits<size_t>::max();  // "max", or no such file
  return value;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Pool>> Pool::Create(const Options& options) {
  constexpr size_t kMaxCapacityBytes = kMinExtentBytes << kMaxExtentOrder;
  if (options.capacity_bytes == 0 || options.capacity_bytes > kMaxCapacityBytes) {
    return absl::InvalidArgumentError(absl::StrCat("capacity_bytes is ", options.capacity_bytes,
                                                   "; it must lie in [1, ", kMaxCapacityBytes,
                                                   "]"));
  }
  const size_t capacity_bytes =
      (options.capacity_bytes + kMinExtentBytes - 1) / kMinExtentBytes * kMinExtentBytes;
  absl::StatusOr<FileDescriptor> memfd = CreateMemfd("pqcached-pool", capacity_bytes);
  if (!memfd.ok()) return memfd.status();
  std::byte* base = MapAligned(memfd->get(), capacity_bytes);
  if (base == nullptr) return SystemError("mapping", capacity_bytes);
  const absl::Status sealed =
      SealMemfd(*memfd, options.strict ? LaterWriters::kNever : LaterWriters::kAllowed);
  if (!sealed.ok()) {
    munmap(base, capacity_bytes);
    return sealed;
  }
  const bool huge = SharedHugePages() && madvise(base, capacity_bytes, MADV_HUGEPAGE) == 0;
  const size_t page_bytes = huge ? kHugePageBytes : static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::shared_ptr<Pool> pool(new Pool(*std::move(memfd), base, capacity_bytes, page_bytes));
  pool->StartTouching(options.touch_threads);
  return pool;
}

Pool::Pool(FileDescriptor memfd, std::byte* base, size_t capacity_bytes, size_t page_bytes)
    : memfd_(std::move(memfd)),
      base_(base),
      capacity_bytes_(capacity_bytes),
      page_bytes_(page_bytes),
      buddy_(static_cast<uint32_t>(capacity_bytes >> kExtentUnitShift)) {}

Pool::~Pool() {
  stop_touching_.store(true, std::memory_order_relaxed);
  for (std::thread& toucher : touchers_) toucher.join();
  munmap(base_, capacity_bytes_);
}

absl::StatusOr<SharedMemory> Pool::Share() const {
  auto descriptor = OpenReadOnly(memfd_.get());
  if (!descriptor.ok()) return descriptor.status();
  return SharedMemory{.descriptor = *std::move(descriptor), .size_bytes = capacity_bytes_};
}

void Pool::StartTouching(uint32_t thread_count) {
  for (uint32_t i = 0; i < thread_count; ++i) {
    touchers_.emplace_back([this] {
      while (!stop_touching_.load(std::memory_order_relaxed)) {
        const size_t begin = next_touch_bytes_.fetch_add(kTouchBytes, std::memory_order_relaxed);
        if (begin >= capacity_bytes_) return;
        TouchPages(base_ + begin, std::min(kTouchBytes, capacity_bytes_ - begin), page_bytes_);
      }
    });
  }
}

size_t Pool::untouched_bytes() const {
  return capacity_bytes_ -
         std::min(capacity_bytes_, next_touch_bytes_.load(std::memory_order_relaxed));
}

absl::StatusOr<std::vector<Extent>> Pool::Allocate(std::span<const size_t> sizes_bytes) {
  std::vector<ExtentRef> refs;
  refs.reserve(sizes_bytes.size());
  size_t wanted_bytes = 0;
  for (const size_t size_bytes : sizes_bytes) {
    refs.push_back(ExtentRef{.unit = 0, .order = OrderFor(size_bytes)});
    wanted_bytes += refs.back().size_bytes();
  }
  size_t shortfall_bytes = 0;
  {
    const MutexLock lock(&mutex_);
    const size_t free_bytes = static_cast<size_t>(buddy_.free_units()) << kExtentUnitShift;
    if (wanted_bytes > free_bytes) shortfall_bytes = wanted_bytes - free_bytes;
    for (size_t i = 0; shortfall_bytes == 0 && i < refs.size(); ++i) {
      const auto unit = buddy_.Allocate(refs[i].order);
      if (unit.has_value()) {
        refs[i].unit = *unit;
        continue;
      }
      shortfall_bytes = refs[i].size_bytes() -
                        (static_cast<size_t>(buddy_.largest_free_units()) << kExtentUnitShift);
      for (size_t j = 0; j < i; ++j) buddy_.Free(refs[j].unit, refs[j].order);
    }
  }
  if (shortfall_bytes > 0) {
    return absl::ResourceExhaustedError(absl::StrCat("pool of ", capacity_bytes_,
                                                     " bytes: ", wanted_bytes, " bytes wanted, ",
                                                     shortfall_bytes, " bytes short"));
  }
  std::vector<Extent> extents;
  extents.reserve(refs.size());
  for (const ExtentRef ref : refs) extents.emplace_back(shared_from_this(), ref);
  return extents;
}

void Pool::Free(ExtentRef extent) {
  const MutexLock lock(&mutex_);
  buddy_.Free(extent.unit, extent.order);
}

PoolUsage Pool::usage() const {
  const MutexLock lock(&mutex_);
  return PoolUsage{
      .capacity_bytes = capacity_bytes_,
      .used_bytes = static_cast<size_t>(buddy_.used_units()) << kExtentUnitShift,
      .free_bytes = static_cast<size_t>(buddy_.free_units()) << kExtentUnitShift,
      .largest_free_bytes = static_cast<size_t>(buddy_.largest_free_units()) << kExtentUnitShift,
  };
}

size_t AvailableMemoryBytes() {
  size_t available = std::numeric_limits<size_t>::max();
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    size_t kilobytes = 0;
    if (word == "MemAvailable:" && file >> kilobytes) available = kilobytes << 10;
  }
  const size_t limit = ReadNumber("/sys/fs/cgroup/memory.max");
  const size_t current = ReadNumber("/sys/fs/cgroup/memory.current");
  if (limit != std::numeric_limits<size_t>::max()) {
    available = std::min(available, limit > current ? limit - current : 0);
  }
  return available;
}

}  // namespace pqcached::kvstore
