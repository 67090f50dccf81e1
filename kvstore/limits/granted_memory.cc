#include "kvstore/limits/granted_memory.h"

#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kvstore/read/pages.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {

GrantedMemory::GrantedMemory(int descriptor, std::span<std::byte> memory, size_t chunk_bytes,
                             std::shared_ptr<MemoryPromise> promise)
    : descriptor_(descriptor),
      memory_(memory),
      chunk_bytes_(chunk_bytes),
      promise_(std::move(promise)),
      present_((memory.size() + chunk_bytes - 1) / chunk_bytes) {
  if (promise_ != nullptr) promise_->SetAllocated(memory_.size() - absent_bytes());
}

size_t GrantedMemory::EndOf(size_t chunk) const {
  return std::min(memory_.size(), (chunk + 1) * chunk_bytes_);
}

bool GrantedMemory::IsPresent(size_t first, size_t end) const {
  for (size_t chunk = first; chunk < end; ++chunk) {
    if (present_[chunk].load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

bool GrantedMemory::Populate(size_t first, size_t end) {
  const size_t begin = first * chunk_bytes_;
  const Population made = PopulatePages(memory_.subspan(begin, EndOf(end - 1) - begin));
  if (!made.huge) huge_.store(false, std::memory_order_relaxed);
  for (size_t chunk = first; made.present && chunk < end; ++chunk) {
    present_[chunk].store(1, std::memory_order_release);
  }
  return made.present;
}

absl::Status GrantedMemory::Ensure(size_t begin, size_t size_bytes) {
  if (size_bytes == 0) return absl::OkStatus();
  const size_t end = (begin + size_bytes + chunk_bytes_ - 1) / chunk_bytes_;
  size_t first = begin / chunk_bytes_;
  if (IsPresent(first, end)) return absl::OkStatus();
  const MutexLock lock(&mutex_);
  while (first < end && IsPresent(first, first + 1)) ++first;
  if (first == end) return absl::OkStatus();
  const auto populate = [&] { return Populate(first, end); };
  absl::Status status;
  if (promise_ != nullptr) {
    status = promise_->Allocate(EndOf(end - 1) - first * chunk_bytes_, populate);
    promise_->SetAllocated(memory_.size() - absent_bytes());
  } else if (!populate()) {
    status = ShortOf(Shortage::kMemory, "", "the kernel refuses memory", kRetryMemory);
  }
  return status;
}

void GrantedMemory::Remove(size_t begin, size_t size_bytes, absl::FunctionRef<void()> remove) {
  const MutexLock lock(&mutex_);
  const size_t end = (begin + size_bytes + chunk_bytes_ - 1) / chunk_bytes_;
  for (size_t chunk = begin / chunk_bytes_; chunk < end; ++chunk) {
    present_[chunk].store(0, std::memory_order_release);
  }
  remove();
  if (promise_ != nullptr) promise_->SetAllocated(memory_.size() - absent_bytes());
}

size_t GrantedMemory::present_bytes() const {
  size_t bytes = 0;
  for (size_t chunk = 0; chunk < present_.size(); ++chunk) {
    if (IsPresent(chunk, chunk + 1)) bytes += EndOf(chunk) - chunk * chunk_bytes_;
  }
  return bytes;
}

size_t GrantedMemory::absent_bytes() const {
  struct stat status = {};
  if (fstat(descriptor_, &status) != 0) return 0;
  constexpr size_t kBlockBytes = 512;  // unit of st_blocks on every file system
  return memory_.size() -
         std::min(memory_.size(), static_cast<size_t>(status.st_blocks) * kBlockBytes);
}

}  // namespace pqcached::kvstore
