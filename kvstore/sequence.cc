#include "kvstore/sequence.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace pqcached::kvstore {
namespace {

bool ShowsMore(const std::vector<uint32_t>& shown, const std::vector<uint32_t>& than) {
  for (size_t i = 0; i < shown.size(); ++i) {
    if (shown[i] > than[i]) return true;
  }
  return false;
}

}  // namespace

uint32_t Snapshot::token_count() const {
  return *std::min_element(layer_tokens.begin(), layer_tokens.end());
}

uint32_t Snapshot::tail_begin() const {
  return list->tail_open() ? list->segments.back().rows->first_position() : token_count();
}

Sequence::Sequence(uint64_t sequence_id, std::string session, uint32_t layer_count)
    : sequence_id_(sequence_id),
      session_(std::move(session)),
      current_(std::make_shared<Snapshot>(std::make_shared<SegmentList>(),
                                          std::vector<uint32_t>(layer_count, 0))) {}

absl::Status Sequence::DroppedError() const {
  return absl::NotFoundError(absl::StrCat("sequence ", sequence_id_, " was dropped"));
}

absl::StatusOr<std::shared_ptr<const Snapshot>> Sequence::Read() const {
  const MutexLock lock(&mutex_);
  if (current_ == nullptr) return DroppedError();
  return current_;
}

absl::Status Sequence::BeginWrite() {
  const MutexLock lock(&mutex_);
  if (current_ == nullptr) return DroppedError();
  if (writing_) {
    return absl::AbortedError(
        absl::StrCat("another writer of sequence ", sequence_id_, " is at work"));
  }
  writing_ = true;
  return absl::OkStatus();
}

void Sequence::EndWrite() {
  const MutexLock lock(&mutex_);
  writing_ = false;
}

absl::Status Sequence::Publish(std::shared_ptr<const Snapshot> next) {
  const MutexLock lock(&mutex_);
  if (current_ == nullptr) return DroppedError();
  std::erase_if(superseded_,
                [](const Superseded& s) { return s.drained->load(std::memory_order_acquire); });
  superseded_.push_back({current_->layer_tokens, current_->drained});
  current_.swap(next);  // the old one dies with the argument, behind the lock
  return absl::OkStatus();
}

bool Sequence::ReadersBeyond(const std::vector<uint32_t>& layer_tokens) const {
  const MutexLock lock(&mutex_);
  std::erase_if(superseded_,
                [](const Superseded& s) { return s.drained->load(std::memory_order_acquire); });
  return std::any_of(superseded_.begin(), superseded_.end(),
                     [&](const Superseded& s) { return ShowsMore(s.layer_tokens, layer_tokens); });
}

void Sequence::Drop() {
  std::shared_ptr<const Snapshot> last;  // dies behind the lock
  dropped_.store(true, std::memory_order_release);
  const MutexLock lock(&mutex_);
  last.swap(current_);
  superseded_.clear();
}

absl::StatusOr<WriteLease> WriteLease::Take(std::shared_ptr<Sequence> sequence) {
  if (absl::Status status = sequence->BeginWrite(); !status.ok()) return status;
  return WriteLease(std::move(sequence));
}

}  // namespace pqcached::kvstore
