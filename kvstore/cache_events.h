// CacheEvents: the changes of the prefixes that MatchPrefix finds in one cache, in their order.
//
// A router that follows the events of several sidecars knows which of them holds the longest prefix
// of a prompt, without asking each. An event concerns the *key* of one step of 128 tokens:
//
//   kStored   the step can be matched from now on; its parent has been stored before
//   kRemoved  the step can no longer be matched; steps that follow it have been removed before
//   kCleared  the reader forgets all keys of the cache; kStored of each present step follows
//
// Each kStored and each kRemoved has the next number. The events of a cache that was opened in this
// process are one *epoch*, a random number. The cache holds the newest kEventLogEvents of them,
// from its first reader on. For a reader whose position is older, or of another epoch, it starts
// with kCleared and the present steps. A reader that applies the events in order, and has applied
// the newest, therefore knows exactly the present keys.
#ifndef PQCACHED_KVSTORE_CACHE_EVENTS_H_
#define PQCACHED_KVSTORE_CACHE_EVENTS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pqcached::kvstore {

// Number of events that a cache holds, some 1.4 MB. One step is 128 tokens, so these are the events
// of two million tokens.
inline constexpr size_t kEventLogEvents = 16384;

// Key of one step of tokens and of all steps before it (sequence/prefix.h).
using PrefixKey = std::array<uint8_t, 32>;

struct PrefixStep {
  PrefixKey key = {};
  PrefixKey parent = {};   // key of the step before; of a first step, the root of its chain
  uint64_t token_end = 0;  // number of tokens up to the end of the step
};

enum class CacheEventKind : uint8_t { kStored = 1, kRemoved = 2, kCleared = 3 };

struct CacheEvent {
  CacheEventKind kind = CacheEventKind::kCleared;
  // kStored after a kCleared have the number that they had first, so numbers ascend. That of
  // kCleared is 0.
  uint64_t number = 0;
  PrefixStep step = {};  // of kCleared: empty
};

// Position of a reader: the last event that it has received. A reader that begins, or that has lost
// its position, starts with the default.
struct EventPosition {
  uint64_t epoch = 0;  // 0: none
  uint64_t number = 0;
  // Present steps up to this number are read from the index and not from the log. A reader that
  // continues at a position that it has saved sets 0.
  uint64_t present_until = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_CACHE_EVENTS_H_
