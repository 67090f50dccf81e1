#include "client/step/preparer.h"

#include <utility>

#include "client/base/error.h"
#include "client/local/sequence.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {

pqc_status Preparer::Request(const std::shared_ptr<SequenceState>& sequence, const Wanted& wanted) {
  Preparation& preparation = sequence->preparation;
  const base::MutexLock lock(&preparation.mutex);
  if (preparation.status != PQC_OK) {
    const pqc_status status = preparation.status;
    preparation.status = PQC_OK;
    return Fail(status, *preparation.refusal);
  }
  if (!preparation.running) {
    worker_.Run([this, sequence, wanted] { Run(*sequence, wanted); });
    preparation.running = true;
  }
  return SetRetry(kRetryConflict,
                  Fail(PQC_DEADLINE_EXCEEDED, "sequence",
                       "its segment map or index is being fetched in the background"));
}

void Preparer::Release(std::shared_ptr<SequenceState> sequence) {
  worker_.Run([sequence = std::move(sequence)] {
    MarkOwnThread();
    sequence->local->Detach();
  });
}

// A failure that only means that the worker has ended is not kept: the next call sees that itself.
void Preparer::Run(SequenceState& sequence, const Wanted& wanted) {
  MarkOwnThread();
  const pqc_status status = Call([&] { return Prepare(sequence, wanted); });
  Preparation& preparation = sequence.preparation;
  const base::MutexLock lock(&preparation.mutex);
  preparation.running = false;
  if (status == PQC_OK || status == PQC_UNAVAILABLE) return;
  if (!preparation.refusal) preparation.refusal = std::make_unique<RefusalBuffer>();
  *preparation.refusal = LastRefusal();
  preparation.status = status;
}

pqc_status Preparer::Prepare(SequenceState& sequence, const Wanted& wanted) {
  LocalSequence& local = *sequence.local;
  RETURN_IF_ERROR(local.session().Check());  // does not wait for the next worker
  std::shared_ptr<Image> image;
  uint64_t lease_epoch = 0;
  RETURN_IF_ERROR(local.Pin(&image, &lease_epoch));
  if (wanted.close_prefill && sequence.prefill_open) {
    RefusalBuffer error;
    RETURN_IF_ERROR(Report(client_.remote->ClosePrefill(sequence.sequence_id, &error), error));
    sequence.prefill_open = false;
  }
  if (wanted.newer_image && local.HasNewer()) RETURN_IF_ERROR(local.Refresh(&image));
  uint32_t index_slot = 0;
  if (!wanted.index || image->FindIndex(*wanted.index, &index_slot) == PQC_OK) return PQC_OK;
  RETURN_IF_ERROR(local.Refresh(&image));
  return image->FindIndex(*wanted.index, &index_slot);
}

}  // namespace pqcached::client
