// Waits for the rows and codes that a step needs.
#include <algorithm>

#include "client/base/deadline.h"
#include "client/base/error.h"
#include "client/step/preparer.h"
#include "client/step/read_backend.h"
#include "client/step/sender.h"
#include "client/step/step.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/resolve.h"

namespace pqcached::client {
namespace {

// Returns the number of tokens that must be stored before the selection; 0 when nothing can be
// selected.
uint32_t NeededTokens(const kvstore::Selection& terms, uint64_t query_position) {
  const auto context = static_cast<uint32_t>(query_position) + 1;
  const uint32_t sink_end = std::min(terms.sink_tokens, context);
  const uint32_t window_begin = context - std::min(terms.window_tokens, context);
  return window_begin > sink_end ? window_begin : 0;
}

// Returns whether a selection needs clusters that the image does not have.
bool LacksClusters(const Image& image, const kvstore::Selection& terms) {
  return terms.tail_estimate && !image.FindIndexOf(kvstore::IndexKind::kClusters);
}

bool IsReady(const StepItem& item, const kvstore::Selection& terms, const uint32_t* layer,
             uint32_t needed) {
  Image& image = *item.pinned.image;
  if (item.sequence->local->ReadableTokens(image) < needed) return false;
  if (!layer || needed == 0) return true;
  if (LacksClusters(image, terms) && item.sequence->local->HasNewer()) return false;
  uint32_t index_slot = 0;
  if (image.FindIndex(terms.index, &index_slot) != PQC_OK) {
    ClearLastError();
    // The sidecar has not begun the live index yet; another index is missing for good.
    return terms.index != item.sequence->live_index;
  }
  return image.CodedTokens(*layer, index_slot) >= needed;
}

constexpr std::chrono::seconds kClosingInterval(1);

// Replaces the pinned image; the step keeps the epoch of its beginning. Returns whether the new
// image is another one.
bool UseImage(std::shared_ptr<Image> newest, StepItem* item) {
  std::shared_ptr<Image>& pinned = item->pinned.image;
  const bool is_other = newest->version() != pinned->version() || pinned->is_former();
  if (pinned->is_former() && newest != pinned) item->former = pinned;
  pinned = std::move(newest);
  return is_other;
}

// Pins a newer image if there is one here, and has one fetched if only the sidecar has one. Sets
// *found.
pqc_status TryTakeNewer(const pqc_step& step, StepItem* item, bool* found) {
  LocalSequence& local = *item->sequence->local;
  Pinned newest;
  Preparer& preparer = *step.client->preparer;
  if (!TryPinNewest(local, &newest)) return preparer.Request(item->sequence, {});
  *found = UseImage(std::move(newest.image), item);
  if (*found || !local.HasNewer()) return PQC_OK;
  uint64_t end = 0;  // the answer to rows in flight will bring the newer image
  if (step.client->sender->QueuedEnd(*item->sequence, &end)) return PQC_OK;
  return preparer.Request(item->sequence, {.newer_image = true});
}

// Returns whether a layer's index covers the tokens, as far as this is known here.
bool IsIndexed(const pqc_step& step, const LayerCall& call, uint32_t needed, StepItem* item) {
  const kvstore::IndexDescriptor& index = call.selection->index;
  for (bool found = true; found;) {
    uint32_t index_slot = 0;
    if (!LacksClusters(*item->pinned.image, *call.selection) &&
        item->pinned.image->FindIndex(index, &index_slot) == PQC_OK &&
        item->pinned.image->CodedTokens(call.layer, index_slot) >= needed) {
      return true;
    }
    if (TryTakeNewer(step, item, &found) != PQC_OK) found = false;
    ClearLastError();
  }
  return false;
}

// Reports that rows or codes are not ready for a step that does not wait.
pqc_status FailNotReady(StepItem& item, uint32_t needed) {
  SequenceState& sequence = *item.sequence;
  CloseAgainLater(sequence);
  return SetRetry(kRetryConflict, Fail(PQC_DEADLINE_EXCEEDED, "query_position",
                                       "%u tokens with their index are not ready; %u are stored",
                                       needed, sequence.local->token_count()));
}

// Pins a newer image if there is one. Sets *found.
pqc_status TakeNewer(const pqc_step& step, StepItem* item, bool* found) {
  LocalSequence& local = *item->sequence->local;
  std::shared_ptr<Image> newest;
  uint64_t lease_epoch = 0;
  RETURN_IF_ERROR(local.Pin(&newest, &lease_epoch));
  if (newest == item->pinned.image && local.HasNewer()) {
    // The answer to rows in flight will bring the newer image.
    uint64_t end = 0;
    if (!step.client->sender->QueuedEnd(*item->sequence, &end)) {
      RETURN_IF_ERROR(local.Refresh(&newest));
    }
  }
  *found = UseImage(std::move(newest), item);
  return PQC_OK;
}

}  // namespace

void CloseAgainLater(SequenceState& sequence) {
  if (!kvstore::NeedsBuild(sequence.live_index)) return;
  const base::MutexLock lock(&sequence.preparation.mutex);
  const auto now = DeadlineClock::now();
  if (now - sequence.preparation.closed_at <= kClosingInterval) return;
  sequence.preparation.closed_at = now;
  sequence.OpenPrefill();
}

pqc_status WaitMapped(const pqc_step& step, const kvstore::Selection& terms, const uint32_t* layer,
                      uint32_t needed, StepItem* item) {
  LocalSequence& local = *item->sequence->local;
  for (;;) {
    const uint32_t seen = local.session().wake_word();
    bool confirmed = false;
    RETURN_IF_ERROR(local.CheckInStep(item->pinned.lease_epoch, &confirmed));
    if (IsReady(*item, terms, layer, needed)) return PQC_OK;
    bool found = false;
    RETURN_IF_ERROR(step.no_wait ? TryTakeNewer(step, item, &found)
                                 : TakeNewer(step, item, &found));
    if (found) continue;
    RETURN_IF_ERROR(step.client->sender->Check(*item->sequence));
    if (step.no_wait) return FailNotReady(*item, needed);
    if (StepClock::now() >= step.deadline) {
      item->sequence->OpenPrefill();
      return SetRetry(kRetryConflict,
                      Fail(PQC_DEADLINE_EXCEEDED, "query_position",
                           "%u tokens with their index were not available in time; %u are stored",
                           needed, local.token_count()));
    }
    local.session().Wait(seen, step.deadline);
  }
}

pqc_status ClosePrefill(const pqc_step& step, const kvstore::Selection& terms,
                        const StepItem& item) {
  SequenceState& sequence = *item.sequence;
  if (!sequence.prefill_open || terms.index != sequence.live_index ||
      NeededTokens(terms, item.query_position) == 0) {
    return PQC_OK;
  }
  if (step.exact_until_indexed && (sequence.local || step.no_wait)) {
    // The first row behind the prefill, which a queued step brings, closes it as well.
    uint64_t end = 0;
    if (step.client->sender->QueuedEnd(sequence, &end)) return PQC_OK;
    step.client->preparer->Request(item.sequence, {.close_prefill = true});
    ClearLastError();
    return PQC_OK;
  }
  // The sidecar refuses the call while it stores rows of earlier steps.
  RETURN_IF_ERROR(
      step.client->sender->WaitStored(sequence, kvstore::kMaxSequenceTokens, step.deadline));
  if (step.no_wait) {
    return step.client->preparer->Request(item.sequence, {.close_prefill = true});
  }
  RefusalBuffer error;
  RETURN_IF_ERROR(Report(step.client->remote->ClosePrefill(sequence.sequence_id, &error), error));
  sequence.prefill_open = false;
  return PQC_OK;
}

pqc_status WaitReady(const pqc_step& step, const kvstore::Selection& terms, const uint32_t* layer,
                     StepItem* item) {
  if (!step.no_wait) SetCallDeadline(step.deadline);
  const uint32_t needed = NeededTokens(terms, item->query_position);
  if (needed > item->end_before_step) {
    const kvstore::ResolvedSelection resolved =
        kvstore::Resolve(terms, item->query_position, static_cast<uint32_t>(item->end_before_step));
    return FailInStep(resolved.refusal);
  }
  RETURN_IF_ERROR(ClosePrefill(step, terms, *item));
  return step.client->reads->Wait(step, terms, layer, needed, item);
}

kvstore::Selection AllCandidates(const kvstore::Selection& terms) {
  kvstore::Selection all = terms;
  all.index = {};
  all.budget_kind = kvstore::BudgetKind::kRatio;
  all.budget_ratio = 1.0;
  return all;
}

pqc_status PickTerms(const LayerCall& call, StepItem* item, const kvstore::Selection** terms) {
  const pqc_step& step = *call.step;
  *terms = call.selection;
  const bool takes_all = call.attends && step.exact_until_indexed;
  RETURN_IF_ERROR(WaitReady(step, *call.selection, takes_all ? nullptr : &call.layer, item));
  const uint32_t needed = NeededTokens(*call.selection, item->query_position);
  if (needed > 0 && (!takes_all || IsIndexed(step, call, needed, item))) return PQC_OK;
  if (needed == 0 && call.selection->index != item->sequence->live_index) return PQC_OK;
  item->exact = AllCandidates(*call.selection);
  *terms = &item->exact;
  return PQC_OK;
}

}  // namespace pqcached::client
