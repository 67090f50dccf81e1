#include "client/local/link.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "client/base/error.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

using kvstore::ControlPage;
using kvstore::LeaseWords;

// A waiting thread checks at this interval that the worker lives: a killed sidecar wakes no waiter.
constexpr std::chrono::milliseconds kLongestSleep(50);

pqc_status CheckControl(const Mapping& control) {
  if (control.size_bytes() < sizeof(ControlPage)) {
    return Fail(PQC_INTERNAL, "", "control memory: %zu bytes", control.size_bytes());
  }
  const auto& page = *reinterpret_cast<const ControlPage*>(control.data());
  if (page.magic != ControlPage::kMagic) return Fail(PQC_INTERNAL, "", "control memory: magic");
  if (page.layout_version != kvstore::kLayoutVersion) {
    return Fail(PQC_FAILED_PRECONDITION, "",
                "control memory: layout_version is %u; this client reads %u", page.layout_version,
                kvstore::kLayoutVersion);
  }
  const uint64_t offset = page.words_offset_bytes;
  if (offset % alignof(LeaseWords) != 0 || offset > control.size_bytes() ||
      page.word_count > (control.size_bytes() - offset) / sizeof(LeaseWords)) {
    return Fail(PQC_INTERNAL, "", "control memory: words are beyond its end");
  }
  const uint64_t slot_words = page.slot_words_offset_bytes;
  if (slot_words % sizeof(uint64_t) != 0 || slot_words > control.size_bytes() ||
      page.slot_word_count > (control.size_bytes() - slot_words) / sizeof(uint64_t)) {
    return Fail(PQC_INTERNAL, "", "control memory: slot words are beyond its end");
  }
  return PQC_OK;
}

}  // namespace

LocalLink::LocalLink(Parts parts)
    : host_(std::move(parts.host)),
      control_(std::move(parts.control)),
      boot_word_(parts.boot_word) {}

pqc_status LocalLink::Make(Parts parts, std::shared_ptr<LocalLink>* link) {
  RETURN_IF_ERROR(CheckControl(*parts.control));
  std::shared_ptr<LocalLink> made(new LocalLink(std::move(parts)));
  if (!made->CheckAlive())
    return SetRetry(kRetryMemory,
                    Fail(PQC_UNAVAILABLE, "", "the sidecar's worker has already ended"));
  *link = std::move(made);
  return PQC_OK;
}

bool LocalLink::CheckAlive() const { return WaitWhileAlive(0); }

bool LocalLink::WaitWhileAlive(uint32_t wait_ms) const {
  if (!IsValid()) return false;
  if (host_->WaitEnded(wait_ms)) ended_.store(true, std::memory_order_release);
  return IsValid();
}

const kvstore::WorkerEnd* LocalLink::worker_end() const {
  using kvstore::WorkerEnd;
  if (control_->size_bytes() < WorkerEnd::kOffsetBytes + sizeof(WorkerEnd)) return nullptr;
  return reinterpret_cast<const WorkerEnd*>(control_->data() + WorkerEnd::kOffsetBytes);
}

LocalLink::Memory LocalLink::CheckMemory() const {
  if (CheckAlive()) return Memory::kServed;
  // The order matters: the memory was read before this system call, the words are read after it.
  const bool is_held = host_->HoldsConnection();
  const kvstore::WorkerEnd* const end = worker_end();
  if (!end || end->boot_word.load(std::memory_order_acquire) != boot_word_) return Memory::kGone;
  const bool succeeded = end->has_successor.load(std::memory_order_acquire) != 0;
  if (!is_held) return Memory::kGone;
  return succeeded ? Memory::kSucceeded : Memory::kKept;
}

pqc_status LocalLink::Pool(uint64_t cache_id, std::shared_ptr<Mapping>* pool) {
  const base::MutexLock lock(&mutex_);
  std::shared_ptr<Mapping>& mapped = pools_[cache_id];
  if (!mapped) {
    RETURN_IF_ERROR(host_->OpenPool(cache_id, &mapped));
    mapped_bytes_ += mapped->size_bytes();
    mapped->SetHold([this, cache_id] { return HoldPool(cache_id); });  // the link owns the mapping
  }
  *pool = std::shared_ptr<Mapping>(shared_from_this(), mapped.get());
  return PQC_OK;
}

pqc_status LocalLink::HoldPool(uint64_t cache_id) {
  if (!IsValid()) {
    return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "the sidecar's worker has ended"));
  }
  {
    const base::MutexLock lock(&mutex_);
    if (const auto held = holds_.find(cache_id); held != holds_.end()) return held->second;
  }
  const pqc_status status = host_->HoldPool(cache_id);
  if (status != PQC_OK && status != PQC_UNIMPLEMENTED) return status;
  const base::MutexLock lock(&mutex_);
  return holds_[cache_id] = status;
}

pqc_status LocalLink::Words(uint32_t index, const LeaseWords** words) const {
  if (index >= page().word_count) {
    return Fail(PQC_INTERNAL, "", "lease: word_index is %u; there are %u", index,
                page().word_count);
  }
  *words =
      reinterpret_cast<const LeaseWords*>(control_->data() + page().words_offset_bytes) + index;
  return PQC_OK;
}

uint64_t LocalLink::SlotGeneration(uint32_t slot) const {
  if (slot >= page().slot_word_count) return 0;
  const auto* words = reinterpret_cast<const std::atomic<uint64_t>*>(
      control_->data() + page().slot_words_offset_bytes);
  return words[slot].load(std::memory_order_acquire);
}

void LocalLink::Wait(uint32_t seen, LocalClock::time_point deadline) const {
  const auto left = std::min<LocalClock::duration>(deadline - LocalClock::now(), kLongestSleep);
  if (left <= LocalClock::duration::zero()) return;
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
  const timespec timeout{.tv_sec = static_cast<time_t>(nanoseconds / 1000000000),
                         .tv_nsec = static_cast<long>(nanoseconds % 1000000000)};
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&page().wake_word), FUTEX_WAIT, seen,
          &timeout, nullptr, 0);
}

}  // namespace pqcached::client
