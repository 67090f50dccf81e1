// StoredSequences: the sequences of a store, by id.
//
// Thread-safe. One lock, held for map operations only; no other lock is acquired inside it.
#ifndef PQCACHED_KVSTORE_SEQUENCE_STORED_SEQUENCES_H_
#define PQCACHED_KVSTORE_SEQUENCE_STORED_SEQUENCES_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/mutex.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/evicted_ids.h"
#include "kvstore/sequence/prefix.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// A sequence with its cache and names. Each is held by shared_ptr: a call keeps them alive while
// other calls drop them.
struct StoredSequence {
  std::shared_ptr<const Cache> cache;
  std::shared_ptr<Sequence> sequence;
  std::shared_ptr<NamedTokens> names = {};

  bool retained() const { return sequence->session().empty(); }
};

class StoredSequences {
 public:
  // Counts a sequence that is about to be added. Each successful call is followed by Add or Cancel.
  //
  // Errors: kResourceExhausted  max_sequences: the cache has `max_count` sequences
  //         kNotFound           cache_id: the cache was closed
  absl::Status Reserve(uint64_t cache_id, uint32_t max_count);
  void Cancel(uint64_t cache_id);
  void Add(StoredSequence stored);
  // Reserves and adds, without a limit. For sequences of an earlier process.
  void Restore(StoredSequence stored);

  // Returns the caches for which CloseCache without `force` would be refused.
  std::set<uint64_t> HeldCaches() const;
  // Closes a cache: Reserve fails from now on. No effect when it is closed.
  //
  // Errors: kFailedPrecondition  without `force`: a session has a sequence there, or creates one,
  //                              or a cached prefix is pinned (the message names it)
  absl::Status CloseCache(uint64_t cache_id, bool force);

  // Removes the sequence from the map only. No effect when it is not there.
  void Remove(uint64_t sequence_id);
  // Removes the sequence, and remembers that it was evicted.
  void RemoveEvicted(uint64_t sequence_id);

  // Finds a sequence of the tenant and records its use.
  //
  // Errors: kNotFound  sequence_id (the text says when it was evicted)
  absl::StatusOr<StoredSequence> Find(std::string_view tenant, uint64_t sequence_id) const;
  // Finds a sequence of any tenant, without a use. Errors: as Find.
  absl::StatusOr<StoredSequence> FindInAnyTenant(uint64_t sequence_id) const;

  std::vector<StoredSequence> All() const;
  std::vector<StoredSequence> OfCache(uint64_t cache_id) const;
  std::vector<StoredSequence> RetainedOfCache(uint64_t cache_id) const;
  std::vector<StoredSequence> OfSession(std::string_view session) const;
  // Returns the sequences of the other ranks' caches of the cache's group.
  std::vector<StoredSequence> OfOtherRanks(const Cache& cache) const;
  // Returns the number of sequences of a cache, reserved ones included.
  uint32_t CountOfCache(uint64_t cache_id) const;

 private:
  // Errors: those of CloseCache without `force`.
  absl::Status CheckNotHeld(uint64_t cache_id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Finds a sequence of the tenant, or of any tenant for kAllTenants.
  absl::StatusOr<StoredSequence> Look(std::string_view tenant, uint64_t sequence_id) const;
  void Erase(std::unordered_map<uint64_t, StoredSequence>::iterator it)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <class Predicate>
  std::vector<StoredSequence> Filter(const Predicate& predicate) const;

  EvictedIds evicted_;  // has a lock of its own
  mutable Mutex mutex_;
  std::unordered_map<uint64_t, StoredSequence> sequences_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, uint32_t> counts_ ABSL_GUARDED_BY(mutex_);  // per cache
  std::unordered_set<uint64_t> closed_ ABSL_GUARDED_BY(mutex_);            // caches
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_STORED_SEQUENCES_H_
