// Session keeps the client's session stream with the sidecar open, on a thread of its own, or stands
// for a session that the broker opened, which the caller keeps.
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
  grpc::Status Open(const v1::SessionOpen& open, std::chrono::system_clock::time_point deadline);

  // Takes over a session of the broker's (RemoteOptions::session_token).
  void Adopt(const RemoteOptions& options);

  // Ends the stream; the sidecar then drops the session's sequences. At most about a second.
  void Close();

  // Constant after Open.
  const std::string& token() const { return opened_.session_token(); }
  const std::string& boot_id() const { return opened_.boot_id(); }
  uint64_t max_message_bytes() const { return opened_.max_message_bytes(); }

  // Waits until the session has ended, which it does not come back from, or the time is over.
  // Returns whether it has.
  bool WaitEnded(std::chrono::milliseconds wait) const;
  bool ended() const;
  // Why it ended; REQUIRES ended().
  grpc::Status end_status() const;

 private:
  enum class State { kOpening, kOpen, kEnded };

  bool adopted() const { return adopted_ended_ != nullptr; }
  void Run(const v1::SessionOpen& open);
  void WriteHeartbeat();

  v1::KvCache::Stub& stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionEvent>> stream_;
  std::thread thread_;
  v1::SessionOpened opened_;  // written once, before state_ becomes kOpen
  void* adopted_context_ = nullptr;
  bool (*adopted_ended_)(void* context, uint32_t wait_ms) = nullptr;

  std::mutex write_mutex_;  // one write at a time; never held with mutex_
  bool writes_done_ = false;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  State state_ = State::kOpening;
  grpc::Status end_status_;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_SESSION_H_
