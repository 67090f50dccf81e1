// LiveIndexes: the worker that keeps up the indexes of sequences while their rows arrive.
//
// One thread takes up what sequences publish, the most urgent first: segments without codes before
// everything that only makes decoding better later (recoding, merges); sequences in turn. The work
// itself runs on the building arena (live_sequence.h).
//
// Work that fails (the pool is full) leaves rows and indexes as they are; it is told by StatusOf and
// by `failed`, and tried again when the sequence publishes next, or by Finish.
//
// Thread-safe. Locks are not held during work.
#ifndef PQCACHED_KVSTORE_LIVE_INDEX_H_
#define PQCACHED_KVSTORE_LIVE_INDEX_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "absl/status/status.h"
#include "kvstore/cache.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"
#include "kvstore/sequence.h"

namespace pqcached::kvstore {

// Errors: kInvalidArgument naming the field.
absl::Status CheckLiveIndex(const Cache& cache, const LiveIndex& spec);

class LiveIndexes {
 public:
  // Called on the worker's thread.
  using Failed = std::function<void(uint64_t sequence_id, const absl::Status& status)>;

  explicit LiveIndexes(Failed failed = {});
  ~LiveIndexes();  // stops
  LiveIndexes(const LiveIndexes&) = delete;
  LiveIndexes& operator=(const LiveIndexes&) = delete;

  // Ends the work under way; there is none from then on.
  void Stop();

  // Keeps up the index until the sequence is dropped. What the sequence shares with others and is
  // indexed already, is taken over as it is. Errors: kNotFound when dropped.
  absl::Status Add(std::shared_ptr<const Cache> cache, std::shared_ptr<Sequence> sequence,
                   const LiveIndex& spec);

  std::optional<LiveIndex> SpecOf(uint64_t sequence_id) const;
  // Of the newest work: ok, or why it failed.
  absl::Status StatusOf(uint64_t sequence_id) const;
  // Whether the worker has nothing left to do for the sequence (until it publishes next).
  bool IdleOf(uint64_t sequence_id) const;
  // How many sequences the worker has something left to do for.
  uint32_t CountBusy() const;
  // Until IdleOf, or the deadline; returns IdleOf.
  bool WaitIdle(uint64_t sequence_id, SteadyTime deadline) const;

  // BuildIndex of a live index: waits until all its closed segments are indexed. `progress`: as
  // Store::BuildIndex, one report per layer. Errors: as those, and those of the work.
  absl::Status Finish(const Cache& cache, Sequence& sequence, const BuildSpec& spec,
                      const std::function<bool(const BuildProgress&)>& progress);

  // No work on the sequence while it lives; waits for the piece under way.
  class Pause {
   public:
    Pause(LiveIndexes& indexes, uint64_t sequence_id);
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    LiveIndexes& indexes_;
    const uint64_t sequence_id_;
  };

 private:
  class Watcher;
  struct Entry;
  // What watchers, which may outlive the worker, need of it.
  struct Inbox {
    mutable Mutex mutex;
    mutable CondVar changed;
    bool stop ABSL_GUARDED_BY(mutex) = false;
    std::map<uint64_t, Entry> entries ABSL_GUARDED_BY(mutex);
  };
  struct Pick;

  void Work();
  std::optional<Pick> PickNext(uint64_t last) ABSL_EXCLUSIVE_LOCKS_REQUIRED(inbox_->mutex);
  void Settle(const Pick& pick, const absl::Status& status, bool worked);

  const Failed failed_;
  const std::shared_ptr<Inbox> inbox_;
  std::atomic<bool> stop_ = false;
  std::thread worker_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_LIVE_INDEX_H_
