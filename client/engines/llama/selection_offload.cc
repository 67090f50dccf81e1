// The part of Selection that has to do with offloaded tokens, whose rows only the sidecar has.
#include <algorithm>
#include <exception>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "client/engines/llama/log.h"
#include "client/engines/llama/selection.h"

namespace pqcached::llama {
namespace {

// Rows are dropped so many at a time, when so many tokens follow them and the window.
constexpr uint32_t kDroppedTokens = 128;
constexpr uint32_t kKeptTokens = 64;

}  // namespace

// Attributes the graph's query tokens at the first layer. Returns false when the graph must fail.
bool Selection::Follow(const Attention& attention) {
  if (layer_ == 0) {
    mask_ = attention.node->src[3];
    std::unique_lock lock = LockHistories();
    if (!offload_->Follow(attention, is_fresh_ ? written_ : std::span<const uint32_t>(),
                          sidecar_.get(), dropped_.get())) {
      return false;
    }
    if (offload_->is_usable()) return true;
    if (lock.owns_lock()) lock.unlock();
    offload_.reset();
    fails_ = !ReturnAll();
    return !fails_;
  }
  const bool has_begun = !is_learned_ || !is_fresh_;
  if (layer_ && has_begun && attention.node->src[3] == mask_) return true;
  TurnOff("layers that have masks of their own");
  return !fails_;
}

// Returns whether all offloaded tokens are candidates of a step. After a roll-back, the window may
// have some: then all of them are attended to.
bool Selection::MaySelect(const History& history) const {
  return history.offloaded_end + settings_.window_tokens <= uint64_t{history.size()} + 1;
}

std::span<const kernels::Partial> Selection::AttendOffloaded(const Attention& attention) {
  if (!layer_ || !is_learned_ || is_off_) return {};
  if (step_ == nullptr || !step_selects_ || partials_.size() != rows_) {
    partials_.assign(size_t{attention.streams} * attention.tokens, {});
    hidden_.assign(dropped_ == nullptr ? 0 : partials_.size(), nullptr);
  }
  if (dropped_ != nullptr) HideOffloaded(attention);
  if (!offload_->Attend(attention, *layer_, sidecar_.get(), partials_)) return {};
  return partials_;
}

// Has the engine's own rows without dropped ones, where the step does not hide them.
void Selection::HideOffloaded(const Attention& attention) {
  const auto lock = sidecar_->Lock();
  for (const FollowedRows& rows : offload_->rows()) {
    History& history = *rows.history;
    if (!history.has_offloaded() || partials_[rows.first_row].output != nullptr) continue;
    history.Hide(history.offloaded_begin, history.offloaded_end);
    for (uint32_t row = rows.first_row; row < rows.first_row + rows.count; ++row) {
      const uint32_t base = attention.first_cell + row / attention.tokens * attention.stream_cells;
      hidden_[row] = history.hidden.words().data() + base / 64;
    }
  }
}

void Selection::Leave() {
  if (offload_ == nullptr || !IsLastLayer()) return;
  const auto lock = LockHistories();
  offload_->EndGraph();
  is_to_drop_ = dropped_ != nullptr;
}

void Selection::Complete() {
  if (!std::exchange(is_to_drop_, false) || offload_ == nullptr) return;
  const auto lock = LockHistories();
  DropStored();
}

// Gives back the memory of rows that the sidecar has, but for those of the window and some behind
// it: a roll-back of a few tokens costs nothing. With the histories' lock, after the last layer.
void Selection::DropStored() {
  for (const FollowedRows& rows : offload_->rows()) {
    StoredHistory* const stored = rows.stored;
    const History& history = *rows.history;
    if (stored == nullptr || stored->sequence == nullptr || history.is_lost) continue;
    const uint64_t near = settings_.window_tokens + kKeptTokens;
    const uint64_t last = std::min<uint64_t>(
        stored->acknowledged, history.size() - std::min<uint64_t>(history.size(), near));
    const uint64_t begin = history.has_offloaded() ? history.offloaded_end : settings_.sink_tokens;
    if (last >= begin + kDroppedTokens) {
      dropped_->Drop(rows.history, static_cast<uint32_t>(begin), static_cast<uint32_t>(last),
                     stored);
    } else if (history.size() >= begin + near + kDroppedTokens) {
      stored->is_awaited = true;
    }
  }
}

bool Selection::ReturnAll() try {
  if (histories_ == nullptr) return true;
  const auto lock = LockHistories();
  for (const auto& history : histories_->all()) {
    if (dropped_ != nullptr && history->has_offloaded()) Shorten(history, 0);
  }
  return !histories_->has_offloaded() && (dropped_ == nullptr || !dropped_->has_lost());
} catch (const std::exception&) {
  return false;
}

pqc_status Selection::TakeOffload(uint64_t tokens, uint32_t* begin, uint32_t* end,
                                  std::string* problem) {
  if (!settings_.offloads || offload_ == nullptr || is_off_ || layers_.arrays.empty()) {
    *problem = "the word offload is missing in PQCACHED_LLAMA, or the model cannot be followed";
    return PQC_FAILED_PRECONDITION;
  }
  if (!is_learned_) EndLearning();
  return offload_->Take(tokens, sidecar_.get(), begin, end, problem);
}

}  // namespace pqcached::llama
