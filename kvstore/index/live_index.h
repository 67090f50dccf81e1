// IncrementalIndexer: the worker thread that maintains incremental indexes while rows arrive.
//
// One thread processes what sequences publish, the most urgent first: segments without codes
// precede work that only improves later decoding (recoding, merges); sequences take turns. The work
// itself runs on the building arena (live_sequence.h).
//
// Work that fails (the pool is full) leaves rows and indexes as they are. StatusOf and the `failed`
// callback report the failure; the work is retried when the sequence publishes next, or by Finish.
//
// Thread-safe. Locks are not held during work.
#ifndef PQCACHED_KVSTORE_INDEX_LIVE_INDEX_H_
#define PQCACHED_KVSTORE_INDEX_LIVE_INDEX_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "kernels/base/worker.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// Checks the spec of an incremental index. Errors: kInvalidArgument naming the field.
absl::Status CheckLiveIndex(const Cache& cache, const LiveIndex& spec);

class IncrementalIndexer {
  struct Entry;

 public:
  // Called on the worker's thread.
  using Failed = std::function<void(uint64_t sequence_id, const absl::Status& status)>;

  explicit IncrementalIndexer(Failed failed = {});
  ~IncrementalIndexer();  // calls Stop
  IncrementalIndexer(const IncrementalIndexer&) = delete;
  IncrementalIndexer& operator=(const IncrementalIndexer&) = delete;

  // Waits for the end of work in progress, which stops early; no work starts afterwards.
  void Stop();

  // Maintains the index until the sequence is dropped. Segments that the sequence shares with
  // others and that are already indexed keep their codes. Errors: kNotFound when dropped.
  absl::Status Add(std::shared_ptr<const Cache> cache, const std::shared_ptr<Sequence>& sequence,
                   const LiveIndex& spec);

  std::optional<LiveIndex> SpecOf(uint64_t sequence_id) const;
  // Returns the status of the most recent work on the sequence: ok, or the reason why it failed.
  absl::Status StatusOf(uint64_t sequence_id) const;
  // Returns StatusOf, and makes the worker try again if it has failed.
  absl::Status Retry(uint64_t sequence_id);
  // Returns true when the worker has no work left for the sequence until it publishes next.
  bool IsIdle(uint64_t sequence_id) const;
  // Returns the number of sequences that the worker has work left for.
  uint32_t CountBusySequences() const;
  // Waits until no sequence has work left, or until the deadline. Returns false at the deadline.
  bool WaitIdle(SteadyTime deadline) const;

  // Implements BuildIndex for an incremental index: waits until all its closed segments are
  // indexed. `progress`: as in Store::BuildIndex, one report per layer. Errors: those of
  // Store::BuildIndex, and those of the work.
  absl::Status Finish(const Cache& cache, Sequence& sequence, const BuildSpec& spec,
                      const std::function<bool(const BuildProgress&)>& progress);

  // Makes the worker begin again with the index that the sequence has now: another one replaced its
  // codebooks. REQUIRES: a Pause of all work that holds.
  void Restart(uint64_t sequence_id);

  // Prevents work on the sequence for the lifetime of this object; with kUpkeep, only work that
  // replaces segments or codes, while new segments get their codes. The constructor waits for work
  // in progress until `deadline`.
  class Pause {
   public:
    enum class Of : uint8_t { kAll, kUpkeep };

    Pause(IncrementalIndexer& indexes, uint64_t sequence_id, SteadyTime deadline, Of of = Of::kAll);
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

    // Returns false when work was still in progress at the deadline.
    bool holds() const { return holds_; }

   private:
    void Count(Entry& entry, int change) const;

    bool holds_ = true;
    const Of of_;
    IncrementalIndexer& indexes_;
    const uint64_t sequence_id_;
  };

 private:
  class Watcher;
  // State shared with watchers, which may outlive the worker.
  struct Inbox {
    mutable Mutex mutex;
    mutable CondVar changed;
    bool stop ABSL_GUARDED_BY(mutex) = false;
    bool scheduled ABSL_GUARDED_BY(mutex) = false;  // Work is queued, or running
    std::map<uint64_t, Entry> entries ABSL_GUARDED_BY(mutex);
    IncrementalIndexer* indexer = nullptr;  // outlives the worker's tasks
    base::Worker worker{"pqc-indexer"};

    // Signals a change, and makes the worker look for work.
    void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  };
  struct WorkItem;

  // Works until there is no work left. Runs on the worker.
  void Work();
  std::optional<WorkItem> PickNext(uint64_t last) ABSL_EXCLUSIVE_LOCKS_REQUIRED(inbox_->mutex);
  void Settle(const WorkItem& pick, const absl::Status& status, bool worked);

  const Failed failed_;
  const std::shared_ptr<Inbox> inbox_;
  std::atomic<bool> stop_ = false;
  uint64_t last_ = 0;  // the sequence that was worked on last; only Work uses it
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_INDEX_LIVE_INDEX_H_
