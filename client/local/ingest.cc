#include "client/local/ingest.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <new>
#include <utility>

#include "client/base/deadline.h"
#include "client/base/error.h"
#include "client/base/pack.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/pages.h"

namespace pqcached::client {
namespace {

// Number of parts: the sidecar copies while the client packs, except during the packing of the
// first part and the copy of the last.
constexpr uint64_t kParts = 8;
constexpr uint64_t kLeastPartBytes = uint64_t{1} << 20;
// A waiting thread checks at this interval that its call is still in progress.
constexpr std::chrono::milliseconds kLookInterval(5);

TensorView Staged(const TensorView& tensor, uint64_t token_count, const StagingPlace* place) {
  return {.dtype = tensor.dtype,
          .ndim = 3,
          .shape = {token_count, tensor.shape[1], tensor.shape[2]},
          .staging = place};
}

FilledSlot Fill(Staging::Slot slot, const RowBlock& rows, uint64_t begin, uint64_t end) {
  FilledSlot filled{.slot = std::move(slot),
                    .token_count = end - begin,
                    .key_bytes = (end - begin) * BytesPerIndex(rows.keys),
                    .value_bytes = (end - begin) * BytesPerIndex(rows.values)};
  if (filled.key_bytes + filled.value_bytes >= kvstore::kHugePageBytes) filled.slot.Touch();
  const std::span<std::byte> bytes = filled.slot.bytes();
  PackStreaming(rows.keys, begin, end, bytes.first(filled.key_bytes));
  PackStreaming(rows.values, begin, end, bytes.subspan(filled.values_begin(), filled.value_bytes));
  return filled;
}

// References to rows in staging for one message.
struct StagedBlock {
  StagingPlace keys;
  StagingPlace values;
  RowBlock rows;
};

void Describe(const RowBlock& rows, const FilledSlot& filled, StagedBlock* block) {
  block->keys = filled.slot.Place(0, filled.key_bytes);
  block->values = filled.slot.Place(filled.values_begin(), filled.value_bytes);
  block->rows = {.layer = rows.layer,
                 .keys = Staged(rows.keys, filled.token_count, &block->keys),
                 .values = Staged(rows.values, filled.token_count, &block->values),
                 .names = rows.names};
}

// Parts of one ingest call: packs them into slots one by one, and reuses a slot when the sidecar is
// done with it, while the call continues.
class Parts {
 public:
  Parts(const LocalIngest& ingest, uint64_t first_position, const RowBlock& rows,
        Staging::Slot slot, uint64_t part_tokens, DeadlineClock::time_point deadline)
      : ingest_(ingest),
        first_position_(first_position),
        rows_(rows),
        next_slot_(std::move(slot)),
        boot_word_(next_slot_.Place(0, 0).boot_word),
        part_tokens_(part_tokens),
        deadline_(deadline) {}

  StagedRows View() {
    return {.context = this,
            .next =
                [](void* parts, const StagedRows::Probe& probe, uint64_t* first_position,
                   RowBlock* rows) {
                  return static_cast<Parts*>(parts)->NextOrNone(probe, first_position, rows);
                },
            .boot_word = boot_word_,
            .names = rows_.names};
  }

  // Handles the end of the call: slots that the sidecar may still read are abandoned.
  void End(pqc_status status) {
    for (Staging::Slot& slot : in_flight_) {
      if (MayStillBeRead(status) && !slot.Done()) slot.Abandon();
    }
    in_flight_.clear();
  }
  // Returns the reason why no more parts were produced; PQC_OK when all were, or when the call had
  // ended.
  pqc_status own_status() const { return own_status_; }

 private:
  // Like Next, but noexcept: exceptions must not pass into the other library.
  StagedRows::Next NextOrNone(const StagedRows::Probe& probe, uint64_t* first_position,
                              RowBlock* rows) noexcept {
    try {
      return Next(probe, first_position, rows);
    } catch (const std::bad_alloc&) {
      own_status_ = Fail(PQC_RESOURCE_EXHAUSTED, "", "the client is out of memory");
      return StagedRows::Next::kGiveUp;
    }
  }

  StagedRows::Next Next(const StagedRows::Probe& probe, uint64_t* first_position, RowBlock* rows) {
    const uint64_t token_count = rows_.keys.shape[0];
    if (token_ == token_count) return StagedRows::Next::kEnd;
    if (!next_slot_.valid() && !TakeSlot(probe)) return StagedRows::Next::kGiveUp;
    const uint64_t end = std::min(token_count, token_ + part_tokens_);
    FilledSlot filled = Fill(std::move(next_slot_), rows_, token_, end);
    Describe(rows_, filled, &block_);
    *first_position = first_position_ + token_;
    *rows = block_.rows;
    filled.slot.Use();
    in_flight_.push_back(std::move(filled.slot));
    token_ = end;
    return StagedRows::Next::kPart;
  }

