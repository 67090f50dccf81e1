#include "service/rpc/calls.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "service/base/refusal.h"
#include "service/rpc/grpc_status.h"

namespace pqcached::service {
namespace {

constexpr char kSessionMetadata[] = "pqcached-session";
// Answers of max_message_bytes that clients of one tenant may leave unread.
constexpr size_t kUnreadAnswers = 8;
constexpr uint32_t kOperatorThreads = 2;  // the self-test may occupy one
constexpr char kBootMetadata[] = "pqcached-boot";
constexpr char kTokenMetadata[] = "authorization";

Lane LaneOf(Rpc rpc) { return rpc == Rpc::kCommit ? Lane::kBulk : Lane::kBrief; }

absl::string_view MetadataOf(const grpc::CallbackServerContext& context, const char* key) {
  const auto found = context.client_metadata().find(key);
  if (found == context.client_metadata().end()) return "";
  return {found->second.data(), found->second.size()};
}

}  // namespace

CallGate::Arrival ArrivalOf(const grpc::CallbackServerContext& context, const Entrance& entrance,
                            const TlsClient* client) {
  CallGate::Arrival arrival;
  arrival.door = entrance.door;
  arrival.session_token = MetadataOf(context, kSessionMetadata);
  if (client == nullptr) return arrival;
  if (client->identity.has_value()) arrival.certificate = &*client->identity;
  arrival.authorization = MetadataOf(context, kTokenMetadata);
  arrival.peer = client->address;
  return arrival;
}

Calls::Calls(const Config& config, const TenantLimitTable& limits, CallGate& gate)
    : gate_(gate),
      max_pending_calls_(config.max_pending_calls),
      max_unread_(config.stream_timeout),
      unread_(kUnreadAnswers * config.max_message_bytes),
      limits_(limits) {
  const uint32_t threads = CallThreadsOf(config);
  const uint32_t half = std::max(1u, threads / 2);
  // One tenant leaves a quarter of the threads, so that another one finds a free thread at once.
  const uint32_t most = threads - threads / 4;
  const auto share_of_calls = [&limits, most](const std::string& tenant) {
    if (tenant.empty()) return TenantShare{};
    const TenantLimits its = limits.Of(tenant);
    return TenantShare{
        .weight = static_cast<double>(its.weight), .max_running = most, .max_waiting = its.calls};
  };
  const auto share_of_builds = [&limits](const std::string& tenant) {
    if (tenant.empty()) return TenantShare{};
    const TenantLimits its = limits.Of(tenant);
    return TenantShare{.weight = static_cast<double>(its.weight),
                       .max_running = static_cast<uint32_t>(its.builds),
                       .max_waiting = its.calls};
  };
  const size_t max_waiting = config.max_pending_calls;
  serving_ = std::make_unique<Executor>(Executor::Options{
      threads, {.max_waiting = max_waiting, .max_bulk = half, .share_of = share_of_calls}});
  builds_ = std::make_unique<Executor>(Executor::Options{
      config.max_builds, {.max_waiting = max_waiting, .share_of = share_of_builds}});
  operators_ =
      std::make_unique<Executor>(Executor::Options{kOperatorThreads, {.max_waiting = max_waiting}});
}

Calls::~Calls() = default;

grpc::ServerUnaryReactor* Calls::Unary(grpc::CallbackServerContext* context, Rpc rpc,
                                       const Entrance& entrance, CallGate::Work work,
                                       std::string request, std::function<size_t()> answer_bytes) {
  auto* const reactor = new UnaryCall(context, alarms_, unread_);  // destroyed by its OnDone
  absl::StatusOr<Call> call = Begin(context, rpc, entrance, std::move(request));
  if (!call.ok()) {
    reactor->FinishWithin(max_unread_, call.status());
    return reactor;
  }
  // Shared with the task, which std::function must be able to copy.
  const auto begun = std::make_shared<Call>(*std::move(call));
  const auto counted = [this, reactor, begun, work = std::move(work),
                        answer_bytes = std::move(answer_bytes)](const Call& running) {
    absl::Status done = work(running);
    if (!done.ok() || !answer_bytes) return done;
    const size_t bytes = answer_bytes();
    bool is_crowded = false;
    absl::Status taken = unread_.Take(begun->session.tenant, bytes, &is_crowded);
    if (taken.ok()) reactor->SetCounted(begun->session.tenant, bytes, is_crowded);
    return taken;
  };
  const auto carry_out = [this, reactor, begun, counted] {
    reactor->FinishWithin(max_unread_, gate_.Run(*begun, counted));
  };
  const auto refuse = [this, reactor, begun](const absl::Status& status) {
    gate_.End(*begun, status);
    reactor->FinishWithin(max_unread_, status);
  };
  QueuedTask task{.tenant = begun->session.tenant,
                  .lane = LaneOf(rpc),
                  .run = carry_out,
                  .deadline = begun->deadline,
                  .expire = [refuse] { refuse(WaitedTooLong()); }};
  const absl::Status taken =
      begun->role == Role::kOperator ? RunOperator(std::move(task)) : RunServing(std::move(task));
  if (!taken.ok()) refuse(taken);
  return reactor;
}

absl::StatusOr<Call> Calls::Begin(grpc::CallbackServerContext* context, Rpc rpc,
                                  const Entrance& entrance, std::string request) {
  std::shared_ptr<const TlsClient> client;
  if (entrance.door == Door::kTls) {
    client = entrance.client_of(context->peer());
    if (client == nullptr) return Cancelled("the connection has ended");
  }
  CallGate::Arrival arrival = ArrivalOf(*context, entrance, client.get());
  arrival.boot_id = MetadataOf(*context, kBootMetadata);
  arrival.deadline = SteadyTimeOf(context->raw_deadline());
  arrival.is_cancelled = [context] { return context->IsCancelled(); };
  if (RuleOf(rpc).audited && entrance.door == Door::kAdminSocket) {
    arrival.peer = entrance.describe_peer(context->peer());
  }
  arrival.request = std::move(request);
  return gate_.Begin(rpc, std::move(arrival));
}

absl::Status Calls::WaitedTooLong() {
  return DeadlineExceeded("", "the deadline has passed while the call waited for a thread");
}

absl::Status Calls::RunOn(Executor& executor, QueuedTask task) {
  const std::string tenant = task.tenant;
  switch (executor.TryRun(std::move(task))) {
    case FairQueue::Answer::kTaken:
      break;
    case FairQueue::Answer::kFull:
      return ResourceExhausted("max_pending_calls",
                               absl::StrCat(max_pending_calls_, " calls are already waiting"),
                               kRetryQueue);
    case FairQueue::Answer::kTenantFull:
      return ResourceExhausted("tenant_limits.calls",
                               absl::StrCat(limits_.Of(tenant).calls, " calls of tenant ", tenant,
                                            " are already waiting"),
                               kRetryQueue);
  }
  return absl::OkStatus();
}

absl::Status Calls::RunServing(QueuedTask task) { return RunOn(*serving_, std::move(task)); }

absl::Status Calls::RunOperator(QueuedTask task) { return RunOn(*operators_, std::move(task)); }

absl::Status Calls::RunBuild(QueuedTask task) { return RunOn(*builds_, std::move(task)); }

void Calls::Stop() {
  operators_.reset();
  builds_.reset();
  serving_.reset();
}

}  // namespace pqcached::service
