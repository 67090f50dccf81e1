// Sender sends the rows of finished steps, and of prefills that no call waits for, to the sidecar,
// on its own thread.
//
// Rows are kept until they are acknowledged, and sent again after UNAVAILABLE, to the worker of
// that time, as long as the session is not lost; positions make a repeat harmless. After a failure,
// the later rows of the same sequence are not sent; the error is kept until Flush returns it.
//
// On the local path rows are in staging and a message carries only references; when no slot is
// free, or the sidecar refuses the slot, the message carries the rows themselves. Handovers and
// their memory are reused, so that steps in steady state do not allocate.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_STEP_SENDER_H_
#define PQCACHED_CLIENT_STEP_SENDER_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/base/remote.h"
#include "client/local/step_slots.h"
#include "client/step/handles.h"
#include "client/step/handover.h"
#include "kernels/base/mutex.h"
#include "kernels/base/worker.h"
#include "pqcached/client.h"

namespace pqcached::client {

class Sender {
 public:
  using Clock = std::chrono::steady_clock;

  // `staging` is null on the remote path. REQUIRES: `remote` and `staging` outlive the object.
  Sender(Remote& remote, Staging* staging);
  // Drops unacknowledged rows.
  ~Sender();

  // Returns an empty handover, to be filled and passed to Add. It must not outlive the sender.
  std::shared_ptr<Handover> Lend();
  // Returns the staging slots for the rows of handovers.
  StepSlots& slots() { return slots_; }
  // Takes ownership of a step's handovers, and leaves null pointers. Never waits.
  void Add(std::span<std::shared_ptr<Handover>> handovers);

  // Waits until there is room for another step.
  pqc_status WaitForRoom(Clock::time_point deadline);
  // Waits until all queued rows of the sequence are stored. Returns the sequence's pending error
  // and clears it.
  pqc_status Flush(const SequenceState& sequence, Clock::time_point deadline);
  // Returns the sequence's pending error, if it has one, and keeps it.
  pqc_status Check(const SequenceState& sequence);
  // Waits until tokens [0, token_count) of the sequence are not waiting to be stored.
  pqc_status WaitStored(const SequenceState& sequence, uint64_t token_count,
                        Clock::time_point deadline);
  // Sets *end to the end of the sequence's tokens, queued ones included; returns false when none is
  // queued.
  bool QueuedEnd(const SequenceState& sequence, uint64_t* end);
  // Appends the sequence's queued handovers, in order; each is returned with ReturnHandover. Their
  // rows stay in place until then. Returns the sequence's pending error, if it has one.
  pqc_status Hold(const SequenceState& sequence, std::vector<std::shared_ptr<Handover>>* queued);
  // Makes a handover available to Lend, if this was its last reference.
  void ReturnHandover(std::shared_ptr<Handover> handover);
  // Drops the state and the queued rows of a sequence that is being dropped.
  void RemoveSequence(const SequenceState& sequence);

 private:
  struct Failure {
    pqc_status status = PQC_OK;
    RefusalBuffer refusal;
  };
  struct Progress {
    HandoverQueue waiting;  // the first may be in flight
    uint64_t end = 0;       // end of the queued tokens
    Failure failure;
  };
  using Batch = std::vector<std::shared_ptr<Handover>>;

  // Sends what is queued. Runs on the worker.
  void SendQueued();
  Batch TakeBatchLocked() PQCACHED_REQUIRES(mutex_);
  // Sends the batch's roll-backs, and removes handovers that failed or have no rows.
  void RollBack(Batch* batch);
  void Send(Batch batch);
  pqc_status SendOnce(const Batch& batch, bool staged, RefusalBuffer* error);
  pqc_status IngestOnce(Handover& handover, bool staged, RefusalBuffer* error);
  // Waits a little if a repeat of the call may succeed; returns false if it cannot, or after a stop
  // request.
  bool PauseBeforeRepeat(pqc_status status, const RefusalBuffer& refusal, Clock::time_point give_up,
                         std::chrono::milliseconds* pause);
  bool stop_requested();
  // Removes the first handover of its sequence; on an error, also removes all later ones.
  void CompleteFirst(const Handover& handover, pqc_status status, const RefusalBuffer& refusal);
  std::shared_ptr<Handover> DropFirstLocked(Progress& progress) PQCACHED_REQUIRES(mutex_);
  pqc_status ReportLocked(const Progress& progress) const PQCACHED_REQUIRES(mutex_);

  Remote& remote_;
  StepSlots slots_;
  base::Mutex mutex_;
  base::CondVar stopping_, done_;
  // Kept until the sequence is dropped.
  std::map<const SequenceState*, Progress> sequences_ PQCACHED_GUARDED_BY(mutex_);
  const SequenceState* last_taken_ PQCACHED_GUARDED_BY(mutex_) = nullptr;
  uint64_t waiting_bytes_ PQCACHED_GUARDED_BY(mutex_) = 0;
  uint64_t waiting_count_ PQCACHED_GUARDED_BY(mutex_) = 0;
  std::vector<std::shared_ptr<Handover>> idle_ PQCACHED_GUARDED_BY(mutex_);
  bool stop_ PQCACHED_GUARDED_BY(mutex_) = false;
  uint64_t opened_at_ = 0;  // boot word of the worker with the open ring; only SendQueued uses it
  base::Worker worker_{"pqc-sender"};
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_SENDER_H_
