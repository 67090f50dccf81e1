#include "client/engines/llama/histories.h"

#include <algorithm>
#include <bit>

namespace pqcached::llama {
namespace {

// The longest unused history ends when another one begins.
constexpr size_t kMostHistories = 64;

bool Contains(std::span<const std::shared_ptr<History>> histories,
              const std::shared_ptr<History>& history) {
  return std::find(histories.begin(), histories.end(), history) != histories.end();
}

uint32_t CountOf(const CellSet& set) {
  uint32_t count = 0;
  for (const uint64_t word : set.words()) count += static_cast<uint32_t>(std::popcount(word));
  return count;
}

}  // namespace

void History::Hide(uint32_t begin, uint32_t end) {
  if (begin != hidden_begin || end < hidden_end) {
    hidden.Clear();
    hidden_begin = hidden_end = begin;
  }
  for (; hidden_end < end; ++hidden_end) hidden.Add(cells[hidden_end]);
}

void Histories::Append(History* history, uint32_t cell, uint64_t print) {
  history->cells.push_back(cell);
  history->prints.push_back(print);
  history->has.Add(cell);
}

void Histories::Shorten(History* history, uint32_t keep) {
  ++history->version;
  for (uint32_t i = keep; i < history->size(); ++i) history->has.Remove(history->cells[i]);
  history->cells.resize(keep);
  history->prints.resize(keep);
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
  for (uint32_t i = 0; i < count; ++i) {
    if (fingerprint(context, history.cells[i]) != history.prints[i]) return i;
  }
  return count;
}

void Histories::AddSeen(const CellSet& seen, FingerprintOf fingerprint, const void* context,
                        History* history) {
  const std::span<const uint64_t> sees = seen.words();
  for (size_t word = 0; word < sees.size(); ++word) {
    for (uint64_t left = sees[word] & ~history->has.words()[word]; left != 0; left &= left - 1) {
      const auto cell =
          static_cast<uint32_t>(word * 64) + static_cast<uint32_t>(std::countr_zero(left));
      Append(history, cell, fingerprint(context, cell));
    }
  }
}

std::shared_ptr<History> Histories::Best(const CellSet& seen,
                                         std::span<const std::shared_ptr<History>> taken,
                                         uint32_t* common) const {
  std::shared_ptr<History> best;
  const uint32_t seen_count = CountOf(seen);
  for (const std::shared_ptr<History>& history : all_) {
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
                                          FingerprintOf fingerprint, const void* context) {
  if (all_.size() == kMostHistories) {
    auto oldest = all_.end();
    for (auto each = all_.begin(); each != all_.end(); ++each) {
      if (Contains(taken, *each)) continue;
      if (oldest == all_.end() || (*each)->last_used < (*oldest)->last_used) oldest = each;
    }
    if (oldest == all_.end()) return nullptr;
    (*oldest)->is_gone = true;
    all_.erase(oldest);
  }
  auto history = std::make_shared<History>(cell_count_);
  history->last_used = ++uses_;
  history->last_checked = graph_;
  AddSeen(seen, fingerprint, context, history.get());
  all_.push_back(history);
  return history;
}

}  // namespace pqcached::llama
