// A sidecar that misbehaves on demand: fake_sidecar SOCKET BEHAVIOUR. Prints "ready", then a line
// for each call, with the boot id of the worker that the call names, if any.
//
//   good            answers everything, with made-up numbers
//   flaky           every second call of a kind but Session gets UNAVAILABLE first, twice
//   unavailable     every call but Session and OpenCache gets UNAVAILABLE, always
//   hang            TopK, Ingest and BuildIndex never end by themselves
//   end-session     TopK ends the session and gets UNAVAILABLE
//   break-session   TopK breaks the session, whose second stream is CANCELLED; the third resumes it
//   forget-session  TopK gets UNAUTHENTICATED
//   new-worker      TopK is refused once, because it names the boot id of another worker
//   wrong-shape     answers have tensors of other shapes
//   no-open         the session's first event is a heartbeat
//   full-streams    WatchEvents gets RESOURCE_EXHAUSTED, but its first call DEADLINE_EXCEEDED, as a
//                   stream that has lasted long enough, and its fifth call an event
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>

#include "pqcached/v1/admin.grpc.pb.h"
#include "pqcached/v1/kv_cache.grpc.pb.h"
#include "pqcached/v1/status_details.pb.h"

namespace {

namespace v1 = pqcached::v1;
using grpc::ServerContext;
using grpc::Status;
using grpc::StatusCode;

constexpr uint32_t kKvHeads = 2, kQueryHeads = 4, kDim = 32, kCount = 3;

void Say(const std::string& line) {
  std::puts(line.c_str());
  std::fflush(stdout);
}

Status Refuse(StatusCode code, const std::string& field, const std::string& text) {
  v1::BadRequestDetail bad_request;
  auto* violation = bad_request.add_field_violations();
  violation->set_field(field);
  violation->set_description(text);
  v1::StatusDetails details;
  details.set_code(code);
  details.set_message(field + ": " + text);
  auto* detail = details.add_details();
  detail->set_type_url("type.googleapis.com/google.rpc.BadRequest");
  detail->set_value(bad_request.SerializeAsString());
  return {code, details.message(), details.SerializeAsString()};
}

// Returns the refusal of a call that names the boot id of another worker.
Status RefuseBootId() { return Refuse(StatusCode::ABORTED, "pqcached-boot", "not this worker's"); }

class FakeKvCache final : public v1::KvCache::Service {
 public:
  explicit FakeKvCache(std::string behaviour) : behaviour_(std::move(behaviour)) {}

