#include "service/rpc/calls.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kvstore/clock.h"
#include "service/base/guarded.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/rpc/grpc_status.h"
#include "service/wire/wire.h"

namespace pqcached::service {

using kvstore::MutexLock;
using kvstore::SteadyTime;

namespace {

constexpr char kSessionMetadata[] = "pqcached-session";
constexpr char kBootMetadata[] = "pqcached-boot";

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

Executor::Lane LaneOf(Rpc rpc) {
  return rpc == Rpc::kCommit ? Executor::Lane::kBulk : Executor::Lane::kBrief;
}

std::string MetadataOf(const grpc::CallbackServerContext& context, const char* key) {
  const auto found = context.client_metadata().find(key);
  if (found == context.client_metadata().end()) return "";
  return std::string(found->second.data(), found->second.size());
}

absl::Status CheckBoot(const grpc::CallbackServerContext& context, const std::string& boot_id) {
  const std::string meant = MetadataOf(context, kBootMetadata);
  if (meant.empty() || meant == boot_id) return absl::OkStatus();
  return Aborted(kBootMetadata,
                 absl::StrCat("the call is addressed to another worker; this worker is ", boot_id),
                 kRetryConflict);
}

// Returns whether the code means a failure of the sidecar and not of the caller.
bool IsServerFault(absl::StatusCode code) {
  return code == absl::StatusCode::kInternal || code == absl::StatusCode::kUnknown ||
         code == absl::StatusCode::kDataLoss;
}

}  // namespace

absl::Status Call::Check() const {
  if (SteadyTime::Now() >= deadline) return DeadlineExceeded("", "the deadline has passed");
  if (context->IsCancelled()) return Cancelled("the caller has cancelled the call");
  return absl::OkStatus();
}

Calls::Calls(const Config& config, std::string boot_id, Sessions& sessions, RpcStats& stats,
             Log& log)
    : boot_id_(std::move(boot_id)),
      default_timeout_(config.default_timeout),
      max_timeout_(config.max_timeout),
      max_pending_calls_(config.max_pending_calls),
      sessions_(sessions),
      stats_(stats),
      log_(log),
      serving_(std::make_unique<Executor>(
          Executor::Options{.threads = CallThreadsOf(config),
                            .bulk_threads = std::max(1u, CallThreadsOf(config) / 2),
                            .max_pending = config.max_pending_calls})),
      builds_(std::make_unique<Executor>(Executor::Options{
          .threads = config.max_builds, .max_pending = config.max_pending_calls})) {}

Calls::~Calls() = default;

grpc::ServerUnaryReactor* Calls::Unary(grpc::CallbackServerContext* context, Rpc rpc, Access access,
                                       Work work) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  absl::StatusOr<Call> call = Begin(context, rpc, access);
  if (!call.ok()) {
    reactor->Finish(ToGrpc(call.status()));
    return reactor;
  }
  // Shared with the task, which std::function must be able to copy.
  const auto begun = std::make_shared<Call>(*std::move(call));
  const auto carry_out = [this, reactor, begun, work = std::move(work)] {
    absl::Status status = begun->Check();
    if (status.ok()) status = Guarded([&] { return work(*begun); });
    End(*begun, status);
    reactor->Finish(ToGrpc(status));
  };
  const absl::Status taken = RunServing(carry_out, LaneOf(rpc));
  if (!taken.ok()) {
    End(*begun, taken);
    reactor->Finish(ToGrpc(taken));
  }
  return reactor;
}

grpc::ServerUnaryReactor* Calls::Unimplemented(grpc::CallbackServerContext* context, Rpc rpc) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  stats_.Record(rpc, absl::StatusCode::kUnimplemented, absl::ZeroDuration());
  reactor->Finish(ToGrpc(UnimplementedField(RpcName(rpc))));
  return reactor;
}

absl::StatusOr<Call> Calls::Begin(grpc::CallbackServerContext* context, Rpc rpc, Access access) {
  Call call;
  call.rpc = rpc;
  call.context = context;
  call.started = SteadyTime::Now();
  const SteadyTime asked = SteadyTimeOf(context->raw_deadline());
  const bool has_deadline = asked != SteadyTime::InfiniteFuture();
  // The default for builds is max_timeout, because the duration of a build is not known.
  const absl::Duration without = rpc == Rpc::kBuildIndex ? max_timeout_ : default_timeout_;
  call.deadline =
      std::min(has_deadline ? asked : call.started + without, call.started + max_timeout_);
  absl::Status status = call.Check();
  if (status.ok() && refuses_new_work() && StartsNewWork(rpc)) {
    status = Unavailable("", "the sidecar is draining: it admits no new sequences", kRetryMemory);
  }
  if (status.ok()) status = CheckBoot(*context, boot_id_);
  if (status.ok() && access == Access::kSession) {
    call.token = MetadataOf(*context, kSessionMetadata);
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

void Calls::End(const Call& call, const absl::Status& status) {
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

absl::Status Calls::Refused() const {
  return ResourceExhausted("max_pending_calls",
                           absl::StrCat(max_pending_calls_, " calls are already waiting"),
                           kRetryQueue);
}

absl::Status Calls::RunServing(Executor::Task task, Executor::Lane lane) {
  return serving_->TryRun(std::move(task), lane) ? absl::OkStatus() : Refused();
}

absl::Status Calls::RunBuild(Executor::Task task) {
  return builds_->TryRun(std::move(task)) ? absl::OkStatus() : Refused();
}

void Calls::Drain(SteadyTime until) {
  const MutexLock lock(&mutex_);
  draining_ = true;
  while (in_flight_count_ > 0 && SteadyTime::Now() < until) ended_.WaitUntil(&mutex_, until);
}

size_t Calls::in_flight_count() const {
  const MutexLock lock(&mutex_);
  return in_flight_count_;
}

bool Calls::draining() const {
  const MutexLock lock(&mutex_);
  return draining_;
}

void Calls::Stop() {
  builds_.reset();
  serving_.reset();
}

}  // namespace pqcached::service
