// Sender: takes the rows of finished steps to the sidecar, on a thread of its own.
//
// Rows are kept until they are acknowledged, and sent again after UNAVAILABLE, to whatever worker there
// is then, as long as the session is not lost; positions make a repeat harmless. What follows a failure
// of a sequence is not sent: the failure stays until it is told.
//
// On the local path rows lie in staging and a message only tells where; when no slot is to be had, or
// the sidecar refuses it, the message carries them itself. What is lent and handed in is used again, so
// that steps do not allocate once they are under way.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_SENDER_H_
#define PQCACHED_CLIENT_SENDER_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "client/handles.h"
#include "client/handover.h"
#include "client/local/step_slots.h"
#include "client/remote.h"
#include "pqcached/client.h"

namespace pqcached::client {

class Sender {
 public:
  using Clock = std::chrono::steady_clock;

  // staging: of the local path, or null. Both outlive it.
  Sender(Remote& remote, Staging* staging);
  // What is not acknowledged is forgotten.
  ~Sender();

  // An empty handover, to be filled and Added. It must not outlive the sender.
  std::shared_ptr<Handover> Lend();
  // Where the rows of handovers lie.
  StepSlots& slots() { return slots_; }
  // Takes a step's handovers over, and leaves null pointers. Never waits.
  void Add(std::span<std::shared_ptr<Handover>> handovers);

  // Waits until there is room for another step.
  pqc_status WaitForRoom(Clock::time_point deadline);
  // Waits until everything of the sequence is stored; forgets its failure when it has told it.
  pqc_status Flush(const SequenceState& sequence, Clock::time_point deadline);
  // The failure of the sequence's rows, when there is one; it stays.
  pqc_status Check(const SequenceState& sequence);
  // Waits until at most `token_count` of the handed in tokens are missing.
  pqc_status WaitStored(const SequenceState& sequence, uint64_t token_count,
                        Clock::time_point deadline);
  // Where the tokens that were handed in end; false when none is on its way.
  bool HandedInEnd(const SequenceState& sequence, uint64_t* end);
  // Of a sequence that is dropped.
  void Forget(const SequenceState& sequence);

 private:
  struct Failure {
    pqc_status status = PQC_OK;
    RefusalBuffer refusal;
  };
  struct Progress {
    HandoverQueue waiting;  // the first may be in flight
    uint64_t end = 0;       // of the tokens handed in
    Failure failure;
  };
  using Batch = std::vector<std::shared_ptr<Handover>>;

  void Run();
  Batch TakeBatchLocked();
  // Drops what needs no message.
  void RollBack(Batch* batch);
  void Send(Batch batch);
  pqc_status SendOnce(const Batch& batch, bool staged, RefusalBuffer* error);
  // Waits a little when the call may do better then; false when it will not, or nobody wants it.
  bool PauseBeforeRepeat(pqc_status status, const RefusalBuffer& refusal, Clock::time_point give_up,
                         std::chrono::milliseconds* pause);
  bool stop_requested();
  // Ends the first handover of its sequence.
  void Settle(const Handover& handover, pqc_status status, const RefusalBuffer& refusal);
  std::shared_ptr<Handover> DropFirstLocked(Progress& progress);
  // To be lent again, if nobody else holds it.
  void LetGo(std::shared_ptr<Handover> handover);
  pqc_status ReportLocked(const Progress& progress) const;

  Remote& remote_;
  StepSlots slots_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::map<const SequenceState*, Progress> sequences_;  // until they are dropped
  const SequenceState* last_taken_ = nullptr;
  uint64_t waiting_bytes_ = 0;
  uint64_t waiting_count_ = 0;
  std::vector<std::shared_ptr<Handover>> idle_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_SENDER_H_
