// RpcRemote: fetches the rows of ranges of tokens.
#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "client/rpc/refusal.h"
#include "client/rpc/rows_answer.h"
#include "client/rpc/rpc_remote.h"
#include "client/rpc/wire.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

// Bytes of rows in one answer.
constexpr uint64_t kPartBytes = uint64_t{4} << 20;
// One is received on each connection, while the sidecar copies the rows of the next one.
constexpr size_t kPartsInFlight = 3;

using RowsCall = UnaryCall<grpc::ByteBuffer>;

RowsAnswer::Shape ShapeOf(const FetchView& fetch, uint64_t token_count) {
  const kvstore::PartBytes part = kvstore::BytesOfPart(fetch.shape, fetch.part);
  return {.dtype = fetch.shape.dtype,
          .kv_heads = fetch.shape.kv_heads,
          .tokens = token_count,
          .dim = part.dim};
}

// Checks that rows were stored at the same time as those before them; *rows_epoch = 0: there are
// none.
grpc::Status CheckEpoch(uint64_t epoch, uint64_t* rows_epoch) {
  if (*rows_epoch == 0) *rows_epoch = epoch;
  if (*rows_epoch == epoch) return grpc::Status::OK;
  return Refuse(grpc::StatusCode::ABORTED, "",
                "rows were removed, or the sidecar's worker replaced, during the call",
                kRetryConflict);
}

grpc::ByteBuffer RequestOf(const FetchView& fetch, kvstore::TokenRange tokens) {
  v1::FetchBlocksRequest request;
  request.set_sequence_id(fetch.sequence_id);
  request.set_layer(fetch.layer);
  request.set_part(ToWire(fetch.part));
  v1::TokenRange* range = request.add_ranges();
  range->set_begin(tokens.begin);
  range->set_end(tokens.end);
  const grpc::Slice slice(request.SerializeAsString());
  return {&slice, 1};
}

// Calls whose answers are awaited in the order of their start. Those that are not awaited are left
// behind.
class CallsInFlight {
 public:
  explicit CallsInFlight(AbandonedCalls& left_behind) : left_behind_(left_behind) {}
  ~CallsInFlight() {
    for (std::unique_ptr<RowsCall>& call : calls_) left_behind_.Add(std::move(call));
  }
  CallsInFlight(const CallsInFlight&) = delete;
  CallsInFlight& operator=(const CallsInFlight&) = delete;

  size_t count() const { return calls_.size(); }
  void Add(std::unique_ptr<RowsCall> call) { calls_.push_back(std::move(call)); }
  // Waits until all have ended, or are overdue.
  void AwaitAll() {
    void* tag = nullptr;
    bool ok = false;
    for (const std::unique_ptr<RowsCall>& call : calls_) {
      if (call->has_pending_operations()) call->Next(&tag, &ok);
    }
  }
  std::unique_ptr<RowsCall> TakeFirst() {
    std::unique_ptr<RowsCall> first = std::move(calls_.front());
    calls_.pop_front();
    return first;
  }

 private:
  AbandonedCalls& left_behind_;
  std::deque<std::unique_ptr<RowsCall>> calls_;
};

// Returns whether the sidecar has refused a call because of others.
bool IsCrowded(const RowsCall& ended) {
  return ended.status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
}

}  // namespace

std::unique_ptr<RowsCall> RpcRemote::StartFetch(const std::shared_ptr<grpc::Channel>& channel,
                                                const Context& context, const FetchView& fetch,
                                                kvstore::TokenRange tokens) const {
  static const std::string kMethod =
      std::string("/") + v1::KvCache::service_full_name() + "/FetchBlocks";
  auto call = std::make_unique<RowsCall>(context);
  call->reader = grpc::GenericStub(channel).PrepareUnaryCall(
      context.get(), kMethod, RequestOf(fetch, tokens), call->queue());
  Start(*call, &call->response);
  return call;
}

