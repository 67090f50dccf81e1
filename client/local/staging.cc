#include "client/local/staging.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "client/base/error.h"
#include "client/base/pack.h"
#include "client/local/session.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"
#include "kvstore/read/pages.h"

namespace pqcached::client {
namespace {

// A waiting thread checks the abandoned slots at this interval: their completion wakes no waiter.
constexpr std::chrono::milliseconds kPollInterval(20);

}  // namespace

Staging::Staging(LocalSession& session, uint64_t slot_bytes, uint32_t slot_count)
    : session_(session),
      slot_bytes_(slot_bytes ? slot_bytes : kDefaultSlotBytes),
      slot_count_(slot_count ? slot_count : kDefaultSlotCount) {}

pqc_status Staging::OpenLocked(const std::shared_ptr<LocalLink>& link) {
  if (ring_ && ring_->link == link) return PQC_OK;
  ring_.reset();
  auto ring = std::make_shared<Ring>(Ring{.link = link, .memory = {}});
  RETURN_IF_ERROR(link->host().OpenStaging(slot_bytes_, slot_count_, &ring->memory));
  ring_ = std::move(ring);
  free_.resize(slot_count_);
  std::iota(free_.rbegin(), free_.rend(), 0);
  generations_.assign(slot_count_, 1);
  touched_.assign(slot_count_, false);
  abandoned_.clear();
  abandoned_.reserve(slot_count_);  // Abandon must not fail, so it must not allocate
  lost_count_ = 0;
  return PQC_OK;
}

pqc_status Staging::Open() {
  const std::shared_ptr<LocalLink> link = session_.link();
  if (!link->IsValid())
    return SetRetry(kRetryMemory,
                    Fail(PQC_UNAVAILABLE, "", "staging: the sidecar's worker has ended"));
  const base::MutexLock lock(&mutex_);
  return OpenLocked(link);
}

void Staging::DropRing() {
  {
    const base::MutexLock lock(&mutex_);
    if (ring_ && ring_->link->IsValid()) return;
    ring_.reset();
    free_.clear();
  }
  returned_.SignalAll();
}

uint64_t Staging::boot_word() const { return session_.link()->boot_word(); }

std::vector<StagingPlace> Staging::Abandoned() {
  const base::MutexLock lock(&mutex_);
  std::vector<StagingPlace> places;
  if (!ring_ || !ring_->link->has_slot_words(slot_count_)) return places;
  ReclaimLocked();
  for (const uint32_t slot : abandoned_) {
    places.push_back({.slot = slot,
                      .offset_bytes = 0,
                      .size_bytes = 0,
                      .generation = generations_[slot]++,
                      .boot_word = ring_->link->boot_word()});
  }
  return places;
}

Staging::Slot Staging::TakeLocked() {
  Slot taken;
  taken.owner_ = this;
  taken.ring_ = ring_;
  taken.number_ = free_.back();
  taken.generation_ = generations_[taken.number_];
  taken.bytes_ = {ring_->memory->data() + taken.number_ * slot_bytes_, slot_bytes_};
  free_.pop_back();
  return taken;
}

void Staging::ReclaimLocked() {
  std::erase_if(abandoned_, [this](uint32_t slot) PQCACHED_REQUIRES(mutex_) {
    const bool done = ring_->link->SlotGeneration(slot) >= generations_[slot];
    if (done) free_.push_back(slot);
    return done;
  });
}

pqc_status Staging::Take(std::chrono::steady_clock::time_point deadline, Slot* slot) {
  for (;;) {
    std::shared_ptr<LocalLink> link;  // before the lock, because it may take long
    RETURN_IF_ERROR(session_.Attached(&link));
    const base::MutexLock lock(&mutex_);
    if (const pqc_status status = OpenLocked(link); status != PQC_OK) {
      if (link->CheckAlive()) return status;
      continue;  // a consequence of the worker's end
    }
    const auto other_ring = [&]()
                                PQCACHED_REQUIRES(mutex_) { return !ring_ || ring_->link != link; };
    ReclaimLocked();
    const auto now = std::chrono::steady_clock::now();
    const auto look = abandoned_.empty() ? deadline : std::min(deadline, now + kPollInterval);
    ++waiting_count_;
    const bool woken = returned_.WaitUntil(&mutex_, look, [&]() PQCACHED_REQUIRES(mutex_) {
      return other_ring() || !free_.empty() || abandoned_.size() + lost_count_ == slot_count_;
    });
    --waiting_count_;
    if (!woken && look < deadline) continue;  // abandoned slots may be done by now
    if (!woken) {
      return Fail(PQC_DEADLINE_EXCEEDED, "", "staging: all %u slots are in flight", slot_count_);
    }
    if (other_ring()) continue;
    if (free_.empty()) {
      return Fail(PQC_RESOURCE_EXHAUSTED, "",
                  "staging: all %u slots belong to calls without an answer", slot_count_);
    }
    *slot = TakeLocked();
    return PQC_OK;
  }
}

void Staging::TryTake(Slot* slot, uint32_t left) {
  const base::MutexLock lock(&mutex_);
  if (!ring_ || !ring_->link->IsValid()) return;
  ReclaimLocked();
  if (free_.size() < std::min(slot_count_, waiting_count_ + left + 1)) return;
  *slot = TakeLocked();
}

void Staging::Slot::Touch() {
  {
    const base::MutexLock lock(&owner_->mutex_);
    if (owner_->ring_ != ring_ || owner_->touched_[number_]) return;
    owner_->touched_[number_] = true;
  }
  kvstore::PopulatePages(bytes_);
}

Staging::Slot& Staging::Slot::operator=(Slot&& other) noexcept {
  if (this == &other) return *this;
  Return();
  owner_ = std::exchange(other.owner_, nullptr);
  ring_ = std::move(other.ring_);
  bytes_ = other.bytes_;
  number_ = other.number_;
  generation_ = other.generation_;
  return *this;
}

void Staging::Slot::Use() {
  const base::MutexLock lock(&owner_->mutex_);
  ++generation_;
  if (owner_->ring_ == ring_) owner_->generations_[number_] = generation_;
}

template <class Dispose>
void Staging::Slot::EndOwnership(const Dispose& dispose) {
  {
    const base::MutexLock lock(&owner_->mutex_);
    if (owner_->ring_ == ring_) dispose(*owner_);
  }
  owner_->returned_.SignalAll();
  owner_ = nullptr;
  ring_.reset();
}

void Staging::Slot::Abandon() {
  EndOwnership([this](Staging& owner) {
    owner.mutex_.AssertHeld();
    owner.abandoned_.push_back(number_);
  });
}

void Staging::Slot::Lose() {
  EndOwnership([](Staging& owner) {
    owner.mutex_.AssertHeld();
    ++owner.lost_count_;
  });
}

void Staging::Slot::Return() {
  if (!owner_) return;
  EndOwnership([this](Staging& owner) {
    owner.mutex_.AssertHeld();
    owner.free_.push_back(number_);
  });
}

void PackStreaming(const TensorView& tensor, uint64_t begin, uint64_t end,
                   std::span<std::byte> to) {
  if (!IsPacked(tensor, 1)) {
    Pack(tensor, begin, end, to.data());
    return;
  }
  const uint64_t index_bytes = BytesPerIndex(tensor);
  const int64_t stride =
      tensor.strides[0] * static_cast<int64_t>(kernels::DTypeBytes(tensor.dtype));
  while (begin < end) {
    const PackRun run = RunAt(tensor, begin, end);
    kernels::StreamRows(kernels::Exec{}, {.rows = run.data,
                                          .row_stride_bytes = stride,
                                          .row_bytes = index_bytes,
                                          .row_count = run.count,
                                          .target = to.first(run.count * index_bytes)});
    to = to.subspan(run.count * index_bytes);
    begin += run.count;
  }
}

}  // namespace pqcached::client
