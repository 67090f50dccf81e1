#include "kvstore/share/control_memory.h"
#include "kernels/base/status_macros.h"

#include <linux/futex.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "kvstore/memory/durable_store.h"

namespace pqcached::kvstore {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kWordsOffsetBytes = kPageBytes + kMaxStagingSlots * sizeof(std::atomic<uint64_t>);

// The list of NotePool. A page without its magic is of a program that kept no list.
struct PoolList {
  static constexpr uint64_t kMagic = 0x5453'494c'4c4f'4f50;  // "POOLLIST"
  static constexpr size_t kOffsetBytes = kPageBytes / 2;
  static constexpr size_t kMost = (kPageBytes - kOffsetBytes) / sizeof(uint64_t) - 2;
  std::atomic<uint64_t> magic;
  std::atomic<uint64_t> count;             // above kMost: the list was too short
  std::atomic<uint64_t> cache_ids[kMost];  // 0: removed
};
static_assert(sizeof(ControlPage) <= WorkerEnd::kOffsetBytes &&
              WorkerEnd::kOffsetBytes + sizeof(WorkerEnd) <= PoolList::kOffsetBytes &&
              sizeof(PoolList) == kPageBytes - PoolList::kOffsetBytes);

PoolList& ListOf(const Mapping& mapping) {
  return *reinterpret_cast<PoolList*>(mapping.data() + PoolList::kOffsetBytes);
}

WorkerEnd& EndOf(const Mapping& mapping) {
  return *reinterpret_cast<WorkerEnd*>(mapping.data() + WorkerEnd::kOffsetBytes);
}

// Returns whether the list names the cache.
bool Lists(const PoolList& list, uint64_t cache_id) {
  const size_t count = list.count.load(std::memory_order_relaxed);
  for (size_t i = 0; i < std::min(count, PoolList::kMost); ++i) {
    if (list.cache_ids[i].load(std::memory_order_relaxed) == cache_id) return true;
  }
  return false;
}

// Maps the first page of control memory that another process may have made; empty when it is none.
Mapping MapFirstPage(int descriptor) {
  struct stat status = {};
  if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode) ||
      status.st_size < static_cast<off_t>(kPageBytes)) {
    return {};
  }
  auto copy = Duplicate(descriptor);
  if (!copy.ok()) return {};
  auto mapping = Mapping::Map(*copy, kPageBytes, Mapping::Access::kReadWrite);
  if (!mapping.ok()) return {};
  if (reinterpret_cast<const ControlPage*>(mapping->data())->magic != ControlPage::kMagic) {
    return {};
  }
  return *std::move(mapping);
}

void WakeWaiters(ControlPage& page) {
  page.wake_word.fetch_add(1, std::memory_order_release);
  // The futex is not private because waiters are in other processes.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&page.wake_word), FUTEX_WAKE,
          std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

void EndPage(ControlPage& page) {
  if (page.boot_word.exchange(0, std::memory_order_acq_rel) != 0) WakeWaiters(page);
}

using Allocated = std::pair<FileDescriptor, Mapping>;

// Without a keeper the memory is sealed against writers other than this mapping.
absl::StatusOr<Allocated> Allocate(size_t size_bytes, DescriptorKeeper* keeper, bool in_memfd) {
  constexpr char kName[] = "pqcached-control";
  ASSIGN_OR_RETURN(auto memory, in_memfd ? CreateMemfd(kName, size_bytes)
                                         : keeper->CreateMemory(kName, size_bytes));
  ASSIGN_OR_RETURN(auto mapping, Mapping::Map(memory, size_bytes, Mapping::Access::kReadWrite));
  if (in_memfd) {
    RETURN_IF_ERROR(
        SealMemfd(memory, keeper == nullptr ? WriteSeal::kFutureWrite : WriteSeal::kNone));
  }
  RETURN_IF_ERROR(AllocatePages({mapping.data(), mapping.size_bytes()}, kName));
  return Allocated(std::move(memory), std::move(mapping));
}

}  // namespace

size_t ControlMemory::SizeBytes(uint32_t word_count) {
  return kWordsOffsetBytes + size_t{word_count} * sizeof(LeaseWords);
}

