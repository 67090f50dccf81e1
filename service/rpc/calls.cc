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
constexpr uint32_t kOperatorThreads = 2;  // the self-test may occupy one
constexpr char kBootMetadata[] = "pqcached-boot";

Executor::Lane LaneOf(Rpc rpc) {
  return rpc == Rpc::kCommit ? Executor::Lane::kBulk : Executor::Lane::kBrief;
}

absl::string_view MetadataOf(const grpc::CallbackServerContext& context, const char* key) {
  const auto found = context.client_metadata().find(key);
  if (found == context.client_metadata().end()) return "";
  return {found->second.data(), found->second.size()};
}

Door DoorOf(const grpc::CallbackServerContext& context, const Entrance& entrance) {
  if (entrance.admin) return Door::kAdminSocket;
  const std::string peer = context.peer();
  const bool tcp = absl::StartsWith(peer, "ipv4:") || absl::StartsWith(peer, "ipv6:");
  return tcp ? Door::kTcp : Door::kSocket;
}

}  // namespace

Calls::Calls(const Config& config, CallGate& gate)
    : gate_(gate),
      max_pending_calls_(config.max_pending_calls),
      serving_(std::make_unique<Executor>(
          Executor::Options{.threads = CallThreadsOf(config),
                            .bulk_threads = std::max(1u, CallThreadsOf(config) / 2),
                            .max_pending = config.max_pending_calls})),
      builds_(std::make_unique<Executor>(Executor::Options{
          .threads = config.max_builds, .max_pending = config.max_pending_calls})),
      operators_(std::make_unique<Executor>(Executor::Options{
          .threads = kOperatorThreads, .max_pending = config.max_pending_calls})) {}

Calls::~Calls() = default;

grpc::ServerUnaryReactor* Calls::Unary(grpc::CallbackServerContext* context, Rpc rpc,
                                       const Entrance& entrance, CallGate::Work work,
                                       std::string request) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  absl::StatusOr<Call> call = Begin(context, rpc, entrance, std::move(request));
  if (!call.ok()) {
    reactor->Finish(ToGrpc(call.status()));
    return reactor;
  }
  // Shared with the task, which std::function must be able to copy.
  const auto begun = std::make_shared<Call>(*std::move(call));
  const auto carry_out = [this, reactor, begun, work = std::move(work)] {
    reactor->Finish(ToGrpc(gate_.Run(*begun, work)));
  };
  const absl::Status taken =
      entrance.admin ? RunOperator(carry_out) : RunServing(carry_out, LaneOf(rpc));
  if (!taken.ok()) {
    gate_.End(*begun, taken);
    reactor->Finish(ToGrpc(taken));
  }
  return reactor;
}

absl::StatusOr<Call> Calls::Begin(grpc::CallbackServerContext* context, Rpc rpc,
                                  const Entrance& entrance, std::string request) {
  const bool audited = RuleOf(rpc).audited;
  return gate_.Begin(
      rpc,
      {.door = DoorOf(*context, entrance),
       .session_token = MetadataOf(*context, kSessionMetadata),
       .boot_id = MetadataOf(*context, kBootMetadata),
       .deadline = SteadyTimeOf(context->raw_deadline()),
       .is_cancelled = [context] { return context->IsCancelled(); },
       .peer = audited && entrance.admin ? entrance.describe_peer(context->peer()) : std::string(),
       .request = std::move(request)});
}

absl::Status Calls::Refused() const {
  return ResourceExhausted("max_pending_calls",
                           absl::StrCat(max_pending_calls_, " calls are already waiting"),
                           kRetryQueue);
}

absl::Status Calls::RunServing(Executor::Task task, Executor::Lane lane) {
  return serving_->TryRun(std::move(task), lane) ? absl::OkStatus() : Refused();
}

absl::Status Calls::RunOperator(Executor::Task task) {
  return operators_->TryRun(std::move(task)) ? absl::OkStatus() : Refused();
}

absl::Status Calls::RunBuild(Executor::Task task) {
  return builds_->TryRun(std::move(task)) ? absl::OkStatus() : Refused();
}

void Calls::Stop() {
  operators_.reset();
  builds_.reset();
  serving_.reset();
}

}  // namespace pqcached::service
