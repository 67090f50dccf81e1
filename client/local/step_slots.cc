#include "client/local/step_slots.h"

#include <utility>

namespace pqcached::client {
namespace {

constexpr uint64_t kRangeAlignment = 128;

uint64_t AlignRange(uint64_t bytes) {
  return (bytes + kRangeAlignment - 1) / kRangeAlignment * kRangeAlignment;
}

}  // namespace

StepSlots::Range& StepSlots::Range::operator=(Range&& other) noexcept {
  if (this == &other) return *this;
  Return();
  owner_ = std::exchange(other.owner_, nullptr);
  held_ = other.held_;
  offset_bytes_ = other.offset_bytes_;
  bytes_ = std::exchange(other.bytes_, {});
  may_be_read_ = std::exchange(other.may_be_read_, false);
  return *this;
}

bool StepSlots::Range::IsUsable() const {
  if (!owner_) return false;
  const base::MutexLock lock(&owner_->mutex_);
  return owner_->held_[held_].slot.IsUsable();
}

StagingPlace StepSlots::Range::Place(uint64_t offset_bytes, uint64_t size_bytes) const {
  const base::MutexLock lock(&owner_->mutex_);
  return owner_->held_[held_].slot.Place(offset_bytes_ + offset_bytes, size_bytes);
}

void StepSlots::Range::SetMayBeRead(bool may_be_read) {
  if (!owner_ || may_be_read == may_be_read_) return;
  const base::MutexLock lock(&owner_->mutex_);
  owner_->held_[held_].may_be_read_count += may_be_read ? 1u : ~0u;
  may_be_read_ = may_be_read;
}

void StepSlots::Range::Return() {
  if (!owner_) return;
  const base::MutexLock lock(&owner_->mutex_);
  Held& held = owner_->held_[held_];
  owner_ = nullptr;
  if (--held.range_count > 0) return;
  if (held.may_be_read_count > 0) held.slot.Abandon();
  held = Held{};
}

bool StepSlots::Held::HasRoom(uint64_t bytes) const {
  return slot.IsUsable() && may_be_read_count == 0 && bytes <= slot.bytes().size() - taken_bytes;
}

uint64_t StepSlots::max_bytes() const {
  return staging_ ? staging_->slot_bytes() - kRangeAlignment : 0;
}

StepSlots::Range StepSlots::Take(uint64_t bytes) {
  if (bytes > max_bytes()) return {};
  const base::MutexLock lock(&mutex_);
  for (size_t i = 0; i < held_.size(); ++i) {
    if (held_[i].HasRoom(AlignRange(bytes))) return TakeLocked(i, bytes);
  }
  for (size_t i = 0; i < held_.size(); ++i) {
    if (held_[i].slot.valid()) continue;
    staging_->TryTake(&held_[i].slot);
    return held_[i].slot.valid() ? TakeLocked(i, bytes) : Range();
  }
  return {};
}

StepSlots::Range StepSlots::TakeLocked(size_t held, uint64_t bytes) {
  Held& from = held_[held];
  Range range;
  range.owner_ = this;
  range.held_ = held;
  range.offset_bytes_ = from.taken_bytes;
  range.bytes_ = from.slot.bytes().subspan(from.taken_bytes, bytes);
  from.taken_bytes += AlignRange(bytes);
  ++from.range_count;
  return range;
}

void StepSlots::Use() {
  const base::MutexLock lock(&mutex_);
  for (Held& held : held_) {
    if (held.slot.valid()) held.slot.Use();
  }
}

}  // namespace pqcached::client
