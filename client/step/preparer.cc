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
  return SetRetry(
      kRetryConflict,
      Fail(PQC_DEADLINE_EXCEEDED, "sequence",
           sequence->local ? "its segment map or index is being fetched in the background"
                           : "its state is being fetched in the background; begin again later"));
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
  RETURN_IF_ERROR(CheckServed(client_));  // does not wait for the next worker
  if (sequence.local) return PrepareMapped(sequence, wanted);
  if (wanted.token_count) RETURN_IF_ERROR(Describe(sequence));
  return wanted.close_prefill ? ClosePrefill(sequence) : PQC_OK;
}

pqc_status Preparer::PrepareMapped(SequenceState& sequence, const Wanted& wanted) {
  LocalSequence& local = *sequence.local;
  std::shared_ptr<Image> image;
  uint64_t lease_epoch = 0;
  RETURN_IF_ERROR(local.Pin(&image, &lease_epoch));
  if (wanted.close_prefill) RETURN_IF_ERROR(ClosePrefill(sequence));
  if (wanted.newer_image && local.HasNewer()) RETURN_IF_ERROR(local.Refresh(&image));
  uint32_t index_slot = 0;
  if (!wanted.index || image->FindIndex(*wanted.index, &index_slot) == PQC_OK) return PQC_OK;
  RETURN_IF_ERROR(local.Refresh(&image));
  return image->FindIndex(*wanted.index, &index_slot);
}

pqc_status Preparer::ClosePrefill(SequenceState& sequence) {
  if (!sequence.prefill_open) return PQC_OK;
  RefusalBuffer error;
  RETURN_IF_ERROR(Report(client_.remote->ClosePrefill(sequence.sequence_id, &error), error));
  sequence.prefill_open = false;
  return PQC_OK;
}

pqc_status Preparer::Describe(SequenceState& sequence) {
  uint64_t shortenings = 0;
  {
    const base::MutexLock lock(&sequence.preparation.mutex);
    shortenings = sequence.preparation.shortenings;
  }
  pqc_sequence_info info = PQC_INIT(pqc_sequence_info);
  RefusalBuffer error;
  RETURN_IF_ERROR(
      Report(client_.remote->DescribeSequence(sequence.sequence_id, &info, &error), error));
  sequence.SetDescribed(info.token_count, shortenings);
  return PQC_OK;
}

}  // namespace pqcached::client
