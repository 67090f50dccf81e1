#include "client/rpc/rpc_remote.h"

#include <grpc/support/time.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "client/rpc/refusal.h"
#include "client/rpc/wire.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

constexpr uint32_t kProtocolVersion = 1;
constexpr char kSessionKey[] = "pqcached-session";
constexpr char kBootKey[] = "pqcached-boot";
// A thread that waits for a connection checks at this interval that the session and its worker
// still exist.
constexpr std::chrono::milliseconds kSlice(50);
// A call may notice the sidecar's end a moment before the session's thread does.
constexpr std::chrono::milliseconds kSessionEndWait(100);

std::shared_ptr<grpc::Channel> MakeChannel(const char* endpoint,
                                           const std::shared_ptr<const Credentials>& credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Each client has its own connection: the end of the connection means the end of its session.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  if (credentials == nullptr) {
    return grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), arguments);
  }
  credentials->SetName(&arguments);
  return grpc::CreateCustomChannel(endpoint, credentials->channel(), arguments);
}

}  // namespace

// A jump of the wall clock can still have one effect: gRPC
// waits for its timers until a wall time, so after a jump back by an hour, a call that the sidecar
// does not answer ends up to an hour after its deadline. The sidecar answers by the deadline,
// whatever the clocks do.
gpr_timespec ToGrpc(Deadline deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(
      deadline - std::chrono::steady_clock::now());
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(left.count(), GPR_TIMESPAN));
}

RpcRemote::RpcRemote(const RemoteOptions& options, std::shared_ptr<const Credentials> credentials)
    : endpoint_(options.endpoint),
      credentials_(std::move(credentials)),
      timeout_(options.timeout_ms),
      remaining_ms_(options.remaining_ms),
      in_call_(options.in_call),
      channel_(MakeChannel(options.endpoint, credentials_)),
      bulk_channel_(MakeChannel(options.endpoint, credentials_)),
      kv_(v1::KvCache::NewStub(channel_)),
      admin_(v1::Admin::NewStub(channel_)),
      session_(*kv_, *channel_, credentials_.get()) {}

grpc::Status RpcRemote::Open(const RemoteOptions& options, const SecurityOptions& security,
                             RpcRemote** remote) {
  struct Deleter {
    void operator()(RpcRemote* opened) const { opened->Close(); }
  };
  std::shared_ptr<const Credentials> credentials;
  if (security.tls_ca != nullptr) RETURN_IF_ERROR(Credentials::Make(security, &credentials));
  std::unique_ptr<RpcRemote, Deleter> opened(new RpcRemote(options, std::move(credentials)));
  if (options.session_token) {
    opened->session_.Adopt(options);
    *remote = opened.release();
    return grpc::Status::OK;
  }
  if (options.admin) {
    opened->session_.OpenNone();
    *remote = opened.release();
    return grpc::Status::OK;
  }
  v1::SessionOpen open;
  open.set_client_name(options.client_name);
  open.set_tenant(options.tenant);
  open.set_protocol_version(kProtocolVersion);
  grpc::Status status = opened->session_.Open(open, opened->CallDeadline());
  if (!status.ok()) return PrefixText(opened->endpoint_, status);
  *remote = opened.release();
  return status;
}

pqc_status RpcRemote::Finish(const char* method, RefusalBuffer* error,
                             const std::function<grpc::Status()>& call) const noexcept {
  try {
    const grpc::Status status = session_.ended()
                                    ? Explain(method, {grpc::StatusCode::UNAVAILABLE, ""})
                                    : Explain(method, call());
    ToRefusal(status, error);
    return static_cast<pqc_status>(status.error_code());
  } catch (const std::bad_alloc&) {
    std::snprintf(error->text, sizeof(error->text), "the client is out of memory");
    return PQC_RESOURCE_EXHAUSTED;
  } catch (const std::exception& exception) {
    std::snprintf(error->text, sizeof(error->text), "%s", exception.what());
    return PQC_INTERNAL;
  }
}

