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

}  // namespace

absl::StatusOr<std::unique_ptr<ControlMemory>> ControlMemory::Create(uint32_t word_count,
                                                                     uint64_t boot_word,
                                                                     DescriptorKeeper* keeper) {
  const size_t size_bytes = kWordsOffsetBytes + size_t{word_count} * sizeof(LeaseWords);
  ASSIGN_OR_RETURN(auto memfd, keeper == nullptr
                                   ? CreateMemfd("pqcached-control", size_bytes)
                                   : keeper->CreateMemory("pqcached-control", size_bytes));
  ASSIGN_OR_RETURN(auto mapping, Mapping::Map(memfd, size_bytes, Mapping::Access::kReadWrite));
  if (keeper == nullptr) {
    RETURN_IF_ERROR(SealMemfd(memfd, WriteSeal::kFutureWrite));
  }
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