  Status Session(ServerContext*,
                 grpc::ServerReaderWriter<v1::SessionEvent, v1::SessionRequest>* stream) override {
    v1::SessionRequest request;
    if (!stream->Read(&request)) return Status::OK;
    Say("Session " + request.open().tenant() + " " + request.open().client_name());
    if (behaviour_ == "break-session" && ++sessions_ == 2) return Status::CANCELLED;
    v1::SessionEvent event;
    if (behaviour_ == "no-open") {
      event.mutable_heartbeat();
    } else {
      event.mutable_opened()->set_session_token("the-token");
      event.mutable_opened()->set_boot_id("the-boot");
      event.mutable_opened()->set_max_message_bytes(8 << 20);
    }
    stream->Write(event);
    if (behaviour_ == "end-session") {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return end_session_; });
      return {StatusCode::ABORTED, "the fake ended it"};
    }
    if (behaviour_ == "break-session" && sessions_ == 1) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return end_session_; });
      return {StatusCode::UNAVAILABLE, "the fake broke it"};
    }
    event.mutable_heartbeat();
    stream->Write(event);
    while (stream->Read(&request)) {
      if (request.has_heartbeat()) Say("heartbeat");
    }
    Say("session over");
    return Status::OK;
  }

  Status OpenCache(ServerContext* context, const v1::OpenCacheRequest* request,
                   v1::OpenCacheResponse* response) override {
    Say("OpenCache " + request->ShortDebugString());
    response->set_cache_id(11);
    return behaviour_ == "unavailable" ? Status::OK : Enter(context, "OpenCache");
  }

  Status CreateSequence(ServerContext* context, const v1::CreateSequenceRequest* request,
                        v1::CreateSequenceResponse* response) override {
    response->set_sequence_id(request->cache_id() + 1);
    return behaviour_ == "flaky" || behaviour_ == "unavailable" ? Status::OK
                                                                : Enter(context, "CreateSequence");
  }

  Status TruncateSequence(ServerContext* context, const v1::TruncateSequenceRequest*,
                          v1::TruncateSequenceResponse*) override {
    return Enter(context, "TruncateSequence");
  }

  Status Append(ServerContext* context, const v1::AppendRequest* request,
                v1::AppendResponse* response) override {
    for (int i = 0; i < request->items_size(); ++i) response->add_token_counts(1);
    return Enter(context, "Append");
  }

  Status Commit(ServerContext* context, const v1::CommitRequest*, v1::CommitResponse*) override {
    return Enter(context, "Commit");
  }

  Status Attach(ServerContext* context, const v1::AttachRequest*, v1::AttachResponse*) override {
    return Enter(context, "Attach");
  }

  Status Detach(ServerContext* context, const v1::DetachRequest*, v1::DetachResponse*) override {
    return Enter(context, "Detach");
  }

  Status Ingest(ServerContext* context, grpc::ServerReader<v1::IngestRequest>* reader,
                v1::IngestResponse*) override {
    if (const Status status = Enter(context, "Ingest"); !status.ok()) return status;
    v1::IngestRequest request;
    while (reader->Read(&request)) {
      if (request.has_header()) {
        Say("header " + std::to_string(request.header().sequence_id()));
      } else {
        const v1::LayerRows& rows = request.chunk().rows();
        Say("chunk at " + std::to_string(request.chunk().first_position()) + " tokens " +
            std::to_string(rows.keys().shape(0)) +
            (request.ByteSizeLong() > (1 << 20) + 4096 ? " too large" : ""));
        const auto* first = reinterpret_cast<const float*>(rows.keys().inline_data().data());
        Say("first key " + std::to_string(static_cast<int>(*first)));
      }
    }
    return Status::OK;
  }

  Status BuildIndex(ServerContext* context, const v1::BuildIndexRequest* request,
                    grpc::ServerWriter<v1::BuildProgress>* writer) override {
    Say("BuildIndex " + request->ShortDebugString());
    for (uint32_t layer = 0; layer < 4; ++layer) {
      v1::BuildProgress progress;
      progress.set_layer(layer);
      progress.set_layers_done(layer + 1);
      progress.set_layer_count(behaviour_ == "hang" ? 1000 : 4);
      progress.set_inertia(0.5);
      writer->Write(progress);
    }
    return Enter(context, "BuildIndex");
  }

  Status WatchEvents(ServerContext*, const v1::WatchEventsRequest*,
                     grpc::ServerWriter<v1::CacheEvents>* stream) override {
    if (behaviour_ != "full-streams") return {StatusCode::RESOURCE_EXHAUSTED, "max_event_streams"};
    const int call = ++watches_;
    if (call == 1) return {StatusCode::DEADLINE_EXCEEDED, "renew it"};
    if (call != 5) return {StatusCode::RESOURCE_EXHAUSTED, "max_event_streams"};
    v1::CacheEvents events;
    events.set_epoch(1);
    auto* event = events.add_events();
    event->set_number(1);
    event->set_kind(v1::CACHE_EVENT_KIND_CLEARED);
    stream->Write(events);
    return Status::OK;
  }

  Status TopK(ServerContext* context, const v1::TopKRequest* request,
              v1::TopKResponse* response) override {
    if (const Status status = Enter(context, "TopK"); !status.ok()) return status;
    Say(request->items(0).selection().ShortDebugString());
    FillSelected(response->add_items());
    return Status::OK;
  }

  Status Attend(ServerContext* context, const v1::AttendRequest* request,
                v1::AttendResponse* response) override {
    if (const Status status = Enter(context, "Attend"); !status.ok()) return status;
    if (!request->items(0).query().has_queries()) {  // it does not know logits
      return Refuse(StatusCode::INVALID_ARGUMENT, "items[0].query.queries.inline_data", "missing");
    }
    const v1::TokenPositions& given = request->items(0).positions();
    if (static_cast<uint32_t>(given.positions_size()) != kKvHeads * given.count()) {
      // It does not know sets per query head.
      return Refuse(StatusCode::INVALID_ARGUMENT, "items[0].positions.positions",
                    "must be kv_heads x count");
    }
    v1::Attention* attention = response->add_items();
    const uint32_t dim = behaviour_ == "wrong-shape" ? kDim / 2 : kDim;
    FillTensor({1, kQueryHeads, dim}, attention->mutable_output());
    for (uint32_t head = 0; head < kQueryHeads; ++head) attention->add_lse(1.5f);
    FillSelected(attention->mutable_selected());
    if (!request->items(0).want_positions()) attention->mutable_selected()->clear_positions();
    return Status::OK;
  }

  Status FetchBlocks(ServerContext* context, const v1::FetchBlocksRequest* request,
                     v1::FetchBlocksResponse* response) override {
    if (const Status status = Enter(context, "FetchBlocks"); !status.ok()) return status;
    const uint64_t tokens = request->ranges(0).end() - request->ranges(0).begin();
    v1::Tensor* block = response->add_blocks();
    FillTensor({kKvHeads, tokens, behaviour_ == "wrong-shape" ? kDim : 2 * kDim}, block);
    auto* rows = reinterpret_cast<float*>(block->mutable_inline_data()->data());
    for (uint64_t head = 0; head < kKvHeads && behaviour_ != "wrong-shape"; ++head) {
      for (uint64_t token = 0; token < tokens; ++token) {
        rows[(head * tokens + token) * 2 * kDim] =
            static_cast<float>(request->ranges(0).begin() + token + 1000000 * head);
      }
    }
    return Status::OK;
  }

 private:
  static void FillTensor(std::initializer_list<uint64_t> shape, v1::Tensor* tensor) {
    tensor->set_dtype(v1::DTYPE_FLOAT32);
    size_t count = 1;
    for (const uint64_t size : shape) {
      tensor->add_shape(size);
      count *= size;
    }
    const std::string bytes(count * sizeof(float), '\0');
    tensor->set_inline_data(bytes);
  }

  void FillSelected(v1::Selected* selected) const {
    selected->set_kv_heads(behaviour_ == "wrong-shape" ? kKvHeads + 1 : kKvHeads);
    selected->set_count(kCount);
    for (uint32_t i = 0; i < kKvHeads * kCount; ++i) selected->add_positions(100 + i);
    selected->set_sink_tokens(4);
    selected->set_window_tokens(8);
  }

  // Says the call's name, and does what the behaviour wants of every call.
  Status Enter(ServerContext* context, const std::string& call) {
    const auto& metadata = context->client_metadata();
    const auto boot = metadata.find("pqcached-boot");
    Say(boot == metadata.end()
            ? call
            : call + " for " + std::string(boot->second.data(), boot->second.size()));
    const auto token = metadata.find("pqcached-session");
    if (token == metadata.end() || token->second != "the-token") {
      return {StatusCode::UNAUTHENTICATED, "no token"};
    }
    if (behaviour_ == "flaky") {
      const std::lock_guard lock(mutex_);
      if (++calls_[call] % 3 != 0) return {StatusCode::UNAVAILABLE, "not now"};
    }
    if (behaviour_ == "unavailable") return {StatusCode::UNAVAILABLE, "never"};
    if (behaviour_ == "forget-session" && call == "TopK") {
      return {StatusCode::UNAUTHENTICATED, "who are you?"};
    }
    if (behaviour_ == "new-worker" && call == "TopK") {
      const std::lock_guard lock(mutex_);
      if (++calls_[call] == 1) return RefuseBootId();
    }
    if ((behaviour_ == "end-session" || behaviour_ == "break-session") && call == "TopK") {
      const std::lock_guard lock(mutex_);
      if (behaviour_ == "break-session" && end_session_) return Status::OK;
      end_session_ = true;
      changed_.notify_all();
      return {StatusCode::UNAVAILABLE, "the session is over"};
    }
    if (behaviour_ == "hang" && (call == "TopK" || call == "Ingest" || call == "BuildIndex")) {
      std::unique_lock lock(mutex_);
      while (!context->IsCancelled()) changed_.wait_for(lock, std::chrono::milliseconds(5));
      Say("cancelled");
      return Status::CANCELLED;
    }
    return Status::OK;
  }

  const std::string behaviour_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool end_session_ = false;
  std::atomic<int> sessions_ = 0, watches_ = 0;
  std::map<std::string, int> calls_;
};

class FakeAdmin final : public v1::Admin::Service {
  Status GetServerInfo(ServerContext*, const v1::GetServerInfoRequest*,
                       v1::GetServerInfoResponse* response) override {
    response->set_version("9.9.9");
    response->set_uptime_seconds(61);
    (*response->mutable_config())["listen"] = "here";
    return Status::OK;
  }
  Status DescribeSequence(ServerContext*, const v1::DescribeSequenceRequest* request,
                          v1::DescribeSequenceResponse* response) override {
    response->mutable_sequence()->set_sequence_id(request->sequence_id());
    response->mutable_sequence()->set_cache_id(11);
    response->mutable_sequence()->set_token_count(77);
    return Status::OK;
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  FakeKvCache kv_cache(argv[2]);
  FakeAdmin admin;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(std::string("unix:") + argv[1], grpc::InsecureServerCredentials());
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  builder.RegisterService(&kv_cache);
  builder.RegisterService(&admin);
  const auto server = builder.BuildAndStart();
  if (!server) return 1;
  Say("ready");
  server->Wait();
}
