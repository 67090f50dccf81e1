// CallGate admits every call and records its end: role, session, deadline, drain, counters, log.
//
// A *call* is one rpc in flight. During a drain new calls are refused and calls in flight may end.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_HANDLERS_CALL_GATE_H_
#define PQCACHED_SERVICE_HANDLERS_CALL_GATE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"
#include "service/base/limited_log.h"
#include "service/base/shortage_log.h"
#include "service/config/config.h"
#include "service/handlers/caller.h"
#include "service/handlers/rpc_stats.h"
#include "service/session/identity.h"
#include "service/session/sessions.h"
#include "service/session/token_file.h"

namespace pqcached::service {

struct Call : Caller {
  Rpc rpc = Rpc::kSession;
  kvstore::SteadyTime started;
  std::string peer;     // for the audit log: "uid=0 pid=77", or an address
  std::string request;  // what an audited call asks for
};

class CallGate {
 public:
  using Work = std::function<absl::Status(const Call& call)>;

  // A call as it arrives. The texts are used during Begin only.
  struct Arrival {
    Door door = Door::kSocket;
    absl::string_view session_token;
    absl::string_view boot_id;  // the worker that the caller means; empty = any
    kvstore::SteadyTime deadline = kvstore::SteadyTime::InfiniteFuture();  // infinite: the default
    std::function<bool()> is_cancelled = {};
    // Those of a TLS connection: the identity in the client's certificate, null = none, and the
    // metadata `authorization` of the call, "Bearer TOKEN".
    const Identity* certificate = nullptr;
    absl::string_view authorization = {};
    std::string peer = {};     // as in Call
    std::string request = {};  // as in Call
  };

  // `boot_id` names this worker. A call that means another worker is refused.
  CallGate(const Config& config, std::string boot_id, Sessions& sessions, RpcStats& stats,
           Log& log);

  // Sets the tokens of clients over TLS, which outlive the gate; called before the first call.
  void SetTokens(TokenFile* tokens) { tokens_ = tokens; }

  // Checks whether the caller may open a session, and returns its identity, which only callers over
  // TLS have.
  //
  // Errors: those of Begin that concern the role
  absl::StatusOr<std::optional<Identity>> AuthorizeSession(const Arrival& arrival) const;
  // Writes a refusal to the log, if it concerns the identity of a caller over TLS. `peer` is its
  // address. Begin does so by itself.
  void NoteDenied(Rpc rpc, Door door, absl::string_view peer, const absl::Status& status);

  // Checks and counts a call. Each successful Begin is followed by one End; a failed Begin has
  // already been counted.
  //
  // Errors: kPermissionDenied (the table of rpcs, or the session is of another tenant than the
  // caller), kUnauthenticated (no session or no identity), kDeadlineExceeded, kCancelled,
  // kUnavailable (draining), kAborted (the call means another worker: leases and staging slots
  // belong to one worker).
  absl::StatusOr<Call> Begin(Rpc rpc, Arrival arrival);
  void End(const Call& call, const absl::Status& status);

  // Runs the work of a call that has begun, if its caller still waits, and ends the call. Returns
  // the status of the call: an exception of `work` becomes one, too.
  absl::Status Run(const Call& call, const Work& work);

  // Refuses new calls and waits for the calls in flight to end, at most until `until`.
  void Drain(kvstore::SteadyTime until);
  bool draining() const;

  // While `refuses_new_work` is true, calls that start new work fail with kUnavailable
  // ("draining").
  void SetRefuseNewWork(bool refuses_new_work) {
    refuses_new_work_.store(refuses_new_work, std::memory_order_relaxed);
  }
  bool refuses_new_work() const { return refuses_new_work_.load(std::memory_order_relaxed); }
  // Returns the number of calls that have begun and not ended.
  size_t in_flight_count() const;
  // Returns the number of BuildIndex calls that have begun and not ended.
  uint32_t builds_in_flight() const { return builds_in_flight_.load(std::memory_order_relaxed); }

 private:
  absl::Status CheckBoot(absl::string_view meant) const;
  // Sets the role of the caller, with its session, or refuses it.
  absl::Status Authorize(const Arrival& arrival, Call& call) const;
  // Returns the identity of a caller over TLS.
  absl::StatusOr<Identity> Identify(const Arrival& arrival) const;
  void Audit(const Call& call, const absl::Status& status) const;

  const std::string boot_id_;
  const absl::Duration default_timeout_;
  const absl::Duration max_timeout_;
  Sessions& sessions_;
  RpcStats& stats_;
  Log& log_;
  ShortageLog shortages_;
  LimitedLog denials_;  // of callers over TLS
  TokenFile* tokens_ = nullptr;
  mutable kvstore::Mutex mutex_;
  kvstore::CondVar ended_;  // signalled when in_flight_count_ becomes 0
  size_t in_flight_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<bool> refuses_new_work_ = false;
  std::atomic<uint32_t> builds_in_flight_ = 0;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_CALL_GATE_H_
