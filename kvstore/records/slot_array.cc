#include "kvstore/records/slot_array.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/base/crc32c.h"
#include "kvstore/memory/durable_store.h"

namespace pqcached::kvstore {
namespace {

constexpr uint64_t kFullTag = uint64_t{0x9cf137a5} << 32;

}  // namespace

struct SlotArray::Head {
  std::atomic<uint64_t> commit;  // 0 = empty
  uint64_t size_bytes;
};

size_t SlotArray::SlotBytes(size_t content_bytes) {
  return sizeof(Head) + (content_bytes + 7) / 8 * 8;
}

SlotArray::SlotArray(const kernels::Exec& exec, std::span<std::byte> memory, size_t slot_bytes,
                     uint32_t kind)
    : exec_(exec),
      begin_(memory.data()),
      slot_bytes_(slot_bytes),
      count_(static_cast<uint32_t>(
          std::min<size_t>(memory.size() / slot_bytes, std::numeric_limits<uint32_t>::max()))),
      kind_(kind) {}

size_t SlotArray::content_bytes() const { return slot_bytes_ - sizeof(Head); }

SlotArray::Head& SlotArray::HeadOf(uint32_t slot) const {
  PQC_CHECK(slot < count_);
  return *reinterpret_cast<Head*>(begin_ + size_t{slot} * slot_bytes_);
}

uint64_t SlotArray::CommitWord(uint32_t slot, size_t size_bytes) const {
  const Head& head = HeadOf(slot);
  const std::array<uint32_t, 2> place = {kind_, slot};
  const uint32_t seed = kernels::Crc32c(exec_, std::as_bytes(std::span(place)));
  const auto* begin = reinterpret_cast<const std::byte*>(&head.size_bytes);
  return kFullTag | kernels::Crc32c(exec_, {begin, sizeof(head.size_bytes) + size_bytes}, seed);
}

std::span<std::byte> SlotArray::Open(uint32_t slot) {
  Head& head = HeadOf(slot);
  StoreUnordered(head.commit, 0);
  DurableFence();  // stored before the bytes are written
  return {reinterpret_cast<std::byte*>(&head + 1), content_bytes()};
}

void SlotArray::Commit(uint32_t slot, size_t size_bytes) {
  Head& head = HeadOf(slot);
  PQC_CRASH_POINT();
  head.size_bytes = size_bytes;
  StoreInOrder(head.commit, CommitWord(slot, size_bytes));
}

void SlotArray::Put(uint32_t slot, std::span<const std::byte> content) {
  const std::span<std::byte> bytes = Open(slot);
  PQC_CHECK(content.size() <= bytes.size());
  PQC_CRASH_POINT();
  if (!content.empty()) std::memcpy(bytes.data(), content.data(), content.size());
  Commit(slot, content.size());
}

void SlotArray::Clear(uint32_t slot) { StoreInOrder(HeadOf(slot).commit, 0); }

SlotArray::Content SlotArray::Read(uint32_t slot) const {
  const Head& head = HeadOf(slot);
  const uint64_t commit = head.commit.load(std::memory_order_acquire);
  if (commit == 0) return {};
  if (head.size_bytes > content_bytes() || commit != CommitWord(slot, head.size_bytes)) {
    return {.state = State::kBroken, .bytes = {}};
  }
  return {.state = State::kFull,
          .bytes = {reinterpret_cast<const std::byte*>(&head + 1), head.size_bytes}};
}

std::optional<uint32_t> SlotNumbers::Take() {
  if (!free_.empty()) {
    const uint32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  if (end_ == count_) return std::nullopt;
  return end_++;
}

void DurableCounter::Reset(uint64_t number) {
  StoreInOrder(value, number);
  StoreInOrder(inverse, ~number);
}

void DurableCounter::RaiseTo(uint64_t number) {
  if (number > value.load(std::memory_order_relaxed)) Reset(number);
}

std::optional<uint64_t> DurableCounter::Read() const {
  // A process that is killed between the two stores of Reset leaves the new, larger number in
  // `value` and the old one in `inverse`.
  constexpr uint64_t kMostSteps = uint64_t{1} << 20;
  const uint64_t first = value.load(std::memory_order_acquire);
  const uint64_t second = ~inverse.load(std::memory_order_acquire);
  if (first < second || first - second > kMostSteps) return std::nullopt;
  return first;
}

std::optional<uint64_t> DurableCounter::ReadExact() const {
  const uint64_t number = value.load(std::memory_order_acquire);
  if (~inverse.load(std::memory_order_acquire) != number) return std::nullopt;
  return number;
}

}  // namespace pqcached::kvstore
