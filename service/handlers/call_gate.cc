#include "service/handlers/call_gate.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status_macros.h"
#include "service/base/guarded.h"
#include "service/base/log.h"
#include "service/base/refusal.h"

namespace pqcached::service {

using kvstore::MutexLock;
using kvstore::SteadyTime;

namespace {

constexpr char kBootField[] = "pqcached-boot";  // the metadata that names the worker
constexpr char kForeignSession[] = "pqcached-session";
constexpr char kTokenMetadata[] = "authorization";
constexpr char kForeignTenant[] = "open.tenant";

// Returns whether the code means a failure of the sidecar and not of the caller.
bool IsServerFault(absl::StatusCode code) {
  return code == absl::StatusCode::kInternal || code == absl::StatusCode::kUnknown ||
         code == absl::StatusCode::kDataLoss;
}

// Checks whether the table of rpcs has a role for which the call may arrive without TLS.
absl::Status CheckDoor(Rpc rpc, Door door) {
  const RpcRule& rule = RuleOf(rpc);
  if (door == Door::kAdminSocket) {
    if (rule.operators) return absl::OkStatus();
    return PermissionDenied(
        "", absl::StrCat(rule.name, " needs a session, which the admin socket does not have"));
  }
  if (!rule.anyone && !rule.tenant) {
    return PermissionDenied("", absl::StrCat(rule.name, " is for operators, on the admin socket"));
  }
  if (door == Door::kTcp && !rule.tcp) {
    return PermissionDenied("", absl::StrCat(rule.name, " is not served over TCP without TLS"));
  }
  return absl::OkStatus();
}

// Checks whether the table of rpcs has the call for this caller over TLS.
absl::Status CheckIdentity(Rpc rpc, const Identity& identity) {
  const RpcRule& rule = RuleOf(rpc);
  bool allowed = false;
  switch (identity.kind) {
    case Identity::Kind::kTenant:
      allowed = rule.anyone || rule.tenant;
      break;
    case Identity::Kind::kOperator:
      allowed = rule.operators;
      break;
    case Identity::Kind::kPeer:
      allowed = rule.peers;
      break;
  }
  if (allowed) return absl::OkStatus();
  return PermissionDenied("", absl::StrCat(rule.name, " is not for ", IdentityText(identity)));
}

}  // namespace

CallGate::CallGate(const Config& config, std::string boot_id, Sessions& sessions, RpcStats& stats,
                   Log& log)
    : boot_id_(std::move(boot_id)),
      default_timeout_(config.default_timeout),
      max_timeout_(config.max_timeout),
      sessions_(sessions),
      stats_(stats),
      log_(log),
      shortages_(log),
      denials_(log, "call_denied") {}

absl::Status CallGate::CheckBoot(absl::string_view meant) const {
  if (meant.empty() || meant == boot_id_) return absl::OkStatus();
  return Aborted(kBootField,
                 absl::StrCat("the call is addressed to another worker; this worker is ", boot_id_),
                 kRetryConflict);
}

absl::StatusOr<Identity> CallGate::Identify(const Arrival& arrival) const {
  absl::string_view token = arrival.authorization;
  if (token.empty()) {
    if (arrival.certificate != nullptr) return *arrival.certificate;
    return Unauthenticated(kTokenMetadata, "the client has neither a certificate nor a token");
  }
  if (!absl::ConsumePrefix(&token, "Bearer ")) {
    return Unauthenticated(kTokenMetadata, "must be \"Bearer TOKEN\"");
  }
  if (tokens_ == nullptr) return Unauthenticated(kTokenMetadata, "this sidecar has no token_file");
  ASSIGN_OR_RETURN(Identity identity, tokens_->Find(token));
  if (arrival.certificate == nullptr || *arrival.certificate == identity) return identity;
  return PermissionDenied(kTokenMetadata, absl::StrCat("the token is of ", IdentityText(identity),
                                                       ", and the client's certificate of ",
                                                       IdentityText(*arrival.certificate)));
}

absl::Status CallGate::Authorize(const Arrival& arrival, Call& call) const {
  std::optional<Identity> identity;
  if (arrival.door == Door::kTls) {
    ASSIGN_OR_RETURN(identity, Identify(arrival));
    RETURN_IF_ERROR(CheckIdentity(call.rpc, *identity));
    if (identity->kind == Identity::Kind::kPeer) call.role = Role::kPeer;
    if (identity->kind == Identity::Kind::kOperator) call.role = Role::kOperator;
  } else {
    RETURN_IF_ERROR(CheckDoor(call.rpc, arrival.door));
    if (arrival.door == Door::kAdminSocket) call.role = Role::kOperator;
  }
  if (call.role != Role::kAnyone || RuleOf(call.rpc).anyone) return absl::OkStatus();
  ASSIGN_OR_RETURN(Session session, sessions_.Find(arrival.session_token));
  if (identity.has_value() && session.tenant != identity->name) {
    return PermissionDenied(kForeignSession, absl::StrCat("the session is not of the tenant of ",
                                                          IdentityText(*identity)));
  }
  call.token = std::string(arrival.session_token);
  call.session = std::move(session);
  call.role = Role::kTenant;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Identity>> CallGate::AuthorizeSession(const Arrival& arrival) const {
  std::optional<Identity> identity;
  if (arrival.door != Door::kTls) {
    RETURN_IF_ERROR(CheckDoor(Rpc::kSession, arrival.door));
    return identity;
  }
  ASSIGN_OR_RETURN(identity, Identify(arrival));
  RETURN_IF_ERROR(CheckIdentity(Rpc::kSession, *identity));
  return identity;
}

void CallGate::NoteDenied(Rpc rpc, Door door, absl::string_view peer, const absl::Status& status) {
  if (door != Door::kTls) return;
  const std::string field = FieldOf(status);
  if (absl::IsPermissionDenied(status)) {
    const bool is_tenants = field == kForeignSession || field == kForeignTenant;
    denials_.Note(is_tenants ? "wrong_tenant" : "wrong_identity", peer,
                  absl::StrCat(RpcName(rpc), ": ", status.message()));
  } else if (absl::IsUnauthenticated(status) && field == kTokenMetadata) {
    denials_.Note("no_identity", peer, absl::StrCat(RpcName(rpc), ": ", status.message()));
  }
}

absl::StatusOr<Call> CallGate::Begin(Rpc rpc, Arrival arrival) {
  const RpcRule& rule = RuleOf(rpc);
  Call call;
  call.rpc = rpc;
  call.peer = std::move(arrival.peer);
  call.request = std::move(arrival.request);
  call.is_cancelled = std::move(arrival.is_cancelled);
  call.started = SteadyTime::Now();
  const bool has_deadline = arrival.deadline != SteadyTime::InfiniteFuture();
  // The default is max_timeout for builds, because the duration of a build is not known, and for
  // streams of events, which do not end by themselves.
  const bool is_long = rpc == Rpc::kBuildIndex || rpc == Rpc::kWatchEvents;
  const absl::Duration without = is_long ? max_timeout_ : default_timeout_;
  call.deadline = std::min(has_deadline ? arrival.deadline : call.started + without,
                           call.started + max_timeout_);
  absl::Status status = call.Check();
  if (status.ok()) status = CheckBoot(arrival.boot_id);
  if (status.ok()) {
    status = Authorize(arrival, call);
    NoteDenied(rpc, arrival.door, call.peer, status);
  }
  if (status.ok() && refuses_new_work() && rule.starts_work) {
    status = Unavailable("", "the sidecar is draining: it admits no new sequences", kRetryMemory);
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
  shortages_.Note(RpcName(call.rpc), status);
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
  if (RuleOf(call.rpc).audited) Audit(call, status);
  if (call.rpc == Rpc::kBuildIndex) builds_in_flight_.fetch_sub(1, std::memory_order_relaxed);
  const MutexLock lock(&mutex_);
  if (--in_flight_count_ == 0) ended_.SignalAll();
}

void CallGate::Audit(const Call& call, const absl::Status& status) const {
  log_.Audit(RpcName(call.rpc), {{"role", RoleName(call.role)},
                                 {"peer", call.peer},
                                 {"tenant", call.session.tenant},
                                 {"session", call.session.id},
                                 {"request", call.request},
                                 {"status", StatusName(status.code())}});
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
