#include "client/engines/llama/histories.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <utility>

namespace pqcached::llama {
namespace {

// The longest unused history ends when another one begins.
constexpr size_t kMostHistories = 64;

// Whether tokens of any history of the process have been offloaded: an application may have freed
// cells of another context than it meant.
std::atomic<bool> any_offloaded{false};

bool Contains(std::span<const std::shared_ptr<History>> histories,
              const std::shared_ptr<History>& history) {
  return std::find(histories.begin(), histories.end(), history) != histories.end();
}

uint32_t CountOf(const CellSet& set) {
  uint32_t count = 0;
  for (const uint64_t word : set.words()) count += static_cast<uint32_t>(std::popcount(word));
  return count;
}

// Orders histories by their last use, those with offloaded tokens last.
std::pair<bool, uint64_t> Age(const History& history) {
  return {history.has_offloaded(), history.last_used};
}

}  // namespace

void History::Hide(uint32_t begin, uint32_t end) {
  if (begin != hidden_begin || end < hidden_end) {
    hidden.Clear();
    hidden_begin = hidden_end = begin;
  }
  for (; hidden_end < end; ++hidden_end) {
    if (cells[hidden_end] != kNoCell) hidden.Add(cells[hidden_end]);
  }
}

void Histories::Append(History* history, uint32_t cell, uint64_t print) {
  history->cells.push_back(cell);
  history->prints.push_back(print);
  history->has.Add(cell);
}

void Histories::Shorten(History* history, uint32_t keep) {
  ++history->version;
  for (uint32_t i = keep; i < history->size(); ++i) {
    if (history->cells[i] != History::kNoCell) history->has.Remove(history->cells[i]);
  }
  history->cells.resize(keep);
  history->prints.resize(keep);
  if (keep == 0) {
    history->is_ordered = true;
    history->has_offset = false;
  }
  history->offloaded_end = std::min(history->offloaded_end, keep);
  if (!history->has_offloaded()) {
    history->offloaded_begin = history->offloaded_end = 0;
    history->is_lost = false;
  }
  if (history->hidden_end > keep) {
    history->hidden.Clear();
    history->hidden_begin = history->hidden_end = 0;
  }
}

uint32_t Histories::TokenAt(const History& history, uint32_t cell) {
  const auto found = std::find(history.cells.rbegin(), history.cells.rend(), cell);
  return static_cast<uint32_t>(history.cells.rend() - found) - 1;
}

uint32_t Histories::SeenTokens(const History& history, const CellSet& seen) {
  const std::span<const uint64_t> has = history.has.words(), sees = seen.words();
  bool sees_all = true;
  for (size_t i = 0; i < has.size() && sees_all; ++i) sees_all = (has[i] & ~sees[i]) == 0;
  if (sees_all) return history.size();
  uint32_t count = 0;
  while (count < history.size() && seen.Has(history.cells[count])) ++count;
  return count;
}

uint32_t Histories::FirstChanged(const History& history, uint32_t count, FingerprintOf fingerprint,
                                 const void* context) {
  const bool skips = history.lacks_cells();
  for (uint32_t i = 0; i < count; ++i) {
    if (i == history.offloaded_begin && skips) i = history.offloaded_end;
    if (i >= count) break;
    if (fingerprint(context, history.cells[i]) != history.prints[i]) return i;
  }
  return count;
}

bool Histories::SeesFirst(const History& history, const CellSet& seen, uint32_t seen_count,
                          uint64_t count) {
  const uint32_t away = history.offloaded_end - history.offloaded_begin;
  if (count < history.offloaded_end) {
    if (seen_count != history.offloaded_begin) return false;
  } else if (seen_count != count - away) {
    return false;
  }
  for (uint32_t i = 0; i < count; ++i) {
    if (i == history.offloaded_begin) i = history.offloaded_end;
    if (i < count && !seen.Has(history.cells[i])) return false;
  }
  return true;
}

Histories::Match Histories::FindOffloaded(const CellSet& seen, uint64_t position,
                                          FingerprintOf fingerprint, const void* context,
                                          std::shared_ptr<History>* found) const {
  const uint32_t seen_count = CountOf(seen);
  for (const std::shared_ptr<History>& history : all_) {
    if (!history->lacks_cells()) continue;
    if (position <= history->offloaded_begin || position > history->size()) continue;
    if (!SeesFirst(*history, seen, seen_count, position)) continue;
    const auto count = static_cast<uint32_t>(position);
    if (FirstChanged(*history, count, fingerprint, context) < count) return Match::kBroken;
    *found = history;
    return Match::kFound;
  }
  return any_offloaded && seen_count != position ? Match::kBroken : Match::kNone;
}

void Histories::Offload(History* history, uint32_t begin, uint32_t end) {
  has_offloaded_ = any_offloaded = true;
  if (!history->has_offloaded()) history->offloaded_begin = history->offloaded_end = begin;
  for (; history->offloaded_end < end; ++history->offloaded_end) {
    uint32_t& cell = history->cells[history->offloaded_end];
    history->has.Remove(cell);
    cell = History::kNoCell;
  }
  history->hidden.Clear();
  history->hidden_begin = history->hidden_end = 0;
}

void Histories::AddSeen(const CellSet& seen, FingerprintOf fingerprint, const void* context,
                        History* history) {
  const std::span<const uint64_t> sees = seen.words();
  for (size_t word = 0; word < sees.size(); ++word) {
    for (uint64_t left = sees[word] & ~history->has.words()[word]; left != 0; left &= left - 1) {
      const auto cell =
          static_cast<uint32_t>(word * 64) + static_cast<uint32_t>(std::countr_zero(left));
      Append(history, cell, fingerprint(context, cell));
      history->is_ordered = false;  // cells do not show which token came first
    }
  }
}

std::shared_ptr<History> Histories::Best(const CellSet& seen,
                                         std::span<const std::shared_ptr<History>> taken,
                                         uint32_t* common) const {
  std::shared_ptr<History> best;
  const uint32_t seen_count = CountOf(seen);
  for (const std::shared_ptr<History>& history : all_) {
    if (history->lacks_cells()) continue;
    const uint32_t count = SeenTokens(*history, seen);
    const bool is_same = count == history->size() && count == seen_count;
    if (Contains(taken, history) && !is_same) continue;
    if (count > *common) {
      best = history;
      *common = count;
    }
  }
  if (best != nullptr && *common < best->size() && *common < seen_count / 2) return nullptr;
  return best;
}

std::shared_ptr<History> Histories::Begin(const CellSet& seen,
                                          std::span<const std::shared_ptr<History>> taken,
                                          FingerprintOf fingerprint, const void* context,
                                          std::shared_ptr<History>* ended) {
  auto history = std::make_shared<History>(cell_count_);
  history->last_used = ++uses_;
  history->last_checked = graph_;
  AddSeen(seen, fingerprint, context, history.get());
  all_.reserve(kMostHistories + 1);
  if (all_.size() == kMostHistories) {
    auto oldest = all_.end();
    for (auto each = all_.begin(); each != all_.end(); ++each) {
      if (Contains(taken, *each)) continue;
      if (oldest == all_.end() || Age(**each) < Age(**oldest)) oldest = each;
    }
    if (oldest == all_.end()) return nullptr;
    (*oldest)->is_gone = true;
    *ended = *oldest;
    all_.erase(oldest);
  }
  all_.push_back(history);
  return history;
}

}  // namespace pqcached::llama