absl::StatusOr<std::unique_ptr<ControlMemory>> ControlMemory::Create(uint32_t word_count,
                                                                     uint64_t boot_word,
                                                                     DescriptorKeeper* keeper) {
  const size_t size_bytes = SizeBytes(word_count);
  absl::StatusOr<Allocated> memory = Allocate(size_bytes, keeper, /*in_memfd=*/keeper == nullptr);
  if (keeper != nullptr && absl::IsResourceExhausted(memory.status())) {
    memory = Allocate(size_bytes, keeper, /*in_memfd=*/true);
  }
  if (!memory.ok()) return memory.status();
  auto& [memfd, mapping] = *memory;
  // New memory is zero, the initial value of all slot words and lease words.
  auto* page = new (mapping.data()) ControlPage;
  page->word_count = word_count;
  page->words_offset_bytes = kWordsOffsetBytes;
  page->slot_word_count = kMaxStagingSlots;
  page->slot_words_offset_bytes = kPageBytes;
  ListOf(mapping).magic.store(PoolList::kMagic, std::memory_order_relaxed);
  page->boot_word.store(boot_word, std::memory_order_release);
  return std::unique_ptr<ControlMemory>(new ControlMemory(std::move(memfd), std::move(mapping)));
}

ControlMemory::~ControlMemory() { End(); }

absl::StatusOr<SharedMemory> ControlMemory::Share() const {
  ASSIGN_OR_RETURN(auto descriptor, OpenReadOnly(memfd_.get()));
  return SharedMemory{.descriptor = std::move(descriptor), .size_bytes = mapping_.size_bytes()};
}

void ControlMemory::Wake() const { WakeWaiters(page()); }

void ControlMemory::End() const { EndPage(page()); }

void ControlMemory::NotePool(uint64_t cache_id) const {
  PoolList& list = ListOf(mapping_);
  if (Lists(list, cache_id)) return;
  const uint64_t count = list.count.load(std::memory_order_relaxed);
  if (count < PoolList::kMost) StoreInOrder(list.cache_ids[count], cache_id);
  if (count <= PoolList::kMost) StoreInOrder(list.count, count + 1);
  DurableFence();
}

// The page may be of another layout_version: a supervisor outlives the program of its workers. The
// fields that EndPage writes have the same offsets in every version.
bool EndControlMemory(int descriptor) {
  const Mapping mapping = MapFirstPage(descriptor);
  if (mapping.data() == nullptr) return false;
  auto& page = *reinterpret_cast<ControlPage*>(mapping.data());
  const uint64_t boot_word = page.boot_word.load(std::memory_order_acquire);
  if (boot_word != 0) EndOf(mapping).boot_word.store(boot_word, std::memory_order_release);
  EndPage(page);
  return true;
}

void MarkSuccessor(int descriptor) {
  const Mapping mapping = MapFirstPage(descriptor);
  if (mapping.data() == nullptr) return;
  EndOf(mapping).has_successor.store(1, std::memory_order_seq_cst);
}

OpenedPools OpenedPoolsOf(int descriptor) {
  const Mapping mapping = MapFirstPage(descriptor);
  if (mapping.data() == nullptr) return {};
  const PoolList& list = ListOf(mapping);
  const uint64_t count = list.count.load(std::memory_order_acquire);
  if (list.magic.load(std::memory_order_relaxed) != PoolList::kMagic || count > PoolList::kMost) {
    return {};
  }
  OpenedPools pools{.any = false, .cache_ids = {}};
  for (size_t i = 0; i < count; ++i) {
    pools.cache_ids.insert(list.cache_ids[i].load(std::memory_order_relaxed));
  }
  return pools;
}

void ForgetOpenedPool(int descriptor, uint64_t cache_id) {
  const Mapping mapping = MapFirstPage(descriptor);
  if (mapping.data() == nullptr) return;
  PoolList& list = ListOf(mapping);
  const size_t count = list.count.load(std::memory_order_relaxed);
  for (size_t i = 0; i < std::min(count, PoolList::kMost); ++i) {
    if (list.cache_ids[i].load(std::memory_order_relaxed) == cache_id) {
      StoreInOrder(list.cache_ids[i], 0);
    }
  }
}

}  // namespace pqcached::kvstore
