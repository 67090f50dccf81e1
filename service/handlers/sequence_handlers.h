// SequenceHandlers answers the rpcs for caches and sequences: open, create, fork, roll back,
// suspend and drop; prefixes, and their events; the end of a prefill; admission.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_HANDLERS_SEQUENCE_HANDLERS_H_
#define PQCACHED_SERVICE_HANDLERS_SEQUENCE_HANDLERS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/store.h"
#include "pqcached/v1/kv_cache.pb.h"
#include "service/handlers/cache_specs.h"
#include "service/handlers/caller.h"
#include "service/handlers/lease_handlers.h"
#include "service/session/event_seats.h"
#include "service/session/sessions.h"

namespace pqcached::service {

class Log;

// One stream of events. For one thread at a time.
struct EventWatch {
  uint64_t cache_id = 0;
  std::string cache = {};  // its name
  kvstore::EventPosition position = {};
  EventSeats::Seat seat = {};
  bool is_dropped = false;  // the cache was dropped, and the stream has sent that
};

class SequenceHandlers {
 public:
  SequenceHandlers(kvstore::Store& store, Sessions& sessions, CacheSpecs& specs,
                   LeaseHandlers& leases, Log& log)
      : store_(store), sessions_(sessions), specs_(specs), leases_(leases), log_(log) {}

  absl::Status OpenCache(const Caller& caller, const v1::OpenCacheRequest& request,
                         v1::OpenCacheResponse* response);
  absl::Status OpenPageCache(const Caller& caller, const v1::OpenPageCacheRequest& request,
                             v1::OpenPageCacheResponse* response);
  absl::Status CreateSequence(const Caller& caller, const v1::CreateSequenceRequest& request,
                              v1::CreateSequenceResponse* response);
  absl::Status DropSequence(const Caller& caller, const v1::DropSequenceRequest& request,
                            v1::DropSequenceResponse*);
  absl::Status TruncateSequence(const Caller& caller, const v1::TruncateSequenceRequest& request,
                                v1::TruncateSequenceResponse* response);
  absl::Status ForkSequence(const Caller& caller, const v1::ForkSequenceRequest& request,
                            v1::ForkSequenceResponse* response);
  absl::Status ForkSequences(const Caller& caller, const v1::ForkSequencesRequest& request,
                             v1::ForkSequencesResponse* response);
  absl::Status SuspendSequence(const Caller& caller, const v1::SuspendSequenceRequest& request,
                               v1::SuspendSequenceResponse*);
  absl::Status ResumeSequence(const Caller& caller, const v1::ResumeSequenceRequest& request,
                              v1::ResumeSequenceResponse* response);
  absl::Status ClosePrefill(const Caller& caller, const v1::ClosePrefillRequest& request,
                            v1::ClosePrefillResponse*);
  absl::Status MatchPrefix(const Caller& caller, const v1::MatchPrefixRequest& request,
                           v1::MatchPrefixResponse* response);
  absl::Status Admit(const Caller& caller, const v1::AdmitRequest& request,
                     v1::AdmitResponse* response);

  // WatchEvents: begins a stream of events. Errors: kNotFound  the cache
  //                                                kResourceExhausted  those of EventSeats
  absl::StatusOr<EventWatch> BeginWatch(const Caller& caller,
                                        const v1::WatchEventsRequest& request);
  // Returns whether ReadEvents would return events, or an error.
  bool HasEvents(const Caller& caller, const EventWatch& watch) const;
  // Sets `batch` to the next events of the stream, none if there are none yet. Errors: kNotFound
  // the cache was dropped; the batch before this error ends with kCleared
  absl::Status ReadEvents(const Caller& caller, EventWatch& watch, v1::CacheEvents* batch);
  // Errors: kUnauthenticated  the caller's session has ended
  absl::Status CheckSession(const Caller& caller) const {
    return sessions_.Find(caller.token).status();
  }

 private:
  // Logs a new cache. Errors: those of DropIfEnded
  absl::Status FinishOpen(const Caller& caller, const kvstore::OpenedCache& opened);
  // Checks that the model that the request names is that of the cache.
  absl::Status CheckFingerprint(const Caller& caller, const v1::CreateSequenceRequest& request);
  // When the caller's session has ended, drops what it left in the store. Errors: those of
  // CheckSession.
  absl::Status DropIfEnded(const Caller& caller);
  // Drops a sequence that was created for a caller that has disconnected, and returns the error of
  // the call then.
  absl::Status DropIfAbandoned(const Caller& caller, uint64_t sequence_id);

  kvstore::Store& store_;
  Sessions& sessions_;
  CacheSpecs& specs_;
  LeaseHandlers& leases_;
  Log& log_;
  EventSeats event_seats_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_SEQUENCE_HANDLERS_H_
