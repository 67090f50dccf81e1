#include "client/local/ingest.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "client/deadline.h"
#include "client/error.h"
#include "client/pack.h"

namespace pqcached::client {
namespace {

// Of the first slot, and of the last one, at least: one side waits for the other meanwhile.
constexpr uint64_t kLeastPartBytes = uint64_t{1} << 20;

TensorView Staged(const TensorView& tensor, uint64_t token_count, const StagingPlace* place) {
  return {.dtype = tensor.dtype,
          .ndim = 3,
          .shape = {token_count, tensor.shape[1], tensor.shape[2]},
          .staging = place};
}

// Tokens of the next slot: twice those of the one before, and half of what is left, so that the
// sidecar begins soon and has little left to do at the end.
uint64_t NextPart(uint64_t before, uint64_t left, uint64_t least, uint64_t most) {
  return std::min(left, std::clamp(std::min(2 * before, left / 2), std::min(least, most), most));
}

FilledSlot Fill(Staging::Slot slot, const RowBlock& rows, uint64_t begin, uint64_t end) {
  FilledSlot filled{.slot = std::move(slot),
                    .token_count = end - begin,
                    .key_bytes = (end - begin) * BytesPerIndex(rows.keys),
                    .value_bytes = (end - begin) * BytesPerIndex(rows.values)};
  const std::span<std::byte> bytes = filled.slot.bytes();
  PackStreaming(rows.keys, begin, end, bytes.first(filled.key_bytes));
  PackStreaming(rows.values, begin, end, bytes.subspan(filled.values_begin(), filled.value_bytes));
  return filled;
}

pqc_status Commit(const LocalIngest& ingest, const RowBlock& rows, FilledSlot& filled,
                  ErrorText* error) {
  return CommitSlot(ingest.remote, ingest.sequence_id, rows, filled, error);
}

// Commits slots in order, on a thread of its own.
class Committer {
 public:
  Committer(const LocalIngest& ingest, const RowBlock& rows, DeadlineClock::time_point deadline)
      : ingest_(ingest), rows_(rows), deadline_(deadline), thread_([this] { Run(); }) {}
  ~Committer() {
    if (thread_.joinable()) Finish();
  }

  // False when an earlier one has failed: more is of no use.
  bool Add(FilledSlot filled) {
    const std::lock_guard lock(mutex_);
    if (status_ != PQC_OK) return false;
    filled_.push_back(std::move(filled));
    changed_.notify_one();
    return true;
  }

  pqc_status Finish() {
    {
      const std::lock_guard lock(mutex_);
      finishing_ = true;
    }
    changed_.notify_one();
    thread_.join();
    return status_ == PQC_OK ? PQC_OK : Fail(status_, "%s", error_.text);
  }

 private:
  void Run() {
    const CallFrame frame;  // a part of the caller's call
    SetCallDeadline(deadline_);
    for (;;) {
      FilledSlot filled;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return finishing_ || !filled_.empty(); });
        if (filled_.empty()) return;
        filled = std::move(filled_.front());
        filled_.pop_front();
      }
      ErrorText error;
      const pqc_status status = Commit(ingest_, rows_, filled, &error);
      if (status == PQC_OK) continue;
      const std::lock_guard lock(mutex_);
      status_ = status;
      error_ = error;
      filled_.clear();
    }
  }

  const LocalIngest& ingest_;
  const RowBlock& rows_;
  const DeadlineClock::time_point deadline_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<FilledSlot> filled_;
  bool finishing_ = false;
  pqc_status status_ = PQC_OK;
  ErrorText error_;
  std::thread thread_;
};

}  // namespace

pqc_status CommitSlot(Remote& remote, uint64_t sequence_id, const RowBlock& rows,
                      FilledSlot& filled, ErrorText* error) {
  const StagingPlace keys = filled.slot.Place(0, filled.key_bytes);
  const StagingPlace values = filled.slot.Place(filled.values_begin(), filled.value_bytes);
  const RowBlock staged{.layer = rows.layer,
                        .keys = Staged(rows.keys, filled.token_count, &keys),
                        .values = Staged(rows.values, filled.token_count, &values)};
  filled.slot.Use();
  uint64_t token_count = 0;
  const pqc_status status =
      remote.Commit(sequence_id, filled.first_position, &staged, 1, &token_count, error);
  if (MayStillBeRead(status)) filled.slot.Abandon();
  return status;
}

pqc_status IngestLocally(const LocalIngest& ingest, uint64_t first_position, const RowBlock& rows,
                         bool* remote_instead) {
  const auto deadline = CallDeadline(ingest.timeout_ms);
  const uint64_t token_bytes = BytesPerIndex(rows.keys) + BytesPerIndex(rows.values);
  uint64_t step = (ingest.staging.slot_bytes() - FilledSlot::AlignUp(1)) / token_bytes;
  if (ingest.max_tensor_bytes != 0) {
    step = std::min(step, ingest.max_tensor_bytes /
                              std::max(BytesPerIndex(rows.keys), BytesPerIndex(rows.values)));
  }
  *remote_instead = step == 0;
  if (step == 0) return PQC_OK;

  Staging::Slot slot;
  if (const pqc_status status = ingest.staging.Take(deadline, &slot); status != PQC_OK) {
    *remote_instead = status == PQC_RESOURCE_EXHAUSTED || status == PQC_UNIMPLEMENTED;
    return status;
  }
  const uint64_t token_count = rows.keys.shape[0];
  if (token_count <= step) {
    FilledSlot filled = Fill(std::move(slot), rows, 0, token_count);
    filled.first_position = first_position;
    ErrorText error;
    const pqc_status status = Commit(ingest, rows, filled, &error);
    return status == PQC_OK ? PQC_OK : Fail(status, "%s", error.text);
  }
  Committer committer(ingest, rows, deadline);
  const uint64_t least = std::max<uint64_t>(1, kLeastPartBytes / token_bytes);
  uint64_t part = 0;
  for (uint64_t token = 0; token < token_count;) {
    part = NextPart(part, token_count - token, least, step);
    const uint64_t end = token + part;
    FilledSlot filled = Fill(std::move(slot), rows, token, end);
    filled.first_position = first_position + token;
    if (!committer.Add(std::move(filled))) break;
    token = end;
    if (token == token_count) break;
    if (const pqc_status status = ingest.staging.Take(deadline, &slot); status != PQC_OK) {
      // What a commit failed with tells more than that its slots did not come back.
      const pqc_status committed = committer.Finish();
      return committed != PQC_OK ? committed : Fail(status, "staging: no slot in time");
    }
  }
  return committer.Finish();
}

}  // namespace pqcached::client
