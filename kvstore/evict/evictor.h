// Evictor: frees memory by evicting cached prefixes and idle sequences (eviction.h plans, the
// evictor claims and drops).
//
// Thread-safe, without locks of its own: a sequence is claimed before it is dropped
// (sequence/holds.h).
#ifndef PQCACHED_KVSTORE_EVICT_EVICTOR_H_
#define PQCACHED_KVSTORE_EVICT_EVICTOR_H_

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kvstore/evict/eviction.h"
#include "kvstore/index/live_index.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/stored_sequences.h"
#include "kvstore/share/local_sessions.h"
#include "kvstore/share/rank_sequences.h"

namespace pqcached::kvstore {

class Evictor {
 public:
  // The arguments outlive this object.
  struct Parts {
    const StoreOptions& options;
    StoredSequences& sequences;
    RankSequences& ranks;
    const IncrementalIndexer& live;
    const LocalSessions& local;
  };
  explicit Evictor(const Parts& parts) : parts_(parts) {}

  // Returns the sequences of a cache that may be evicted, oldest first.
  std::vector<Candidate> Candidates(const Cache& cache, bool retained_only) const;
  // Returns the steps that evict the candidates, in the policy's order.
  std::vector<Victim> Plan(const Cache& cache, std::span<const Candidate> candidates) const;

  // Frees extents of these sizes. Returns false, and evicts nothing, when that is not possible.
  bool MakeRoom(const Cache& cache, std::span<const size_t> sizes_bytes);
  // Evicts one retained sequence if the cache has max_sequences.
  void MakeRoomForOne(const Cache& cache);
  // Evicts retained sequences until the others hold at most `most_bytes`; returns the number of
  // freed bytes.
  size_t ShrinkRetained(const Cache& cache, size_t most_bytes);
  // Returns the number of bytes that evicting all retained sequences would free.
  size_t RetainedBytes(const Cache& cache) const;
  // Evicts retained sequences until about `bytes` are freed; returns the number of freed bytes.
  size_t FreeRetained(const Cache& cache, size_t bytes);
  // Implements Store::EvictSequence, with its errors.
  absl::Status Evict(const StoredSequence& found);

  // Returns the sequences of other ranks that begin with the same tokens, by more than
  // `keep_tokens`.
  std::vector<StoredSequence> RankCounterparts(const Cache& cache, const NamedTokens& names,
                                               uint32_t keep_tokens) const;

  uint64_t evicted_sequences() const { return evicted_sequences_.load(); }
  uint64_t evicted_bytes() const { return evicted_bytes_.load(); }

 private:
  // Returns whether the sequence is not in use, and either retained or idle together with all
  // members of its group.
  bool IsEvictable(const StoredSequence& stored) const;
  // Shortens or evicts the victims; returns the number of freed bytes.
  size_t Execute(const Cache& cache, std::span<const Candidate> candidates,
                 std::span<const Victim> victims);
  bool Execute(const Cache& cache, const Candidate& candidate, const Victim& victim);
  bool Shorten(const StoredSequence& stored, uint32_t keep_tokens);
  // Evicts a sequence together with the members of its group in other ranks, or none. Errors:
  // kFailedPrecondition naming the member that is in use.
  absl::Status EvictAllMembers(const StoredSequence& stored);
  // Checks that no sequence is leased or pinned, for a precise error to admin. Errors:
  // kFailedPrecondition naming the lease or the pin.
  absl::Status CheckUnused(std::span<const std::shared_ptr<Sequence>> sequences) const;

  const Parts parts_;
  std::atomic<uint64_t> evicted_sequences_ = 0;
  std::atomic<uint64_t> evicted_bytes_ = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_EVICT_EVICTOR_H_
