#include "client/rpc/session.h"

#include <grpc/support/time.h>

#include <algorithm>

namespace pqcached::client {
namespace {
// Close waits this long for the sidecar to end the stream, then cancels the stream.
constexpr std::chrono::seconds kCloseWait(1);
// Pauses between attempts to resume a session.
constexpr std::chrono::milliseconds kFirstResumePause(20);
constexpr std::chrono::milliseconds kLongestResumePause(500);
// A thread that waits for a connection checks at this interval whether the session is being
// closed.
constexpr std::chrono::milliseconds kCloseCheckInterval(20);
// A stream that lasted this long breaks for a new reason, so the pauses start again.
constexpr std::chrono::seconds kStableStreamTime(5);
}  // namespace

grpc::Status Session::Open(const v1::SessionOpen& open,
                           std::chrono::steady_clock::time_point deadline) {
  thread_ = std::thread([this, open] { Run(open); });
  {
    const base::MutexLock lock(&mutex_);
    const bool answered = changed_.WaitUntil(&mutex_, deadline, [this]() PQCACHED_REQUIRES(mutex_) {
      return state_ != State::kOpening;
    });
    if (answered && state_ != State::kEnded) return grpc::Status::OK;
    if (answered) return end_status_;
    closing_ = true;
    if (context_) context_->TryCancel();
  }
  thread_.join();
  return {grpc::StatusCode::DEADLINE_EXCEEDED, "the session was not opened in time"};
}

void Session::Adopt(const RemoteOptions& options) {
  opened_.set_session_token(options.session_token);
  opened_.set_boot_id(options.boot_id);
  opened_.set_max_message_bytes(options.max_message_bytes);
  adopted_context_ = options.ended_context;
  adopted_ended_ = options.ended;
  adopted_detached_ = options.detached;
}

void Session::Close() {
  if (!thread_.joinable()) return;
  {
    const base::MutexLock lock(&mutex_);
    closing_ = true;
    if (state_ != State::kOpen && context_) context_->TryCancel();  // no sidecar answers
  }
  changed_.SignalAll();
  {
    const base::MutexLock lock(&write_mutex_);
    if (!writes_done_ && stream_) stream_->WritesDone();
    writes_done_ = true;
  }
  if (!WaitEnded(kCloseWait)) {
    const base::MutexLock lock(&mutex_);
    if (context_) context_->TryCancel();
  }
  thread_.join();
}

bool Session::WaitOpen(std::chrono::steady_clock::time_point deadline) const {
  if (adopted()) return true;  // the caller waits for the worker
  const base::MutexLock lock(&mutex_);
  return changed_.WaitUntil(
      &mutex_, deadline, [this]() PQCACHED_REQUIRES(mutex_) { return state_ != State::kBroken; });
}

bool Session::WaitEnded(std::chrono::milliseconds wait) const {
  if (adopted()) return adopted_ended_(adopted_context_, static_cast<uint32_t>(wait.count()));
  const base::MutexLock lock(&mutex_);
  return changed_.WaitFor(&mutex_, wait,
                          [this]() PQCACHED_REQUIRES(mutex_) { return state_ == State::kEnded; });
}

bool Session::WaitBroken(std::chrono::milliseconds wait) const {
  if (adopted()) return adopted_detached_(adopted_context_, static_cast<uint32_t>(wait.count()));
  const base::MutexLock lock(&mutex_);
  return changed_.WaitFor(&mutex_, wait,
                          [this]() PQCACHED_REQUIRES(mutex_) { return state_ != State::kOpen; });
}

bool Session::ended() const {
  if (adopted()) return adopted_ended_(adopted_context_, 0);
  const base::MutexLock lock(&mutex_);
  return state_ == State::kEnded;
}

grpc::Status Session::end_status() const {
  if (adopted()) return {grpc::StatusCode::UNAVAILABLE, "the sidecar does not know it any more"};
  const base::MutexLock lock(&mutex_);
  return end_status_;
}

void Session::SetState(State state, const grpc::Status& status) {
  {
    const base::MutexLock lock(&mutex_);
    state_ = state;
    end_status_ = status;
  }
  changed_.SignalAll();
}

bool Session::MayResume(const grpc::Status& status) const {
  const base::MutexLock lock(&mutex_);
  if (closing_ || state_ == State::kOpening) return false;
  // A broken stream, an attempt that reached no sidecar, a worker that ended with the attempt in
  // its queue (CANCELLED), or a sidecar that has not noticed the end of the previous stream. An
  // orderly end is final.
  return status.error_code() == grpc::StatusCode::FAILED_PRECONDITION ||
         status.error_code() == grpc::StatusCode::UNAVAILABLE ||
         status.error_code() == grpc::StatusCode::CANCELLED ||
         status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED ||
         status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
}

void Session::Run(v1::SessionOpen open) {
  std::chrono::milliseconds pause = kFirstResumePause;
  for (;;) {
    const auto begun = std::chrono::steady_clock::now();
    const grpc::Status status = RunStream(open);
    if (!MayResume(status)) {
      SetState(State::kEnded, status);
      return;
    }
    SetState(State::kBroken, status);
    open.set_resume_token(opened_.session_token());
    if (std::chrono::steady_clock::now() - begun > kStableStreamTime) pause = kFirstResumePause;
    WaitForConnection(pause);
    pause = std::min(2 * pause, kLongestResumePause);
  }
}

bool Session::IsClosing() const {
  const base::MutexLock lock(&mutex_);
  return closing_;
}

// gRPC makes a new connection only while a thread waits for the channel: without one, its own timer
// looks at the channel every 5 s.
void Session::WaitForConnection(std::chrono::milliseconds pause) {
  const auto end = std::chrono::steady_clock::now() + pause;
  if (channel_.GetState(/*try_to_connect=*/true) == GRPC_CHANNEL_READY) {
    const base::MutexLock lock(&mutex_);
    changed_.WaitUntil(&mutex_, end, [this]() PQCACHED_REQUIRES(mutex_) { return closing_; });
    return;
  }
  while (!IsClosing() && std::chrono::steady_clock::now() < end) {
    const gpr_timespec slice =
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                     gpr_time_from_millis(kCloseCheckInterval.count(), GPR_TIMESPAN));
    if (channel_.WaitForConnected(slice)) return;
  }
}