grpc::Status RpcRemote::Explain(const char* method, const grpc::Status& status) const {
  switch (status.error_code()) {
    case grpc::StatusCode::ABORTED:
      return FieldOf(status) == kBootKey ? WorkerReplaced() : status;
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::UNAUTHENTICATED: {
      if (!session_.WaitEnded(kSessionEndWait)) return status;
      const grpc::Status end = session_.end_status();
      return Refuse(grpc::StatusCode::UNAVAILABLE, "",
                    endpoint_ + ": the session is lost, and its sequences with it (boot_id " +
                        session_.boot_id() + "): " +
                        (end.ok() ? std::string("the sidecar ended it") : end.error_message()));
    }
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return {status.error_code(),
              std::string(method) + ": no answer of " + endpoint_ + " within the deadline"};
    default:
      return status;
  }
}

void RpcRemote::Prepare(grpc::ClientContext* context, Deadline deadline, uint64_t boot_word) const {
  context->set_deadline(ToGrpc(deadline));
  if (credentials_ != nullptr) credentials_->AddToken(context);
  if (!session_.token().empty()) context->AddMetadata(kSessionKey, session_.token());
  if (boot_word == 0) return;
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(boot_word));
  context->AddMetadata(kBootKey, text);
}

grpc::Status RpcRemote::Connect(grpc::Channel& channel, Deadline deadline) const {
  for (;;) {
    if (!session_.WaitOpen(deadline)) {
      return Refuse(
          grpc::StatusCode::UNAVAILABLE, "",
          endpoint_ + ": the sidecar's worker has ended, and no new worker has started in time",
          kRetryMemory);
    }
    if (session_.ended()) return {grpc::StatusCode::UNAVAILABLE, ""};  // see Explain
    if (channel.GetState(true) == GRPC_CHANNEL_READY) return grpc::Status::OK;
    const auto slice = std::min<Deadline>(deadline, std::chrono::steady_clock::now() + kSlice);
    if (channel.WaitForConnected(ToGrpc(slice))) return grpc::Status::OK;
    const bool over = std::chrono::steady_clock::now() >= deadline;
    if (over || session_.ended() || (session_.adopted() && session_.WaitBroken({}))) {
      return Refuse(grpc::StatusCode::UNAVAILABLE, "", endpoint_ + ": no connection", kRetryMemory);
    }
  }
}

grpc::Status RpcRemote::Attempt(Repeat repeat, Deadline deadline,
                                const std::function<grpc::Status(const Context&)>& attempt,
                                uint64_t boot_word) const {
  std::chrono::milliseconds pause = kFirstPause;
  for (;;) {
    // Without a session there is no worker to wait for.
    if (!session_.token().empty()) RETURN_IF_ERROR(Connect(*channel_, deadline));
    (!in_call_ || in_call_() ? rpcs_ : background_rpcs_) += 1;
    const auto context = std::make_shared<grpc::ClientContext>();
    Prepare(context.get(), deadline, boot_word);
    grpc::Status status = attempt(context);
    if (status.error_code() != grpc::StatusCode::UNAVAILABLE || repeat == Repeat::kNever)
      return status;
    if (Remaining(deadline) <= pause || session_.WaitBroken(pause)) return status;
    pause = std::min(2 * pause, kLongestPause);
  }
}

uint64_t RpcRemote::PayloadBytes(uint64_t wanted_bytes) const {
  // The rest is room for the message's other fields.
  const uint64_t limit = session_.max_message_bytes();
  return limit == 0 ? wanted_bytes : std::min(wanted_bytes, limit - limit / 8);
}

