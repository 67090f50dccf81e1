// Calls runs the rpcs that arrive by gRPC: it admits them at the gate, runs their work on its own
// threads, and sends their status.
//
// Work never runs on gRPC's threads: it runs on the serving threads, or, for builds, which take
// long, and for operators, on threads of their own. So operators reach a sidecar whose threads are
// all busy. Tenants share the threads by weight, and none may occupy all of them; a call that waits
// for a thread is answered at its deadline.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_RPC_CALLS_H_
#define PQCACHED_SERVICE_RPC_CALLS_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/base/alarms.h"
#include "service/base/executor.h"
#include "service/config/config.h"
#include "service/handlers/call_gate.h"
#include "service/handlers/rpc_stats.h"
#include "service/rpc/unary_call.h"
#include "service/session/tenant_limit_table.h"
#include "service/tls/tls_gate.h"

namespace grpc {
class CallbackServerContext;
class ServerUnaryReactor;
}  // namespace grpc

namespace pqcached::service {

// The server through which calls arrive.
struct Entrance {
  Door door = Door::kSocket;
  // Returns the peer of a connection for the audit log, by its name in gRPC.
  std::function<std::string(const std::string& peer)> describe_peer = {};
  // Returns the client of a TLS connection; null when it has ended.
  std::function<std::shared_ptr<const TlsClient>(const std::string& peer)> client_of = {};
};

// Describes the caller at the gate. It refers to `context`, and to `client`, the client of a TLS
// connection, or null.
CallGate::Arrival ArrivalOf(const grpc::CallbackServerContext& context, const Entrance& entrance,
                            const TlsClient* client);

class Calls {
 public:
  // `limits` outlives the object.
  Calls(const Config& config, const TenantLimitTable& limits, CallGate& gate);
  ~Calls();

  // Runs `work` on a serving thread, or for operators on a thread of their own, and finishes the
  // call with its status. Requests and responses live until then. `request` is the text of an
  // audited one. `answer_bytes` returns the size of the answer after the work; empty: it is small.
  //
  // Errors before the work starts: those of CallGate::Begin, and kResourceExhausted (too many calls
  // wait). After it: kResourceExhausted (UnreadAnswers).
  grpc::ServerUnaryReactor* Unary(grpc::CallbackServerContext* context, Rpc rpc,
                                  const Entrance& entrance, CallGate::Work work,
                                  std::string request = {},
                                  std::function<size_t()> answer_bytes = {});

  // Begins the call of a stream at the gate. `context` must live until the call is finished.
  absl::StatusOr<Call> Begin(grpc::CallbackServerContext* context, Rpc rpc,
                             const Entrance& entrance, std::string request = {});
  CallGate& gate() { return gate_; }

  // Run the task on a thread for serving, for builds, or for operators.
  //
  // Errors: kResourceExhausted  too many calls wait, or too many of the tenant
  absl::Status RunServing(QueuedTask task);
  absl::Status RunBuild(QueuedTask task);
  absl::Status RunOperator(QueuedTask task);
  // Runs a task that must run on a serving thread; never refuses.
  void RunCleanup(const std::string& tenant, std::function<void()> task) {
    serving_->Run({.tenant = tenant, .lane = Lane::kBrief, .run = std::move(task)});
  }
  // Returns the answer to a call that has waited for a thread until its deadline.
  static absl::Status WaitedTooLong();
  // Return the number of calls, or of builds, of a tenant that wait, and that run.
  std::pair<size_t, uint32_t> CountCalls(const std::string& tenant) const {
    return serving_->CountsOf(tenant);
  }
  std::pair<size_t, uint32_t> CountBuilds(const std::string& tenant) const {
    return builds_->CountsOf(tenant);
  }
  // Returns the serving threads, until Stop.
  Executor& serving() { return *serving_; }

  // Returns the timers of the calls. Outlives the calls.
  Alarms& alarms() { return alarms_; }

  // Finishes the accepted tasks and stops the threads.
  //
  // REQUIRES: no further call begins or runs.
  void Stop();

 private:
  absl::Status RunOn(Executor& executor, QueuedTask task);

  CallGate& gate_;
  const size_t max_pending_calls_;
  const absl::Duration max_unread_;
  UnreadAnswers unread_;
  const TenantLimitTable& limits_;
  Alarms alarms_;
  std::unique_ptr<Executor> serving_;
  std::unique_ptr<Executor> builds_;
  std::unique_ptr<Executor> operators_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_CALLS_H_
