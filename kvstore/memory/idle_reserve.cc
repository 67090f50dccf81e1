#include "kvstore/memory/idle_reserve.h"

#include <algorithm>
#include <utility>

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kLateIntervals = 2;

}  // namespace

IdleReserve::Part::Part(std::shared_ptr<IdleReserve> reserve, size_t most_bytes)
    : reserve_(std::move(reserve)), most_bytes_(most_bytes) {
  const MutexLock lock(&reserve_->mutex_);
  reserve_->parts_.push_back(this);
  ++reserve_->used_lately_;
  last_use_ = ++reserve_->uses_;
  reserve_->last_used_ = this;
}

IdleReserve::Part::~Part() {
  const MutexLock lock(&reserve_->mutex_);
  std::vector<Part*>& parts = reserve_->parts_;
  parts.erase(std::find(parts.begin(), parts.end(), this));
  if (unused_intervals_ < kLateIntervals) --reserve_->used_lately_;
  if (reserve_->last_used_ != this) return;
  const auto last = std::max_element(parts.begin(), parts.end(), [](const Part* a, const Part* b) {
    return a->last_use_ < b->last_use_;
  });
  reserve_->last_used_ = last == parts.end() ? nullptr : *last;
}

size_t IdleReserve::Part::size_bytes() const {
  const MutexLock lock(&reserve_->mutex_);
  return SizeLocked();
}

size_t IdleReserve::Part::SizeLocked() const {
  size_t bytes = 0;
  if (unused_intervals_ < kLateIntervals) {
    bytes = reserve_->size_bytes_ / reserve_->used_lately_;
  } else if (reserve_->used_lately_ == 0 && reserve_->last_used_ == this) {
    bytes = reserve_->size_bytes_;
  }
  return std::min(bytes, most_bytes_);
}

size_t IdleReserve::Part::Use() {
  const MutexLock lock(&reserve_->mutex_);
  if (unused_intervals_ >= kLateIntervals) ++reserve_->used_lately_;
  unused_intervals_ = 0;
  last_use_ = ++reserve_->uses_;
  reserve_->last_used_ = this;
  return SizeLocked();
}

size_t IdleReserve::Part::EndInterval() {
  const MutexLock lock(&reserve_->mutex_);
  const size_t bytes = SizeLocked();
  if (unused_intervals_ < kLateIntervals && ++unused_intervals_ == kLateIntervals) {
    --reserve_->used_lately_;
  }
  return bytes;
}

}  // namespace pqcached::kvstore