  bool TakeSlot(const StagedRows::Probe& probe) {
    for (;;) {
      const uint32_t seen = in_flight_.empty() ? 0 : in_flight_.front().link().wake_word();
      while (!in_flight_.empty() && in_flight_.front().Done()) in_flight_.pop_front();
      ingest_.staging.TryTake(&next_slot_, /*left=*/0);
      if (next_slot_.valid()) break;
      if (!probe.in_progress(probe.context)) return false;
      const auto now = DeadlineClock::now();
      if (now >= deadline_) {
        own_status_ = Fail(PQC_DEADLINE_EXCEEDED, "", "staging: no slot in time");
        return false;
      }
      const auto look = std::min(deadline_, now + kLookInterval);
      if (!in_flight_.empty()) {
        in_flight_.front().link().Wait(seen, look);
        continue;
      }
      const pqc_status taken = ingest_.staging.Take(look, &next_slot_);
      if (taken == PQC_OK) break;
      if (taken == PQC_DEADLINE_EXCEEDED) continue;  // other callers have all slots
      own_status_ = taken;
      return false;
    }
    if (next_slot_.Place(0, 0).boot_word == boot_word_) return true;
    own_status_ = SetRetry(kRetryMemory,
                           Fail(PQC_UNAVAILABLE, "", "staging: the sidecar's worker was replaced"));
    return false;
  }

  const LocalIngest& ingest_;
  const uint64_t first_position_;
  const RowBlock& rows_;
  Staging::Slot next_slot_;
  const uint64_t boot_word_;
  const uint64_t part_tokens_;
  const DeadlineClock::time_point deadline_;
  uint64_t token_ = 0;  // the first token that is not packed
  StagedBlock block_;   // the latest part
  std::deque<Staging::Slot> in_flight_;
  pqc_status own_status_ = PQC_OK;
};

pqc_status IngestParts(const LocalIngest& ingest, Parts& parts) {
  RefusalBuffer error;
  const pqc_status status = ingest.remote.IngestStaged(ingest.sequence_id, parts.View(), &error);
  parts.End(status);
  if (status == PQC_OK) return PQC_OK;
  if (parts.own_status() != PQC_OK)
    return parts.own_status();  // its text is the thread's last error
  return Fail(status, error);
}

// Commits each part by its own call.
pqc_status CommitParts(const LocalIngest& ingest, uint64_t first_position, const RowBlock& rows,
                       Staging::Slot slot, uint64_t part_tokens,
                       DeadlineClock::time_point deadline) {
  const uint64_t token_count = rows.keys.shape[0];
  for (uint64_t token = 0;;) {
    const uint64_t end = std::min(token_count, token + part_tokens);
    RefusalBuffer error;
    {
      FilledSlot filled = Fill(std::move(slot), rows, token, end);
      filled.first_position = first_position + token;
      RowBlock part = rows;
      if (end < token_count) part.names = nullptr;  // recorded with the last part
      const pqc_status status = CommitSlot(ingest.remote, ingest.sequence_id, part, filled, &error);
      if (status != PQC_OK) return Fail(status, error);
    }
    token = end;
    if (token == token_count) return PQC_OK;
    RETURN_IF_ERROR(ingest.staging.Take(deadline, &slot));
  }
}

}  // namespace

void InvalidateAbandoned(Staging& staging, Remote& remote) {
  for (const StagingPlace& place : staging.Abandoned()) {
    const TensorView nothing{
        .dtype = DType::kBf16, .ndim = 3, .shape = {1, 1, 1}, .staging = &place};
    const RowBlock rows{.layer = 0, .keys = nothing, .values = nothing};
    constexpr uint64_t kNoSequence = 0;
    uint64_t token_count = 0;
    RefusalBuffer refused;  // as it must be: there is no such sequence
    remote.Commit(kNoSequence, 0, &rows, 1, &token_count, &refused);
  }
}

pqc_status CommitSlot(Remote& remote, uint64_t sequence_id, const RowBlock& rows,
                      FilledSlot& filled, RefusalBuffer* error) {
  StagedBlock staged;
  Describe(rows, filled, &staged);
  filled.slot.Use();
  uint64_t token_count = 0;
  const pqc_status status =
      remote.Commit(sequence_id, filled.first_position, &staged.rows, 1, &token_count, error);
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

  InvalidateAbandoned(ingest.staging, ingest.remote);
  Staging::Slot slot;
  if (const pqc_status status = ingest.staging.Take(deadline, &slot); status != PQC_OK) {
    *remote_instead = status == PQC_RESOURCE_EXHAUSTED || status == PQC_UNIMPLEMENTED;
    return status;
  }
  const uint64_t token_count = rows.keys.shape[0];
  const uint64_t part =
      std::min(step, std::max({token_count / kParts, kLeastPartBytes / token_bytes, uint64_t{1}}));
  if (token_count <= part || !slot.link().has_slot_words(ingest.staging.slot_count())) {
    return CommitParts(ingest, first_position, rows, std::move(slot), step, deadline);
  }
  Parts parts(ingest, first_position, rows, std::move(slot), part, deadline);
  const pqc_status status = IngestParts(ingest, parts);
  *remote_instead = parts.own_status() == PQC_RESOURCE_EXHAUSTED;  // nothing is stored
  return status;
}

}  // namespace pqcached::client