grpc::Status RpcRemote::TakeAnswer(const FetchView& fetch, kvstore::TokenRange tokens,
                                   Deadline deadline, bool is_first, RowsCall& ended,
                                   grpc::ByteBuffer* answer) const {
  const grpc::StatusCode code = ended.status.error_code();
  const bool is_final = is_first && code != grpc::StatusCode::UNAVAILABLE && !IsCrowded(ended);
  if (code == grpc::StatusCode::OK || is_final) {
    answer->Swap(&ended.response);
    return ended.status;
  }
  std::chrono::milliseconds pause = kFirstPause;
  for (;;) {
    uint32_t retry_ms = kNoRetry;
    grpc::Status status = Attempt(Repeat::kHarmless, deadline, [&](const Context& context) {
      std::unique_ptr<RowsCall> call = StartFetch(channel_, context, fetch, tokens);
      if (!AwaitStarted(abandoned_calls_, call)) return Overdue();
      retry_ms = IsCrowded(*call) ? RetryMsOf(call->status) : kNoRetry;
      answer->Swap(&call->response);
      return call->status;
    });
    if (retry_ms == kNoRetry || Remaining(deadline) <= pause) return status;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

RpcRemote::FetchPart RpcRemote::PartAfter(FetchPart part, std::span<const FetchView> layers,
                                          kvstore::TokenRange tokens) const {
  if (part.tokens.begin == tokens.begin) {
    ++part.layer;
    part.tokens.begin = tokens.end;
  }
  if (part.layer == layers.size()) return part;
  const RowsAnswer::Shape token = ShapeOf(layers[part.layer], 1);
  const uint64_t step =
      std::max<uint64_t>(1, PayloadBytes(kPartBytes) / (token.kv_heads * token.row_bytes()));
  part.tokens.end = part.tokens.begin;
  part.tokens.begin -= std::min(step, part.tokens.end - tokens.begin);
  return part;
}

grpc::Status RpcRemote::FetchParts(
    std::span<const FetchView> layers, kvstore::TokenRange tokens, uint64_t* rows_epoch,
    const std::function<bool(const RowsAnswer& rows, const FetchPart& part)>& take) const {
  const Deadline deadline = CallDeadline();
  // The calls below do not wait for a worker or a connection.
  if (!session_.token().empty()) RETURN_IF_ERROR(Connect(*channel_, deadline));
  const auto after = [&](const FetchPart& part) { return PartAfter(part, layers, tokens); };
  const FetchPart first = after({.layer = 0, .tokens = {tokens.end, tokens.end}});
  CallsInFlight calls(abandoned_calls_);
  size_t most_in_flight = kPartsInFlight;
  FetchPart next = first;  // to be started
  bool by_bulk_channel = true;
  RowsAnswer rows;
  for (FetchPart part = first; part.layer < layers.size(); part = after(part)) {
    for (; calls.count() < most_in_flight && next.layer < layers.size(); next = after(next)) {
      (!in_call_ || in_call_() ? rpcs_ : background_rpcs_) += 1;
      // The other connection is used when it is there: the sidecar may have enough of them.
      by_bulk_channel = !by_bulk_channel &&
                        bulk_channel_->GetState(/*try_to_connect=*/true) == GRPC_CHANNEL_READY;
      const auto context = std::make_shared<grpc::ClientContext>();
      Prepare(context.get(), deadline);
      calls.Add(StartFetch(by_bulk_channel ? bulk_channel_ : channel_, context, layers[next.layer],
                           next.tokens));
    }
    const FetchView& fetch = layers[part.layer];
    const bool is_first = part.layer == 0 && part.tokens.end == tokens.end;
    grpc::ByteBuffer answer;
    std::unique_ptr<RowsCall> call = calls.TakeFirst();
    if (!AwaitStarted(abandoned_calls_, call)) return Overdue();
    if (IsCrowded(*call)) {  // perhaps because of the other parts of this read
      calls.AwaitAll();
      most_in_flight = 1;
    }
    RETURN_IF_ERROR(TakeAnswer(fetch, part.tokens, deadline, is_first, *call, &answer));
    RETURN_IF_ERROR(rows.Take(&answer, ShapeOf(fetch, part.tokens.end - part.tokens.begin)));
    RETURN_IF_ERROR(CheckEpoch(rows.rows_epoch(), rows_epoch));
    if (!take(rows, part)) return grpc::Status::OK;
  }
  return grpc::Status::OK;
}

pqc_status RpcRemote::FetchBlocks(const FetchView& fetch, kvstore::TokenRange tokens,
                                  std::byte* out, RefusalBuffer* error) noexcept {
  uint64_t rows_epoch = 0;
  return FetchRows(fetch, tokens, out, &rows_epoch, error);
}

pqc_status RpcRemote::FetchRows(const FetchView& fetch, kvstore::TokenRange tokens, std::byte* out,
                                uint64_t* rows_epoch, RefusalBuffer* error) noexcept {
  return Finish("FetchBlocks", error, [&] {
    const uint64_t row_bytes = ShapeOf(fetch, 1).row_bytes();
    const auto copy = [&](const RowsAnswer& rows, const FetchPart& part) {
      rows.CopyTo(out + (part.tokens.begin - tokens.begin) * row_bytes,
                  (tokens.end - tokens.begin) * row_bytes);
      return true;
    };
    return FetchParts({&fetch, 1}, tokens, rows_epoch, copy);
  });
}

pqc_status RpcRemote::ReadRows(const FetchView* layers, uint32_t layer_count,
                               kvstore::TokenRange tokens, const RowRunSink& sink,
                               uint64_t* rows_epoch, RefusalBuffer* error) noexcept {
  return Finish("FetchBlocks", error, [&] {
    const auto pass_on = [&](const RowsAnswer& rows, const FetchPart& part) {
      return rows.VisitRuns([&](uint64_t token, uint64_t count, const std::byte* const* heads) {
        return sink.take(sink.context, part.layer, static_cast<uint32_t>(part.tokens.begin + token),
                         static_cast<uint32_t>(count), heads);
      });
    };
    return FetchParts({layers, layer_count}, tokens, rows_epoch, pass_on);
  });
}

}  // namespace pqcached::client
