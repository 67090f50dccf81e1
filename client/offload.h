// Offload: takes prefill rows that a GPU packs into staging to the sidecar, on a thread of its own.
//
// An engine's stream fills slots; this thread waits for the event behind each one, in the order in which they were handed in,
// and commits it. So the sidecar copies a layer while the stream computes the next one. Slots come back when they are
// committed: who finds none (Staging::Take) waits for that. What follows a failure of a sequence is not sent, and the failure
// stays until it is told.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_OFFLOAD_H_
#define PQCACHED_CLIENT_OFFLOAD_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "client/handles.h"
#include "client/local/ingest.h"
#include "client/remote.h"
#include "gpu/steps.h"
#include "pqcached/client.h"

namespace pqcached::client {

class Offload {
 public:
  using Clock = std::chrono::steady_clock;

  // A slot that `steps` packs. Nobody else writes it, and `steps` lives until it is drained.
  struct Job {
    std::shared_ptr<SequenceState> sequence;  // shared with its handle, which may be closed before
    gpu::Steps* steps = nullptr;
    FilledSlot filled;
    RowBlock rows;  // as CommitSlot wants them
  };

  // The remote outlives it.
  explicit Offload(Remote& remote) : remote_(remote) {}
  // Waits for what is being packed; what is not committed is forgotten.
  ~Offload();

  // Does not wait. A failure of the sequence drops the job, when its slot is packed. Throws when there is no memory or
  // no thread to be had; the slot has gone back then, when it was packed.
  void Add(Job job);
  // The failure of the sequence's rows, when there is one; it stays.
  pqc_status Check(const SequenceState& sequence);
  // Waits until everything of the sequence is stored; forgets its failure when it has told it.
  pqc_status Flush(const SequenceState& sequence, Clock::time_point deadline);
  // Of a sequence that is dropped.
  void Forget(const SequenceState& sequence);
  // Waits until no job of this device is left.
  void Drain(const gpu::Steps* steps);

 private:
  struct Progress {
    uint64_t waiting_count = 0;  // one of them may be under way
    bool is_wanted = true;
    pqc_status status = PQC_OK;
    RefusalBuffer error;
  };

  void Run();
  // Sees a job through; its slot has gone back, or never will.
  pqc_status Finish(Job job, RefusalBuffer* error);
  bool IsWanted(const SequenceState& sequence);
  void Settle(const SequenceState& sequence, pqc_status status, const RefusalBuffer& error);
  static pqc_status Report(const Progress& progress);

  Remote& remote_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Job> jobs_;
  const gpu::Steps* under_way_ = nullptr;               // whose job the thread has
  std::map<const SequenceState*, Progress> sequences_;  // with jobs, or a failure
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_OFFLOAD_H_
