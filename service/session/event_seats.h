// EventSeats limits the streams of WatchEvents that are open at once, in all and of each tenant.
//
// A stream occupies no thread while it waits, only its message: at most some 25 KB.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_SESSION_EVENT_SEATS_H_
#define PQCACHED_SERVICE_SESSION_EVENT_SEATS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kvstore/mutex.h"
#include "service/base/refusal.h"

namespace pqcached::service {

inline constexpr uint32_t kMaxEventStreams = 1024;
inline constexpr uint32_t kMaxEventStreamsOfTenant = 16;

class EventSeats {
 public:
  // The right to one stream, while it lives. Shared, because functions that can be copied hold it.
  using Seat = std::shared_ptr<const void>;

  // Errors: kResourceExhausted  max_event_streams, or max_event_streams_of_tenant
  absl::StatusOr<Seat> Acquire(const std::string& tenant) {
    auto taken = std::make_shared<Taken>(state_, tenant);  // before the lock: it may throw
    const kvstore::MutexLock lock(&state_->mutex);
    uint32_t& of_tenant = state_->by_tenant[tenant];
    if (of_tenant >= kMaxEventStreamsOfTenant) {
      return ResourceExhausted(
          "max_event_streams_of_tenant",
          absl::StrCat("tenant ", tenant, " has ", of_tenant, " streams of events, and may have ",
                       kMaxEventStreamsOfTenant),
          kRetryMemory);
    }
    if (state_->count >= kMaxEventStreams) {
      if (of_tenant == 0) state_->by_tenant.erase(tenant);
      return ResourceExhausted("max_event_streams",
                               absl::StrCat(kMaxEventStreams, " streams of events are open"),
                               kRetryMemory);
    }
    ++of_tenant;
    ++state_->count;
    taken->counts = true;
    return Seat(std::move(taken));
  }

 private:
  struct State {
    void Release(const std::string& tenant) {
      const kvstore::MutexLock lock(&mutex);
      --count;
      if (--by_tenant[tenant] == 0) by_tenant.erase(tenant);
    }

    kvstore::Mutex mutex;
    uint32_t count ABSL_GUARDED_BY(mutex) = 0;
    absl::flat_hash_map<std::string, uint32_t> by_tenant ABSL_GUARDED_BY(mutex);
  };

  struct Taken {
    Taken(std::shared_ptr<State> of, std::string by)
        : state(std::move(of)), tenant(std::move(by)) {}
    ~Taken() {
      if (counts) state->Release(tenant);
    }
    Taken(const Taken&) = delete;
    Taken& operator=(const Taken&) = delete;

    const std::shared_ptr<State> state;
    const std::string tenant;
    bool counts = false;
  };

  // Shared with the seats, which may be released after this object.
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SESSION_EVENT_SEATS_H_
