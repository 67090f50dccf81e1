// PrefillTimes: the time that an engine takes for the prefill of a cache's layers, in which their
// keys may be clustered (PQCache, SIGMOD 2025, section 3.3, equations 1 to 3).
//
// The engine reports it when it opens the cache, or asks for a measurement; otherwise it is that of
// StoreOptions. A measurement takes the time from the arrival of one chunk of a sequence until that
// of the next one, and fits the quadratic of PrefillCost to these times by least squares. Other
// work that the engine does in between is part of it, because keys may be clustered during that,
// too.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_SEQUENCE_PREFILL_TIMES_H_
#define PQCACHED_KVSTORE_SEQUENCE_PREFILL_TIMES_H_

#include <array>
#include <atomic>
#include <cstdint>

#include "kvstore/clock.h"
#include "kvstore/model.h"
#include "kvstore/mutex.h"

namespace pqcached::kvstore {

class PrefillTimes {
 public:
  PrefillTimes(const PrefillCost& configured, size_t layer_count);

  void Set(const PrefillReport& report);
  // Notes that a sequence has the tokens [begin, end) since `now`, in all layers. Does nothing
  // without a measurement.
  void NoteChunk(uint64_t sequence_id, uint32_t begin, uint32_t end, SteadyTime now);
  // Returns the time for one layer; all 0 when it is not known (yet).
  PrefillCost Cost() const;
  bool measures() const { return measures_.load(std::memory_order_relaxed); }

 private:
  // End of the newest chunk of a sequence.
  struct Arrival {
    uint64_t sequence_id = 0;
    uint32_t token_end = 0;
    SteadyTime at;
  };

  void Add(double squares, double tokens, double seconds) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  PrefillCost Measured() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const double layer_count_;
  std::atomic<bool> measures_ = false;
  mutable Mutex mutex_;
  PrefillCost cost_ ABSL_GUARDED_BY(mutex_);  // configured or reported
  // The newest sequences, the oldest of which gives way.
  std::array<Arrival, 32> arrivals_ ABSL_GUARDED_BY(mutex_);
  size_t next_arrival_ ABSL_GUARDED_BY(mutex_) = 0;
  // Sums over the intervals, the newest of which count most: x squares, y tokens, t seconds.
  uint64_t interval_count_ ABSL_GUARDED_BY(mutex_) = 0;
  double xx_ ABSL_GUARDED_BY(mutex_) = 0;
  double xy_ ABSL_GUARDED_BY(mutex_) = 0;
  double yy_ ABSL_GUARDED_BY(mutex_) = 0;
  double xt_ ABSL_GUARDED_BY(mutex_) = 0;
  double yt_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_PREFILL_TIMES_H_
