// Calls runs the rpcs that arrive by gRPC: it admits them at the gate, runs their work on its own
// threads, and sends their status.
//
// Work never runs on gRPC's threads: it runs on the serving threads, or, for builds, which take
// long, and for operators, on threads of their own. So operators reach a sidecar whose threads are
// all busy.
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

namespace grpc {
class CallbackServerContext;
class ServerUnaryReactor;
}  // namespace grpc

namespace pqcached::service {

// The server through which calls arrive.
struct Entrance {
  bool admin = false;  // on the admin socket
  // Returns the peer of an admin connection for the audit log, by its name in gRPC.
  std::function<std::string(const std::string& peer)> describe_peer = {};
};

class Calls {
 public:
  Calls(const Config& config, CallGate& gate);
  ~Calls();

  // Runs `work` on a serving thread, or for operators on a thread of their own, and finishes the
  // call with its status. Requests and responses live until then. `request` is the text of an
  // audited one.
  //
  // Errors before the work starts: those of CallGate::Begin, and kResourceExhausted (too many calls
  // wait).
  grpc::ServerUnaryReactor* Unary(grpc::CallbackServerContext* context, Rpc rpc,
                                  const Entrance& entrance, CallGate::Work work,
                                  std::string request = {});

  // Begins the call of a stream at the gate. `context` must live until the call is finished.
  absl::StatusOr<Call> Begin(grpc::CallbackServerContext* context, Rpc rpc,
                             const Entrance& entrance, std::string request = {});
  CallGate& gate() { return gate_; }

  // Run the task on a thread for serving, for builds, or for operators.
  //
  // Errors: kResourceExhausted  too many calls wait
  absl::Status RunServing(Executor::Task task, Executor::Lane lane = Executor::Lane::kBrief);
  absl::Status RunBuild(Executor::Task task);
  absl::Status RunOperator(Executor::Task task);
  // Runs a task that must run on a serving thread; never refuses.
  void RunCleanup(Executor::Task task) { serving_->Run(std::move(task)); }
  // Returns the serving threads, until Stop.
  Executor& serving() { return *serving_; }

  // Returns the timers of the calls. Outlives the calls.
  Alarms& alarms() { return alarms_; }

  // Finishes the accepted tasks and stops the threads.
  //
  // REQUIRES: no further call begins or runs.
  void Stop();

 private:
  absl::Status Refused() const;

  CallGate& gate_;
  const size_t max_pending_calls_;
  Alarms alarms_;
  std::unique_ptr<Executor> serving_;
  std::unique_ptr<Executor> builds_;
  std::unique_ptr<Executor> operators_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_CALLS_H_
