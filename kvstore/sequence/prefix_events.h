// PrefixEvents: the log of the steps that one cache's index lists and removes, and the listed steps
// in the order of their events (cache_events.h).
//
// The log is a ring, which overwrites its oldest event. Nothing waits for a reader: a reader that
// the ring has overtaken starts again with the listed steps. They are read in pieces between which
// the index changes. Those changes have numbers above `present_until`, so the reader receives them
// from the log afterwards.
//
// Thread-compatible: PrefixIndex guards it by its lock. NoteStored and NoteRemoved take constant
// time for the log, logarithmic time for the listed steps, and do not wait.
#ifndef PQCACHED_KVSTORE_SEQUENCE_PREFIX_EVENTS_H_
#define PQCACHED_KVSTORE_SEQUENCE_PREFIX_EVENTS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "kvstore/cache_events.h"

namespace pqcached::kvstore {

class PrefixEvents {
 public:
  PrefixEvents();

  // Records that a step is listed. Returns the number of the event.
  uint64_t NoteStored(const PrefixStep& step);
  // Records that the step whose kStored has this number is no longer listed.
  void NoteRemoved(uint64_t stored_number);

  // Returns whether the log records events. Without a log, every reader starts with kCleared.
  bool has_log() const { return !log_.empty(); }
  // Starts the log. REQUIRES: `log` is not empty, and has_log() is false.
  void StartLog(std::vector<CacheEvent> log);

  // Returns whether ReadInto would return events.
  bool HasNews(const EventPosition& position) const;
  // Appends the events after `position`, until `events` has `most` of them, and moves the position.
  void ReadInto(EventPosition& position, size_t most, std::vector<CacheEvent>& events) const;

 private:
  // Returns whether the log has all events after this number.
  bool Covers(uint64_t number) const {
    return number + log_.size() >= newest_ && number >= before_;
  }
  void Note(CacheEventKind kind, const PrefixStep& step);

  const uint64_t epoch_;
  uint64_t newest_ = 0;                    // number of the newest event
  uint64_t before_ = 0;                    // number of the newest event before the log was started
  std::vector<CacheEvent> log_;            // event n is at n % size
  std::map<uint64_t, PrefixStep> listed_;  // by the number of its kStored
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_PREFIX_EVENTS_H_
