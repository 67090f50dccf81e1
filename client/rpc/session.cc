#include "client/rpc/session.h"

namespace pqcached::client {
namespace {
// How long Close waits for the sidecar's last word before it cuts the stream.
constexpr std::chrono::seconds kCloseWait(1);
}  // namespace

grpc::Status Session::Open(const v1::SessionOpen& open,
                           std::chrono::system_clock::time_point deadline) {
  thread_ = std::thread([this, open] { Run(open); });
  std::unique_lock lock(mutex_);
  const bool answered =
      changed_.wait_until(lock, deadline, [this] { return state_ != State::kOpening; });
  if (answered) return state_ == State::kOpen ? grpc::Status::OK : end_status_;
  lock.unlock();
  context_.TryCancel();
  thread_.join();
  return {grpc::StatusCode::DEADLINE_EXCEEDED, "the session was not opened in time"};
}

void Session::Adopt(const RemoteOptions& options) {
  opened_.set_session_token(options.session_token);
  opened_.set_boot_id(options.boot_id);
  opened_.set_max_message_bytes(options.max_message_bytes);
  adopted_context_ = options.ended_context;
  adopted_ended_ = options.ended;
}

void Session::Close() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(write_mutex_);
    if (!writes_done_ && !ended()) stream_->WritesDone();
    writes_done_ = true;
  }
  if (!WaitEnded(kCloseWait)) context_.TryCancel();
  thread_.join();
}

bool Session::WaitEnded(std::chrono::milliseconds wait) const {
  if (adopted()) return adopted_ended_(adopted_context_, static_cast<uint32_t>(wait.count()));
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, wait, [this] { return state_ == State::kEnded; });
}

bool Session::ended() const {
  if (adopted()) return adopted_ended_(adopted_context_, 0);
  const std::lock_guard lock(mutex_);
  return state_ == State::kEnded;
}

grpc::Status Session::end_status() const {
  if (adopted()) return {grpc::StatusCode::UNAVAILABLE, "the broker's connection ended"};
  const std::lock_guard lock(mutex_);
  return end_status_;
}

void Session::Run(const v1::SessionOpen& open) {
  stream_ = stub_.Session(&context_);
  v1::SessionRequest request;
  *request.mutable_open() = open;
  v1::SessionEvent event;
  const bool answered = stream_->Write(request) && stream_->Read(&event);
  if (answered && event.has_opened()) {
    opened_ = event.opened();
    {
      const std::lock_guard lock(mutex_);
      state_ = State::kOpen;
    }
    changed_.notify_all();
    while (stream_->Read(&event)) {
      if (event.has_heartbeat()) WriteHeartbeat();
    }
  } else if (answered) {
    context_.TryCancel();  // Finish waits for the stream's end, which this sidecar has no reason to
                           // bring about.
  }
  grpc::Status status = stream_->Finish();
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kOpening && (answered || status.ok())) {
      status = {grpc::StatusCode::INTERNAL, "the sidecar did not answer with `opened`"};
    }
    state_ = State::kEnded;
    end_status_ = status;
  }
  changed_.notify_all();
}

void Session::WriteHeartbeat() {
  const std::lock_guard lock(write_mutex_);
  if (writes_done_) return;
  v1::SessionRequest request;
  request.mutable_heartbeat();
  stream_->Write(request);
}

}  // namespace pqcached::client
