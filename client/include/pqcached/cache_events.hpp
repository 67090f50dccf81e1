// pqcached client: C++20 over cache_events.h. CacheEvents reads the events of a cache, and
// PrefixKeysOf computes the keys that they name.
//
// Each function calls the function of cache_events.h that its comment names, where its errors and
// thread-safety are written.
//
// Example, which keeps a set of the keys that are present:
//
//     auto events = pqcached::CacheEvents::Open(cache);
//     if (!events.ok()) return events.status();
//     while (true) {
//       auto next = events->Next(1000);
//       if (!next.ok()) return next.status();
//       for (const pqc_cache_event& event : *next) {
//         const std::string key(pqcached::BytesOf(event.key));
//         if (event.kind == PQC_CACHE_CLEARED) keys.clear();
//         if (event.kind == PQC_CACHE_STORED) keys.insert(key);
//         if (event.kind == PQC_CACHE_REMOVED) keys.erase(key);
//       }
//     }
#ifndef PQCACHED_CACHE_EVENTS_HPP_
#define PQCACHED_CACHE_EVENTS_HPP_

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "pqcached/cache_events.h"
#include "pqcached/client.hpp"

namespace pqcached {

// Returns the 32 bytes of a key, which must outlive the view.
inline std::string_view BytesOf(const pqc_prefix_key& key) {
  return {reinterpret_cast<const char*>(key.bytes), sizeof(key.bytes)};
}

// Keys of a prompt.
struct PrefixKeys {
  pqc_prefix_key root = {};
  std::vector<pqc_prefix_key> keys = {};  // one per whole 128 tokens
};

// Computes the keys of a prompt, stored or not (pqc_prefix_keys).
inline Result<PrefixKeys> PrefixKeysOf(Cache& cache, const Prompt& prompt) {
  pqc_sequence_options c = PQC_INIT(pqc_sequence_options);
  c.token_ids = prompt.token_ids.data();
  c.token_id_count = prompt.token_ids.size();
  c.extra_key = prompt.extra_key.data();
  c.extra_key_bytes = prompt.extra_key.size();
  c.content_keys = prompt.content_keys.data();
  c.content_key_count = prompt.content_keys.size();
  PrefixKeys result;
  result.keys.resize(prompt.token_ids.size() / 128 + prompt.content_keys.size());
  uint64_t count = 0;
  const pqc_status status = pqc_prefix_keys(cache.get(), &c, &result.root, result.keys.data(),
                                            result.keys.size(), &count);
  if (status != PQC_OK) return Status(status);
  result.keys.resize(count);
  return result;
}

// Events of one cache (pqc_cache_events). Moves.
class CacheEvents {
 public:
  // Opens the events after a position; 0 and 0 = none (pqc_cache_events_open).
  static Result<CacheEvents> Open(Cache& cache, uint64_t epoch = 0, uint64_t number = 0) {
    pqc_cache_events* events = nullptr;
    const pqc_status status = pqc_cache_events_open(cache.get(), epoch, number, &events);
    if (status != PQC_OK) return Status(status);
    return CacheEvents(events);
  }

  // Waits for events, at most timeout_ms. Returns at most `capacity` of them, none if there are
  // none by then (pqc_cache_events_next).
  Result<std::vector<pqc_cache_event>> Next(uint32_t timeout_ms, uint32_t capacity = 256) {
    std::vector<pqc_cache_event> events(capacity);
    uint32_t count = 0;
    const pqc_status status =
        pqc_cache_events_next(handle_.get(), timeout_ms, events.data(), capacity, &count);
    if (status != PQC_OK) return Status(status);
    events.resize(count);
    return events;
  }

 private:
  struct Closer {
    void operator()(pqc_cache_events* events) const { pqc_cache_events_close(events); }
  };

  explicit CacheEvents(pqc_cache_events* handle) : handle_(handle) {}

  std::unique_ptr<pqc_cache_events, Closer> handle_;
};

}  // namespace pqcached

#endif  // PQCACHED_CACHE_EVENTS_HPP_
