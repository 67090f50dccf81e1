// Eviction: which tokens give way when a pool is full, and what comes free.
//
// A *candidate* is a sequence that may go: a *retained* one (its session is over; it is kept because the
// next request may begin with the same tokens), or an idle one of a session that lives. Nobody holds a
// candidate (holds.h). Retained sequences go first, segment by segment from their ends, so that their
// beginnings serve for longest; an idle sequence goes whole.
//
// Planning changes nothing and may be out of date when it is carried out: whoever carries it out claims
// each sequence first.
#ifndef PQCACHED_KVSTORE_EVICTION_H_
#define PQCACHED_KVSTORE_EVICTION_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_set>
#include <vector>

#include "kvstore/heat.h"
#include "kvstore/mutex.h"
#include "kvstore/segment.h"
#include "kvstore/sequence.h"

namespace pqcached::kvstore {

struct Candidate {
  std::shared_ptr<Sequence> sequence;
  bool retained = false;
};

// One step of an eviction.
struct Victim {
  size_t candidate = 0;            // its ordinal
  uint32_t keep_tokens = 0;        // of the sequence; 0: it goes whole
  double score = 0;                // of the policy
  std::vector<ExtentRef> extents;  // that come free with it, when all before it have gone

  size_t bytes() const;
};

// Everything that may go, in the order in which it goes. What a step frees counts what only
// candidates hold; what others look at besides comes free later, and is not counted.
std::vector<Victim> PlanEviction(std::span<const Candidate> candidates, const StoredLayers& layers,
                                 EvictionPolicy policy);

// The ids of sequences that were evicted, the newest of them. Thread-safe.
class EvictedIds {
 public:
  static constexpr size_t kMaxIds = 1 << 16;

  void Add(uint64_t sequence_id);
  bool Contains(uint64_t sequence_id) const;

 private:
  mutable Mutex mutex_;
  std::deque<uint64_t> order_ ABSL_GUARDED_BY(mutex_);
  std::unordered_set<uint64_t> ids_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_EVICTION_H_
