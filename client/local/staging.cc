#include "client/local/staging.h"

#include <array>
#include <numeric>
#include <utility>

#include "client/error.h"
#include "client/pack.h"
#include "kernels/gather.h"

namespace pqcached::client {

Staging::Staging(LocalHost& host, uint64_t slot_bytes, uint32_t slot_count)
    : host_(host),
      slot_bytes_(slot_bytes ? slot_bytes : kDefaultSlotBytes),
      slot_count_(slot_count ? slot_count : kDefaultSlotCount) {}

pqc_status Staging::OpenLocked() {
  if (ring_) return PQC_OK;
  if (const pqc_status status = host_.OpenStaging(slot_bytes_, slot_count_, &ring_);
      status != PQC_OK) {
    return status;
  }
  free_.resize(slot_count_);
  std::iota(free_.rbegin(), free_.rend(), 0);
  generations_.assign(slot_count_, 1);
  return PQC_OK;
}

pqc_status Staging::Take(std::chrono::steady_clock::time_point deadline, Slot* slot) {
  std::unique_lock lock(mutex_);
  if (const pqc_status status = OpenLocked(); status != PQC_OK) return status;
  if (!returned_.wait_until(lock, deadline, [this] { return !free_.empty(); })) {
    return Fail(PQC_DEADLINE_EXCEEDED, "staging: all %u slots are in flight", slot_count_);
  }
  Slot taken;
  taken.owner_ = this;
  taken.number_ = free_.back();
  taken.generation_ = generations_[taken.number_];
  taken.bytes_ = {ring_->data() + taken.number_ * slot_bytes_, slot_bytes_};
  free_.pop_back();
  *slot = std::move(taken);
  return PQC_OK;
}

Staging::Slot& Staging::Slot::operator=(Slot&& other) noexcept {
  if (this == &other) return *this;
  Return();
  owner_ = std::exchange(other.owner_, nullptr);
  bytes_ = other.bytes_;
  number_ = other.number_;
  generation_ = other.generation_;
  return *this;
}

void Staging::Slot::Use() {
  const std::lock_guard lock(owner_->mutex_);
  owner_->generations_[number_] = generation_ + 1;
}

void Staging::Slot::Return() {
  if (!owner_) return;
  {
    const std::lock_guard lock(owner_->mutex_);
    owner_->free_.push_back(number_);
  }
  owner_->returned_.notify_one();
  owner_ = nullptr;
}

void PackStreaming(const TensorView& tensor, uint64_t begin, uint64_t end,
                   std::span<std::byte> to) {
  constexpr uint32_t kStep = 4096;
  static constexpr auto kAscending = [] {
    std::array<uint32_t, kStep> numbers{};
    for (uint32_t i = 0; i < kStep; ++i) numbers[i] = i;
    return numbers;
  }();
  const uint64_t index_bytes = BytesPerIndex(tensor);
  const int64_t stride = tensor.strides[0] * static_cast<int64_t>(ElementBytes(tensor.dtype));
  if (!IsPacked(tensor, 1) || stride < static_cast<int64_t>(index_bytes)) {
    Pack(tensor, begin, end, to.data());
    return;
  }
  while (begin < end) {
    const PackRun run = RunAt(tensor, begin, std::min(end, begin + kStep));
    const auto count = static_cast<uint32_t>(run.count);
    const kernels::RowSpan span{.rows = run.data, .token_count = count, .first_position = 0};
    kernels::GatherRows(kernels::Exec{}, {.row_stride_bytes = static_cast<size_t>(stride),
                                          .part_begin_bytes = 0,
                                          .part_bytes = index_bytes,
                                          .spans = {&span, 1},
                                          .positions = {kAscending.data(), count},
                                          .target_stride_bytes = index_bytes,
                                          .target = to.subspan(0, count * index_bytes),
                                          .stores = kernels::GatherStores::kStreaming});
    to = to.subspan(count * index_bytes);
    begin += count;
  }
}

}  // namespace pqcached::client
