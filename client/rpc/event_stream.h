// EventStream reads the events of one cache by calls of WatchEvents, one after the other: each
// continues behind the last event that the caller has taken.
//
// For one thread at a time.
#ifndef PQCACHED_CLIENT_RPC_EVENT_STREAM_H_
#define PQCACHED_CLIENT_RPC_EVENT_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "client/rpc/pending_call.h"
#include "pqcached/cache_events.h"
#include "pqcached/v1/kv_cache.grpc.pb.h"

namespace pqcached::client {

// Copies a key of an answer. Errors: INTERNAL  it does not have 32 bytes
grpc::Status CopyKey(const std::string& from, const char* field, pqc_prefix_key* to);

class EventStream {
 public:
  // `abandoned` outlives the object.
  EventStream(uint64_t cache_id, uint64_t epoch, uint64_t number, AbandonedCalls& abandoned);
  // Cancels the call in progress, without waiting for its end.
  ~EventStream();
  EventStream(const EventStream&) = delete;
  EventStream& operator=(const EventStream&) = delete;

  // Appends events that have arrived to out [capacity], of which *count are filled.
  grpc::Status Take(pqc_cache_event* out, uint32_t capacity, uint32_t* count);
  // Returns whether a call is in progress.
  bool is_open() const { return call_ != nullptr; }
  // Begins the next call. REQUIRES: !is_open().
  void Begin(v1::KvCache::Stub& stub, std::shared_ptr<grpc::ClientContext> context);
  // Waits until events have arrived, the call has ended, or the time is over. Returns true for the
  // first; sets *status when the call has ended, which is then no longer open. REQUIRES: is_open(),
  // and Take has taken all events.
  bool Await(gpr_timespec until, grpc::Status* status);

  // The sidecar may count the stream before this one among the open ones until then.
  std::chrono::steady_clock::time_point counted_until;

 private:
  struct Call;

  void Leave();

  AbandonedCalls& abandoned_;
  v1::WatchEventsRequest request_;  // its position is behind the last event that was taken
  v1::CacheEvents events_;
  int next_event_ = 0;  // of events_
  std::unique_ptr<Call> call_;
  bool is_starting_ = false;  // the start of call_ is in progress
  bool is_ending_ = false;    // its Finish is
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_EVENT_STREAM_H_
