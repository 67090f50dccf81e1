// Broker: the connection to the sidecar's broker (kvstore/read/broker_protocol.h), which is the
// session.
//
// Thread-safe: one request at a time, each with a deadline.
#ifndef PQCACHED_CLIENT_LOCAL_BROKER_H_
#define PQCACHED_CLIENT_LOCAL_BROKER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "client/local/mapping.h"
#include "kvstore/read/broker_protocol.h"
#include "pqcached/client.h"

namespace pqcached::client {

struct BrokerOptions {
  std::string socket_path;  // of gRPC's socket
  std::string tenant;
  std::string client_name;
  uint32_t timeout_ms = 10000;   // of a call
  uint32_t open_timeout_ms = 0;  // of Open; 0 = the same
  // Goes on with this session instead of opening one; tenant and client_name are those it has.
  std::string resume_token = {};
};

class Broker {
 public:
  // Connects and opens a session, or resumes one. *control is its control memory.
  //
  // Errors: PQC_UNAVAILABLE (there is no broker), PQC_DEADLINE_EXCEEDED, the broker's own,
  //         PQC_FAILED_PRECONDITION (it speaks another version), PQC_NOT_FOUND (nothing to resume)
  static pqc_status Open(const BrokerOptions& options, std::unique_ptr<Broker>* broker,
                         std::shared_ptr<Mapping>* control);
  ~Broker();
  Broker(const Broker&) = delete;
  Broker& operator=(const Broker&) = delete;

  // Of kHello or kResume; constant.
  const kvstore::BrokerReply& hello() const { return hello_; }

  pqc_status OpenPool(uint64_t cache_id, std::shared_ptr<Mapping>* pool);
  pqc_status OpenStaging(uint64_t slot_bytes, uint32_t slot_count, std::shared_ptr<Mapping>* ring);

  // Closes the connection, and with it the session.
  void End();
  // Nobody will answer any more. The connection stays open, because whoever holds its other end learns
  // from its end that nothing is mapped any more.
  void Abandon() { abandoned_ = true; }
  // Waits until the other side has closed the connection or the time is over; says whether it has.
  bool Ended(uint32_t wait_ms) const;

 private:
  explicit Broker(int socket, uint32_t timeout_ms) : socket_(socket), timeout_ms_(timeout_ms) {}

  // Sends a request and maps what the answer brings.
  pqc_status Exchange(const kvstore::BrokerRequest& request,
                      std::chrono::steady_clock::time_point deadline, MappingAccess access,
                      const char* name, kvstore::BrokerReply* reply,
                      std::shared_ptr<Mapping>* memory);

  // Under mutex_. Errors: PQC_DEADLINE_EXCEEDED, and the answer stays owed; PQC_UNAVAILABLE.
  pqc_status ReceiveOwed(std::chrono::steady_clock::time_point deadline,
                         kvstore::BrokerReply* reply, int* descriptor);
  // *descriptor is the caller's to close, whatever the status.
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

  std::timed_mutex mutex_;                      // of one request and its answer
  std::optional<kvstore::BrokerRequest> owed_;  // whose answer has not come, or not all of it
  Incoming incoming_;                           // of that answer
  bool broken_ = false;  // a request or an answer was cut short by more than a deadline
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_BROKER_H_
