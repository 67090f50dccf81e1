// Eviction: chooses the tokens that are evicted when a pool is full, and the extents that this
// frees.
//
// A *candidate* is an evictable sequence: a *retained* one (a cached prefix: its session is over,
// and it is kept because the next request may begin with the same tokens), or an idle one of a
// living session. A candidate has no holders (sequence/holds.h). Cached prefixes are evicted first,
// segment by segment from their ends, so that their beginnings remain usable for longest. An idle
// sequence is evicted as a whole.
//
// Planning changes nothing, and a plan may be out of date when it is carried out: the evictor
// claims each sequence first.
#ifndef PQCACHED_KVSTORE_EVICT_EVICTION_H_
#define PQCACHED_KVSTORE_EVICT_EVICTION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvstore/memory/free_map.h"
#include "kvstore/sequence/heat.h"
#include "kvstore/sequence/segment.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

struct Candidate {
  std::shared_ptr<Sequence> sequence;
  bool retained = false;
};

// One step of an eviction.
struct Victim {
  size_t candidate = 0;            // ordinal of the candidate
  uint32_t keep_tokens = 0;        // tokens of the sequence that remain; 0: all are evicted
  double score = 0;                // the policy's score; the lowest is evicted first
  std::vector<UnitRange> extents;  // extents that this step frees, after all steps before it

  size_t bytes() const;
};

// Returns all possible steps in eviction order. The extents of a step are those that only
// candidates hold; extents that other readers hold too become free later, and are not counted.
std::vector<Victim> PlanEviction(std::span<const Candidate> candidates, const StoredLayers& layers,
                                 EvictionPolicy policy);

// Returns the number of victims, from the first on, after which the demand fits into the memory;
// nothing when it does not fit after all of them.
std::optional<size_t> CountNeeded(const FreeMap& free, std::span<const Victim> victims,
                                  const ExtentDemand& demand);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_EVICT_EVICTION_H_
