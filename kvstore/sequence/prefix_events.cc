#include "kvstore/sequence/prefix_events.h"

#include <algorithm>
#include <random>
#include <utility>

#include "kernels/base/check.h"

namespace pqcached::kvstore {
namespace {

uint64_t RandomEpoch() {
  std::random_device device;
  const uint64_t epoch = (uint64_t{device()} << 32) | device();
  return std::max<uint64_t>(epoch, 1);  // 0 is that of no position
}

}  // namespace

PrefixEvents::PrefixEvents() : epoch_(RandomEpoch()) {}

void PrefixEvents::Note(CacheEventKind kind, const PrefixStep& step) {
  ++newest_;
  if (log_.empty()) return;
  log_[newest_ % log_.size()] = {.kind = kind, .number = newest_, .step = step};
}

uint64_t PrefixEvents::NoteStored(const PrefixStep& step) {
  listed_.emplace_hint(listed_.end(), newest_ + 1, step);
  Note(CacheEventKind::kStored, step);
  return newest_;
}

void PrefixEvents::NoteRemoved(uint64_t stored_number) {
  const auto it = listed_.find(stored_number);
  PQC_CHECK(it != listed_.end());
  Note(CacheEventKind::kRemoved, it->second);
  listed_.erase(it);
}

void PrefixEvents::StartLog(std::vector<CacheEvent> log) {
  PQC_CHECK(!has_log() && !log.empty());
  log_ = std::move(log);
  before_ = newest_;
}

bool PrefixEvents::HasNews(const EventPosition& position) const {
  return position.epoch != epoch_ || position.number != newest_;
}

void PrefixEvents::ReadInto(EventPosition& position, size_t most,
                            std::vector<CacheEvent>& events) const {
  if (events.size() >= most) return;
  const bool reads_present = position.number < position.present_until;
  const uint64_t logged_from = std::max(position.number, position.present_until);
  if (position.epoch != epoch_ || logged_from > newest_ || !Covers(logged_from)) {
    events.push_back({.kind = CacheEventKind::kCleared});
    position = {.epoch = epoch_, .number = 0, .present_until = newest_};
  } else if (!reads_present) {
    position.present_until = 0;
  }
  if (position.number < position.present_until) {
    auto it = listed_.upper_bound(position.number);
    for (; it != listed_.end() && it->first <= position.present_until; ++it) {
      if (events.size() >= most) return;
      events.push_back({.kind = CacheEventKind::kStored, .number = it->first, .step = it->second});
      position.number = it->first;
    }
    position.number = position.present_until;
  }
  while (position.number < newest_ && events.size() < most) {
    events.push_back(log_[++position.number % log_.size()]);
  }
}

}  // namespace pqcached::kvstore
