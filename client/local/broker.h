// Broker is the connection to the sidecar's broker (kvstore/read/broker_protocol.h). The lifetime
// of this connection is that of the session.
//
// Thread-safe: one request at a time, each with a deadline.
#ifndef PQCACHED_CLIENT_LOCAL_BROKER_H_
#define PQCACHED_CLIENT_LOCAL_BROKER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "client/local/mapping.h"
#include "kernels/base/mutex.h"
#include "kvstore/read/broker_protocol.h"
#include "pqcached/client.h"

namespace pqcached::client {

struct BrokerOptions {
  std::string socket_path;  // path of gRPC's socket
  std::string tenant;
  std::string client_name;
  uint32_t timeout_ms = 10000;   // timeout of a call
  uint32_t open_timeout_ms = 0;  // timeout of Open; 0 = timeout_ms
  // Token of a session to resume instead of opening one; tenant and client_name must be those of
  // the session.
  std::string resume_token = {};
};

class Broker {
 public:
  // Connects and opens a session, or resumes one. *control is its control memory.
  //
  // Errors: PQC_UNAVAILABLE (no broker; or the sidecar has not noticed the end of the connection of
  //         the session that is resumed), PQC_DEADLINE_EXCEEDED, the broker's own,
  //         PQC_FAILED_PRECONDITION (its protocol version differs), PQC_NOT_FOUND (no such session)
  static pqc_status Open(const BrokerOptions& options, std::unique_ptr<Broker>* broker,
                         std::shared_ptr<Mapping>* control);
  ~Broker();
  Broker(const Broker&) = delete;
  Broker& operator=(const Broker&) = delete;

  // Returns the reply to kHello or kResume; constant.
  const kvstore::BrokerReply& hello() const { return hello_; }

  pqc_status OpenPool(uint64_t cache_id, std::shared_ptr<Mapping>* pool);
  pqc_status HoldPool(uint64_t cache_id);
  pqc_status OpenStaging(uint64_t slot_bytes, uint32_t slot_count, std::shared_ptr<Mapping>* ring);

  // Closes the connection, and with it the session.
  void End();
  // Makes pending and later requests fail, because the worker will not answer them. The connection
  // stays open: its end is the signal, for any holder of the other end, that nothing is mapped any
  // more.
  void Abandon() { abandoned_ = true; }
  // Waits until the other side closes the connection or the time is over; returns true if it has
  // closed.
  bool WaitEnded(uint32_t wait_ms) const;
  // Returns whether a process of the sidecar still holds the connection (LocalHost).
  bool HoldsConnection() const;

 private:
  explicit Broker(int socket, uint32_t timeout_ms) : socket_(socket), timeout_ms_(timeout_ms) {}

  // Sends a request and receives the answer, with its descriptor, which the caller owns; -1 = none.
  pqc_status Ask(const kvstore::BrokerRequest& request,
                 std::chrono::steady_clock::time_point deadline, kvstore::BrokerReply* reply,
                 int* descriptor);
  // Sends a request and maps the memory that the answer carries.
  pqc_status Exchange(const kvstore::BrokerRequest& request,
                      std::chrono::steady_clock::time_point deadline, MappingAccess access,
                      const char* name, kvstore::BrokerReply* reply,
                      std::shared_ptr<Mapping>* memory);

  // Receives the pending answer.
  // Errors: PQC_DEADLINE_EXCEEDED (the answer stays pending), PQC_UNAVAILABLE
  pqc_status ReceivePending(std::chrono::steady_clock::time_point deadline,
                            kvstore::BrokerReply* reply, int* descriptor) PQCACHED_REQUIRES(mutex_);
  // The caller closes *descriptor, whatever the status.
  pqc_status RequestAndReceive(const kvstore::BrokerRequest& request,
                               std::chrono::steady_clock::time_point deadline,
                               kvstore::BrokerReply* reply, int* descriptor);

  const int socket_;
  const uint32_t timeout_ms_;
  std::atomic<bool> abandoned_ = false;
  kvstore::BrokerReply hello_;
  struct Incoming {
    kvstore::BrokerReply reply;
    size_t received = 0;
    int descriptor = -1;
  };

  base::TimedMutex mutex_;  // held for one request and its answer
  // Request whose answer is not completely received.
  std::optional<kvstore::BrokerRequest> pending_request_ PQCACHED_GUARDED_BY(mutex_);
  // Received part of that answer.
  Incoming incoming_ PQCACHED_GUARDED_BY(mutex_);
  // An error other than a deadline cut a request or an answer short.
  bool broken_ PQCACHED_GUARDED_BY(mutex_) = false;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_BROKER_H_
