#include "service/handlers/call_gate.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/base/guarded.h"
#include "service/base/log.h"
#include "service/base/refusal.h"

namespace pqcached::service {

using kvstore::MutexLock;
using kvstore::SteadyTime;

namespace {

constexpr char kBootField[] = "pqcached-boot";  // the metadata that names the worker

// Returns whether the rpc starts work for which a drain would have to wait.
bool StartsNewWork(Rpc rpc) {
  switch (rpc) {
    case Rpc::kOpenCache:
    case Rpc::kCreateSequence:
    case Rpc::kForkSequence:
    case Rpc::kIngest:
    case Rpc::kCommit:
    case Rpc::kAdmit:
      return true;
    default:
      return false;
  }
}

// Returns whether the code means a failure of the sidecar and not of the caller.
bool IsServerFault(absl::StatusCode code) {
  return code == absl::StatusCode::kInternal || code == absl::StatusCode::kUnknown ||
         code == absl::StatusCode::kDataLoss;
}

}  // namespace

CallGate::CallGate(const Config& config, std::string boot_id, Sessions& sessions, RpcStats& stats,
                   Log& log)
    : boot_id_(std::move(boot_id)),
      default_timeout_(config.default_timeout),
      max_timeout_(config.max_timeout),
      sessions_(sessions),
      stats_(stats),
      log_(log) {}

absl::Status CallGate::CheckBoot(absl::string_view meant) const {
  if (meant.empty() || meant == boot_id_) return absl::OkStatus();
  return Aborted(kBootField,
                 absl::StrCat("the call is addressed to another worker; this worker is ", boot_id_),
                 kRetryConflict);
}

absl::StatusOr<Call> CallGate::Begin(Rpc rpc, Access access, Arrival arrival) {
  Call call;
  call.rpc = rpc;
  call.is_cancelled = std::move(arrival.is_cancelled);
  call.started = SteadyTime::Now();
  const bool has_deadline = arrival.deadline != SteadyTime::InfiniteFuture();
  // The default for builds is max_timeout, because the duration of a build is not known.
  const absl::Duration without = rpc == Rpc::kBuildIndex ? max_timeout_ : default_timeout_;
  call.deadline = std::min(has_deadline ? arrival.deadline : call.started + without,
                           call.started + max_timeout_);
  absl::Status status = call.Check();
  if (status.ok() && refuses_new_work() && StartsNewWork(rpc)) {
    status = Unavailable("", "the sidecar is draining: it admits no new sequences", kRetryMemory);
  }
  if (status.ok()) status = CheckBoot(arrival.boot_id);
  if (status.ok() && access == Access::kSession) {
    call.token = std::string(arrival.session_token);
    absl::StatusOr<Session> session = sessions_.Find(call.token);
    status = session.status();
    if (session.ok()) call.session = *std::move(session);
  }
  if (status.ok()) {
    const MutexLock lock(&mutex_);
    if (draining_) {
      status = Unavailable("", "the sidecar is shutting down", kRetryMemory);
    } else {
      ++in_flight_count_;
    }
  }
  if (status.ok()) {
    if (rpc == Rpc::kBuildIndex) builds_in_flight_.fetch_add(1, std::memory_order_relaxed);
    return call;
  }
  stats_.Record(rpc, status.code(), SteadyTime::Now() - call.started);
  return status;
}

void CallGate::End(const Call& call, const absl::Status& status) {
  const absl::Duration elapsed = SteadyTime::Now() - call.started;
  stats_.Record(call.rpc, status.code(), elapsed);
  if (IsServerFault(status.code())) {
    log_.Error("call_failed", {{"rpc", RpcName(call.rpc)},
                               {"status", StatusName(status.code())},
                               {"tenant", call.session.tenant},
                               {"session", call.session.id},
                               {"message", status.message()}});
  } else if (!status.ok()) {
    log_.Debug("call_refused", {{"rpc", RpcName(call.rpc)},
                                {"status", StatusName(status.code())},
                                {"session", call.session.id},
                                {"message", status.message()}});
  }
  if (call.rpc == Rpc::kBuildIndex) builds_in_flight_.fetch_sub(1, std::memory_order_relaxed);
  const MutexLock lock(&mutex_);
  if (--in_flight_count_ == 0) ended_.SignalAll();
}

absl::Status CallGate::Run(const Call& call, const Work& work) {
  absl::Status status = call.Check();
  if (status.ok()) status = Guarded([&] { return work(call); });
  End(call, status);
  return status;
}

void CallGate::Drain(SteadyTime until) {
  const MutexLock lock(&mutex_);
  draining_ = true;
  while (in_flight_count_ > 0 && SteadyTime::Now() < until) ended_.WaitUntil(&mutex_, until);
}

size_t CallGate::in_flight_count() const {
  const MutexLock lock(&mutex_);
  return in_flight_count_;
}

bool CallGate::draining() const {
  const MutexLock lock(&mutex_);
  return draining_;
}

}  // namespace pqcached::service