pqc_status RpcRemote::CheckConnected(RefusalBuffer* error) noexcept {
  if (session_.ended()) {  // which Finish reports
    return Finish("CheckConnected", error, [] { return grpc::Status::OK; });
  }
  // A broken session resumes by its own thread, and an idle channel connects by this call.
  if (!session_.WaitBroken({}) &&
      channel_->GetState(/*try_to_connect=*/true) == GRPC_CHANNEL_READY) {
    return PQC_OK;
  }
  std::snprintf(error->text, sizeof(error->text),
                "%s: the sidecar's worker has ended, and no new worker has started yet",
                endpoint_.c_str());
  error->retry_ms = kvstore::kRetryConflict;
  return PQC_UNAVAILABLE;
}

void RpcRemote::Count(uint64_t* rpcs, uint64_t* background_rpcs) noexcept {
  *rpcs = rpcs_;
  *background_rpcs = background_rpcs_;
}

pqc_status RpcRemote::OpenCache(const pqc_cache_spec& caller_spec, uint64_t* cache_id,
                                RefusalBuffer* error) noexcept {
  return Finish("OpenCache", error, [&] {
    pqc_cache_spec spec;
    RETURN_IF_ERROR(ReadStruct(caller_spec, "spec", &spec));
    v1::OpenCacheRequest request;
    v1::OpenCacheResponse response;
    request.set_name(spec.name);
    request.set_model_fingerprint(spec.model_fingerprint);
    for (uint32_t i = 0; i < spec.group_count; ++i) {
      pqc_layer_group group;
      RETURN_IF_ERROR(ReadStruct(*ElementOf(spec.groups, i), "spec.groups", &group));
      ToWire(group, request.add_layer_groups());
    }
    request.set_capacity_bytes(spec.capacity_bytes);
    if (!ToWire(spec.default_index, request.mutable_default_index())) request.clear_default_index();
    if (spec.rank_group || spec.rank_count || spec.rank || spec.kv_head_begin || spec.layer_begin ||
        spec.numa_node) {
      v1::Rank* rank = request.mutable_rank();
      rank->set_group(spec.rank_group ? spec.rank_group : "");
      rank->set_rank(spec.rank);
      rank->set_rank_count(spec.rank_count);
      rank->set_kv_head_begin(spec.kv_head_begin);
      rank->set_layer_begin(spec.layer_begin);
      rank->set_numa_node(spec.numa_node);
    }
    const double* const prefill = spec.prefill_seconds;
    if (spec.prefill_measured || prefill[0] != 0 || prefill[1] != 0 || prefill[2] != 0) {
      v1::PrefillCost* cost = request.mutable_prefill_cost();
      cost->set_measured(spec.prefill_measured != 0);
      cost->set_seconds_per_token_squared(prefill[0]);
      cost->set_seconds_per_token(prefill[1]);
      cost->set_seconds(prefill[2]);
    }
    grpc::Status status = Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncOpenCache, context, request, &response);
    });
    *cache_id = response.cache_id();
    return status;
  });
}

pqc_status RpcRemote::DescribeSequence(uint64_t sequence_id, pqc_sequence_info* info,
                                       RefusalBuffer* error) noexcept {
  return Finish("DescribeSequence", error, [&] {
    v1::DescribeSequenceRequest request;
    v1::DescribeSequenceResponse response;
    request.set_sequence_id(sequence_id);
    grpc::Status status = Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*admin_, &v1::Admin::Stub::PrepareAsyncDescribeSequence, context, request,
                  &response);
    });
    const v1::SequenceDescription& described = response.sequence();
    pqc_sequence_info found = PQC_INIT(pqc_sequence_info);
    found.token_count = described.token_count();
    found.row_bytes = described.row_bytes();
    found.index_bytes = described.index_bytes();
    found.codebook_bytes = described.codebook_bytes();
    found.used_bytes = described.used_bytes();
    found.segment_count = static_cast<uint32_t>(described.segments_size());
    found.index_count = static_cast<uint32_t>(described.indexes_size());
    WriteStruct(found, info);
    return status;
  });
}

}  // namespace pqcached::client
