// Offload sends prefill rows that a GPU packs into staging to the sidecar, on its own thread.
//
// The engine's stream fills slots; this thread waits for the event recorded after each slot, in the
// order in which the slots were added, and commits the slot. So the sidecar copies a layer while
// the stream computes the next one. Slots are free again after their commit: a caller that finds no
// free slot (Staging::Take) waits for that. After a failure, the later jobs of the same sequence
// are not sent, and the error is kept until Flush returns it.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_STEP_OFFLOAD_H_
#define PQCACHED_CLIENT_STEP_OFFLOAD_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>

#include "client/base/remote.h"
#include "client/base/token_names.h"
#include "client/local/ingest.h"
#include "client/step/handles.h"
#include "gpu/steps.h"
#include "kernels/base/mutex.h"
#include "kernels/base/worker.h"
#include "pqcached/client.h"

namespace pqcached::client {

class Offload {
 public:
  using Clock = std::chrono::steady_clock;

  // A slot that `steps` packs. No other writer uses the slot, and `steps` lives until it is
  // drained.
  struct Job {
    std::shared_ptr<SequenceState> sequence;  // shared with its handle, which may be closed earlier
    gpu::Steps* steps = nullptr;
    FilledSlot filled;
    RowBlock rows;  // as CommitSlot requires them, without names
    OwnedNames names;
  };

  // REQUIRES: `remote` outlives the object.
  explicit Offload(Remote& remote) : remote_(remote) {}
  // Waits until all jobs are packed and processed.
  ~Offload();

  // Queues a job without waiting. If the sequence has failed, the job is dropped after its slot is
  // packed. Throws when memory or a thread cannot be had; the job's slot is then packed and free
  // again.
  void Add(Job job);
  // Returns the sequence's pending error, if it has one, and keeps it.
  pqc_status Check(const SequenceState& sequence);
  // Waits until all queued rows of the sequence are stored. Returns the sequence's pending error
  // and clears it.
  pqc_status Flush(const SequenceState& sequence, Clock::time_point deadline);
  // Drops the state of a sequence that is being dropped.
  void RemoveSequence(const SequenceState& sequence);
  // Waits until no job of this device is queued or in progress.
  void Drain(const gpu::Steps* steps);

 private:
  struct Progress {
    uint64_t waiting_count = 0;  // one of them may be in progress
    bool is_wanted = true;
    pqc_status status = PQC_OK;
    RefusalBuffer error;
  };

  // Finishes the first job. Runs on the worker, once for each job.
  void RunNext();
  // Sees a job through; its slot has gone back, or never will.
  pqc_status Finish(Job job, RefusalBuffer* error);
  bool IsWanted(const SequenceState& sequence);
  void CompleteJob(const SequenceState& sequence, pqc_status status, const RefusalBuffer& error);
  static pqc_status Report(const Progress& progress);

  Remote& remote_;
  base::Mutex mutex_;
  base::CondVar done_;
  std::deque<Job> jobs_ PQCACHED_GUARDED_BY(mutex_);
  // Device of the job in progress.
  const gpu::Steps* current_steps_ PQCACHED_GUARDED_BY(mutex_) = nullptr;
  // Sequences with jobs or a pending error.
  std::map<const SequenceState*, Progress> sequences_ PQCACHED_GUARDED_BY(mutex_);
  bool stop_ PQCACHED_GUARDED_BY(mutex_) = false;
  base::Worker worker_{"pqc-offload"};
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_OFFLOAD_H_
