// Calls runs every rpc from its first check to its status: session, deadline, thread, counters,
// log.
//
// A *call* is one rpc in flight. Its work runs on threads of this class, never on gRPC's: on the
// serving threads, or, for builds, which take long, on threads of their own. During a drain new
// calls are refused and calls in flight may end.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_RPC_CALLS_H_
#define PQCACHED_SERVICE_RPC_CALLS_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"
#include "service/base/alarms.h"
#include "service/base/executor.h"
#include "service/config/config.h"
#include "service/handlers/rpc_stats.h"
#include "service/session/sessions.h"

namespace grpc {
class CallbackServerContext;
class ServerUnaryReactor;
class Status;
}  // namespace grpc

namespace pqcached::service {

class Log;

enum class Access {
  kSession,  // needs the metadata `pqcached-session`
  kAnyone,
};

struct Call {
  Rpc rpc = Rpc::kSession;
  grpc::CallbackServerContext* context = nullptr;  // alive until the call is finished
  std::string token;                               // kSession only, like session
  Session session;
  kvstore::SteadyTime started;
  kvstore::SteadyTime deadline;

  // Checks whether the caller still waits for the answer.
  //
  // Errors: kDeadlineExceeded, kCancelled  the caller no longer waits
  absl::Status Check() const;
};

class Calls {
 public:
  using Work = std::function<absl::Status(const Call& call)>;

  // `boot_id` names this worker. A call whose metadata `pqcached-boot` names another worker is
  // refused.
  Calls(const Config& config, std::string boot_id, Sessions& sessions, RpcStats& stats, Log& log);
  ~Calls();

  // Runs `work` on a serving thread and finishes the call with its status. Requests and responses
  // live until then.
  //
  // Errors before the work starts: kUnauthenticated, kDeadlineExceeded, kCancelled,
  // kResourceExhausted (too many calls wait), kUnavailable (draining), kAborted (the call names
  // another worker: leases and staging slots belong to one worker).
  grpc::ServerUnaryReactor* Unary(grpc::CallbackServerContext* context, Rpc rpc, Access access,
                                  Work work);

  // Finishes the call with kUnimplemented, naming the rpc.
  grpc::ServerUnaryReactor* Unimplemented(grpc::CallbackServerContext* context, Rpc rpc);

  // Checks and counts the call of a stream, as Unary does for its calls. Each successful Begin is
  // followed by one End; a failed Begin has already been counted.
  absl::StatusOr<Call> Begin(grpc::CallbackServerContext* context, Rpc rpc, Access access);
  void End(const Call& call, const absl::Status& status);

  // Run the task on a serving thread or on a build thread.
  //
  // Errors: kResourceExhausted  too many calls wait
  absl::Status RunServing(Executor::Task task, Executor::Lane lane = Executor::Lane::kBrief);
  absl::Status RunBuild(Executor::Task task);
  // Runs a task that must run on a serving thread; never refuses.
  void RunCleanup(Executor::Task task) { serving_->Run(std::move(task)); }
  // Returns the serving threads, until Stop.
  Executor& serving() { return *serving_; }

  // Returns the timers of the calls. Outlives the calls.
  Alarms& alarms() { return alarms_; }

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

  // Finishes the accepted tasks and stops the threads.
  //
  // REQUIRES: no further call begins or runs.
  void Stop();

 private:
  absl::Status Refused() const;

  const std::string boot_id_;
  const absl::Duration default_timeout_;
  const absl::Duration max_timeout_;
  const size_t max_pending_calls_;
  Sessions& sessions_;
  RpcStats& stats_;
  Log& log_;
  mutable kvstore::Mutex mutex_;
  kvstore::CondVar ended_;  // signalled when in_flight_count_ becomes 0
  size_t in_flight_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<bool> refuses_new_work_ = false;
  std::atomic<uint32_t> builds_in_flight_ = 0;
  Alarms alarms_;
  std::unique_ptr<Executor> serving_;
  std::unique_ptr<Executor> builds_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_CALLS_H_
