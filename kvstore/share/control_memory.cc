#include "kvstore/share/control_memory.h"
#include "kernels/base/status_macros.h"

#include <linux/futex.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <limits>
#include <new>
#include <utility>

namespace pqcached::kvstore {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kWordsOffsetBytes = kPageBytes + kMaxStagingSlots * sizeof(std::atomic<uint64_t>);

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

// The page may be of another layout_version: a supervisor outlives the program of its workers. The
// fields that EndPage writes have the same offsets in every version.
bool EndControlMemory(int descriptor) {
  struct stat status = {};
  if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode) ||
      status.st_size < static_cast<off_t>(kPageBytes)) {
    return false;
  }
  auto copy = Duplicate(descriptor);
  if (!copy.ok()) return false;
  auto mapping = Mapping::Map(*copy, kPageBytes, Mapping::Access::kReadWrite);
  if (!mapping.ok()) return false;
  auto& page = *reinterpret_cast<ControlPage*>(mapping->data());
  if (page.magic != ControlPage::kMagic) return false;
  EndPage(page);
  return true;
}

}  // namespace pqcached::kvstore
