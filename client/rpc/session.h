// Session keeps the client's session stream with the sidecar open, on a thread of its own, or stands
// for a session that the broker opened, which the caller keeps.
//
// When the stream breaks, because the sidecar's worker or the connection to it did, another one goes on
// with the same session, until the sidecar says that there is no such session any more.
//
// Thread-safe, but for Open, Adopt and Close, which come first and last.
#ifndef PQCACHED_CLIENT_RPC_SESSION_H_
#define PQCACHED_CLIENT_RPC_SESSION_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "client/remote.h"
#include "pqcached/v1/kv_cache.grpc.pb.h"

namespace pqcached::client {

class Session {
 public:
  explicit Session(v1::KvCache::Stub& stub) : stub_(stub) {}
  ~Session() { Close(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Returns when the sidecar has answered, or failed to until `deadline`.
  grpc::Status Open(const v1::SessionOpen& open, std::chrono::steady_clock::time_point deadline);

  // Takes over a session of the broker's (RemoteOptions::session_token).
  void Adopt(const RemoteOptions& options);

  // Ends the stream; the sidecar then drops the session's sequences. At most about a second.
  void Close();

  // Whether somebody else keeps it.
  bool adopted() const { return adopted_ended_ != nullptr; }
  // Constant after Open: of the first worker.
  const std::string& token() const { return opened_.session_token(); }
  const std::string& boot_id() const { return opened_.boot_id(); }
  uint64_t max_message_bytes() const { return opened_.max_message_bytes(); }

  // Waits until the session has a stream or has ended, or the time is over. False only for the last.
  bool WaitOpen(std::chrono::steady_clock::time_point deadline) const;
  // Waits until the session has ended, which it does not come back from, or the time is over.
  // Returns whether it has.
  bool WaitEnded(std::chrono::milliseconds wait) const;
  bool ended() const;
  // Waits until there is no stream, whether or not there will be another one, or the time is over.
  // Returns whether there is none.
  bool WaitBroken(std::chrono::milliseconds wait) const;
  // Why it ended; REQUIRES ended().
  grpc::Status end_status() const;

 private:
  enum class State { kOpening, kOpen, kBroken, kEnded };

  void Run(v1::SessionOpen open);
  // Opens a stream and reads it until its end, whose status it returns.
  grpc::Status RunStream(const v1::SessionOpen& open);
  // Whether the session may still be there, and there is somebody who wants it.
  bool GoesOn(const grpc::Status& status) const;
  void WriteHeartbeat();
  void SetState(State state, const grpc::Status& status = {});

  v1::KvCache::Stub& stub_;
  std::unique_ptr<grpc::ClientContext> context_;  // of the present stream; under mutex_ to cancel
  // Null while there is none.
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionEvent>> stream_;
  std::thread thread_;
  v1::SessionOpened opened_;  // written once, before state_ becomes kOpen
  void* adopted_context_ = nullptr;
  bool (*adopted_ended_)(void* context, uint32_t wait_ms) = nullptr;
  bool (*adopted_detached_)(void* context, uint32_t wait_ms) = nullptr;

  std::mutex write_mutex_;  // one write at a time, and of stream_; never held with mutex_
  bool writes_done_ = false;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  State state_ = State::kOpening;
  bool closing_ = false;
  grpc::Status end_status_;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_SESSION_H_
