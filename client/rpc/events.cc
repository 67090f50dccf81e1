#include "client/rpc/event_stream.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "client/rpc/refusal.h"
#include "client/rpc/rpc_remote.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

// Longest life of one stream; the next one continues behind it.
constexpr std::chrono::hours kLongestStream(1);
constexpr std::chrono::milliseconds kPause(50);
// Longest time until the sidecar has noticed that a stream has ended, which counts until then.
constexpr std::chrono::seconds kEndPatience(1);

grpc::Status FromWire(const v1::CacheEvent& from, uint64_t epoch, pqc_cache_event* to) {
  *to = {};
  to->epoch = epoch;
  to->number = from.number();
  to->kind = static_cast<pqc_cache_event_kind>(from.kind());
  to->token_end = from.token_end();
  if (from.kind() == v1::CACHE_EVENT_KIND_CLEARED) return grpc::Status::OK;
  RETURN_IF_ERROR(CopyKey(from.key(), "events.key", &to->key));
  return CopyKey(from.parent_key(), "events.parent_key", &to->parent);
}

}  // namespace

grpc::Status CopyKey(const std::string& from, const char* field, pqc_prefix_key* to) {
  if (from.size() != sizeof(to->bytes)) {
    return {grpc::StatusCode::INTERNAL, std::string("the sidecar's answer is invalid: ") + field +
                                            ": " + std::to_string(from.size()) + " bytes"};
  }
  std::memcpy(to->bytes, from.data(), sizeof(to->bytes));
  return grpc::Status::OK;
}

// One WatchEvents call.
struct EventStream::Call final : PendingCall {
  using PendingCall::PendingCall;

  v1::CacheEvents message;
  grpc::Status status;
  std::unique_ptr<grpc::ClientAsyncReader<v1::CacheEvents>> reader;
};

EventStream::EventStream(uint64_t cache_id, uint64_t epoch, uint64_t number,
                         AbandonedCalls& abandoned)
    : abandoned_(abandoned) {
  request_.set_cache_id(cache_id);
  request_.set_epoch(epoch);
  request_.set_number(number);
}

EventStream::~EventStream() { Leave(); }

void EventStream::Leave() {
  if (call_) abandoned_.Add(std::move(call_));
}

void EventStream::Begin(v1::KvCache::Stub& stub, std::shared_ptr<grpc::ClientContext> context) {
  call_ = std::make_unique<Call>(std::move(context));
  call_->reader = stub.PrepareAsyncWatchEvents(call_->context(), request_, call_->queue());
  call_->reader->StartCall(call_.get());
  call_->Begin();
  is_starting_ = true;
}

bool EventStream::Await(gpr_timespec until, grpc::Status* status) {
  *status = grpc::Status::OK;
  while (true) {
    void* tag = nullptr;
    bool ok = false;
    if (!call_->NextUntil(until, &tag, &ok)) return false;
    if (is_ending_) {
      is_ending_ = false;
      *status = call_->status;
      call_.reset();
      return false;
    }
    if (ok && !is_starting_) {
      events_.Swap(&call_->message);
      next_event_ = 0;
      call_->message.Clear();
      call_->reader->Read(&call_->message, call_.get());
      call_->Begin();
      return true;
    }
    if (ok) {
      call_->reader->Read(&call_->message, call_.get());
    } else {
      call_->reader->Finish(&call_->status, call_.get());
      is_ending_ = true;
    }
    is_starting_ = false;
    call_->Begin();
  }
}

grpc::Status EventStream::Take(pqc_cache_event* out, uint32_t capacity, uint32_t* count) {
  while (*count < capacity && next_event_ < events_.events_size()) {
    const v1::CacheEvent& event = events_.events(next_event_);
    RETURN_IF_ERROR(FromWire(event, events_.epoch(), &out[*count]));
    request_.set_epoch(events_.epoch());
    request_.set_number(event.number());
    ++next_event_;
    ++*count;
  }
  return grpc::Status::OK;
}

pqc_status RpcRemote::WatchEvents(uint64_t cache_id, uint64_t epoch, uint64_t number,
                                  uint64_t* watch_id, RefusalBuffer* error) noexcept {
  return Finish("WatchEvents", error, [&] {
    auto stream = std::make_shared<EventStream>(cache_id, epoch, number, abandoned_calls_);
    const base::MutexLock lock(&watches_mutex_);
    *watch_id = ++last_watch_id_;
    watches_.emplace(*watch_id, std::move(stream));
    return grpc::Status::OK;
  });
}

void RpcRemote::EndWatch(uint64_t watch_id) noexcept {
  std::shared_ptr<EventStream> stream;
  const base::MutexLock lock(&watches_mutex_);
  const auto found = watches_.find(watch_id);
  if (found == watches_.end()) return;
  stream = std::move(found->second);
  watches_.erase(found);
}

grpc::Status RpcRemote::NextOf(EventStream& stream, Deadline deadline, pqc_cache_event* out,
                               uint32_t capacity, uint32_t* count) {
  while (true) {
    RETURN_IF_ERROR(stream.Take(out, capacity, count));
    if (*count > 0) return grpc::Status::OK;
    if (!stream.is_open()) {
      if (grpc::Status status = Connect(*channel_, deadline); !status.ok()) {
        // On the local path it does not wait for the next worker.
        if (session_.ended() || std::chrono::steady_clock::now() + kPause >= deadline) {
          return status;
        }
        std::this_thread::sleep_for(kPause);
        continue;
      }
      (!in_call_ || in_call_() ? rpcs_ : background_rpcs_) += 1;
      auto context = std::make_shared<grpc::ClientContext>();
      Prepare(context.get(), std::chrono::steady_clock::now() + kLongestStream);
      stream.Begin(*kv_, std::move(context));
    }
    grpc::Status status;
    if (stream.Await(ToGrpc(deadline), &status)) continue;
    if (stream.is_open()) return grpc::Status::OK;  // the time is over
    const bool is_over = std::chrono::steady_clock::now() + kPause >= deadline;
    switch (status.error_code()) {
      case grpc::StatusCode::DEADLINE_EXCEEDED:  // of the stream, not of this call
        stream.counted_until = std::chrono::steady_clock::now() + kEndPatience;
        if (is_over) return grpc::Status::OK;
        break;
      case grpc::StatusCode::RESOURCE_EXHAUSTED:
        if (std::chrono::steady_clock::now() >= stream.counted_until) return status;
        if (is_over) return grpc::Status::OK;
        session_.WaitBroken(kPause);
        break;
      case grpc::StatusCode::UNAVAILABLE:
        if (is_over) return status;
        session_.WaitBroken(kPause);
        break;
      default:
        return status;
    }
  }
}

pqc_status RpcRemote::NextEvents(uint64_t watch_id, uint32_t timeout_ms, pqc_cache_event* out,
                                 uint32_t capacity, uint32_t* count,
                                 RefusalBuffer* error) noexcept {
  *count = 0;
  return Finish("WatchEvents", error, [&]() -> grpc::Status {
    const Deadline deadline =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    std::shared_ptr<EventStream> stream;
    {
      const base::MutexLock lock(&watches_mutex_);
      const auto found = watches_.find(watch_id);
      if (found == watches_.end()) {
        return Refuse(grpc::StatusCode::NOT_FOUND, "events", "they are closed");
      }
      stream = found->second;
    }
    return NextOf(*stream, deadline, out, capacity, count);
  });
}

}  // namespace pqcached::client