grpc::Status Session::RunStream(const v1::SessionOpen& open) {
  const bool resumes = !open.resume_token().empty();
  grpc::ClientContext* context = nullptr;
  {
    const base::MutexLock lock(&mutex_);
    if (closing_) return {grpc::StatusCode::CANCELLED, "closed"};
    context_ = std::make_unique<grpc::ClientContext>();
    if (credentials_ != nullptr) credentials_->AddToken(context_.get());
    context = context_.get();
  }
  std::unique_ptr<Stream> stream = stub_.Session(context);
  Stream* const reader = stream.get();
  v1::SessionRequest request;
  *request.mutable_open() = open;
  v1::SessionEvent event;
  bool written = false;
  {
    const base::MutexLock lock(&write_mutex_);
    stream_ = std::move(stream);
    written = !writes_done_ && stream_->Write(request);
  }
  const bool answered = written && reader->Read(&event);
  const bool opened = answered && event.has_opened();
  if (opened) {
    if (!resumes) opened_ = event.opened();
    SetState(State::kOpen);
    while (reader->Read(&event)) {
      if (event.has_heartbeat()) WriteHeartbeat();
    }
  } else if (answered) {
    // Finish waits for the stream's end, and this sidecar has no reason to end the stream.
    context->TryCancel();
  }
  {  // no writer uses the stream any more
    const base::MutexLock lock(&write_mutex_);
    stream = std::move(stream_);
  }
  grpc::Status status = stream->Finish();
  if (!opened && (answered || status.ok())) {
    return {grpc::StatusCode::INTERNAL, "the sidecar's first answer was not `opened`"};
  }
  return status;
}

void Session::WriteHeartbeat() {
  const base::MutexLock lock(&write_mutex_);
  if (writes_done_) return;
  v1::SessionRequest request;
  request.mutable_heartbeat();
  stream_->Write(request);
}

}  // namespace pqcached::client
