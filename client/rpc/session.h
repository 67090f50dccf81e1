// Session keeps the client's session stream with the sidecar open, on its own thread, or represents
// a session that the broker opened and the caller keeps.
//
// When the stream breaks, because the worker or the connection has ended, another stream resumes
// the same session, until the sidecar answers that the session does not exist any more.
//
// Thread-safe, but for Open, which is called first, Adopt, called instead of it, and Close, called
// last.
#ifndef PQCACHED_CLIENT_RPC_SESSION_H_
#define PQCACHED_CLIENT_RPC_SESSION_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "client/base/remote.h"
#include "client/rpc/secure/credentials.h"
#include "kernels/base/mutex.h"
#include "pqcached/v1/kv_cache.grpc.pb.h"

namespace pqcached::client {

class Session {
 public:
  // `channel`: that of `stub`. `credentials`: null = the connection is plain. All outlive the
  // session.
  Session(v1::KvCache::Stub& stub, grpc::Channel& channel, const Credentials* credentials)
      : stub_(stub), channel_(channel), credentials_(credentials) {}
  ~Session() { Close(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Opens the session; returns when the sidecar has answered, or at `deadline` without success.
  grpc::Status Open(const v1::SessionOpen& open, std::chrono::steady_clock::time_point deadline);

  // Adopts a session that the broker opened (RemoteOptions::session_token).
  void Adopt(const RemoteOptions& options);

  // Makes this the session of a client that needs none: it is open, and its token is empty.
  void OpenNone() { SetState(State::kOpen); }

  // Ends the stream; the sidecar then drops the session's sequences. Takes at most about a second.
  void Close();

  // Returns true when the session was opened by the broker.
  bool adopted() const { return adopted_ended_ != nullptr; }
  // Values of the first worker; constant after Open.
  const std::string& token() const { return opened_.session_token(); }
  const std::string& boot_id() const { return opened_.boot_id(); }
  uint64_t max_message_bytes() const { return opened_.max_message_bytes(); }

  // Waits until the session has a stream or has ended, or the time is over. Returns false only for
  // the last.
  bool WaitOpen(std::chrono::steady_clock::time_point deadline) const;
  // Waits until the session has ended for good or the time is over. Returns true if it has ended.
  bool WaitEnded(std::chrono::milliseconds wait) const;
  bool ended() const;
  // Waits until the session has no stream, whether or not another one follows, or the time is over.
  // Returns true if it has none.
  bool WaitBroken(std::chrono::milliseconds wait) const;
  // Returns the reason of the end. REQUIRES: ended().
  grpc::Status end_status() const;

 private:
  enum class State { kOpening, kOpen, kBroken, kEnded };
  using Stream = grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionEvent>;

  void Run(v1::SessionOpen open);
  // Opens a stream, reads it until its end and returns its status.
  grpc::Status RunStream(const v1::SessionOpen& open);
  // Returns true when the session may still exist and is not being closed.
  bool MayResume(const grpc::Status& status) const;
  // Waits before the next attempt: until there is a new connection, for `pause` when the old one
  // still exists, and not longer than `pause` in any case, or until the session is being closed.
  void WaitForConnection(std::chrono::milliseconds pause);
  bool IsClosing() const;
  void WriteHeartbeat();
  void SetState(State state, const grpc::Status& status = {});

  v1::KvCache::Stub& stub_;
  grpc::Channel& channel_;
  const Credentials* const credentials_;
  std::thread thread_;
  v1::SessionOpened opened_;  // written once, before state_ becomes kOpen
  void* adopted_context_ = nullptr;
  bool (*adopted_ended_)(void* context, uint32_t wait_ms) = nullptr;
  bool (*adopted_detached_)(void* context, uint32_t wait_ms) = nullptr;

  base::Mutex write_mutex_;  // held for one write at a time; never held with mutex_
  // Null while there is no stream. Only thread_ replaces it and reads from the stream.
  std::unique_ptr<Stream> stream_ PQCACHED_GUARDED_BY(write_mutex_);
  bool writes_done_ PQCACHED_GUARDED_BY(write_mutex_) = false;

  mutable base::Mutex mutex_;
  mutable base::CondVar changed_;
  // Context of the present stream. Only thread_ replaces it.
  std::unique_ptr<grpc::ClientContext> context_ PQCACHED_GUARDED_BY(mutex_);
  State state_ PQCACHED_GUARDED_BY(mutex_) = State::kOpening;
  bool closing_ PQCACHED_GUARDED_BY(mutex_) = false;
  grpc::Status end_status_ PQCACHED_GUARDED_BY(mutex_);
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_SESSION_H_
