// Broker: the connection to the sidecar's broker (kvstore/read/broker_protocol.h), which is the
// session.
//
// Thread-safe: one request at a time, each with a deadline.
#ifndef PQCACHED_CLIENT_LOCAL_BROKER_H_
#define PQCACHED_CLIENT_LOCAL_BROKER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "client/local/mapping.h"
#include "kvstore/read/broker_protocol.h"
#include "pqcached/client.h"

namespace pqcached::client {

struct BrokerOptions {
  std::string socket_path;  // of gRPC's socket
  std::string tenant;
  std::string client_name;
  uint32_t timeout_ms = 10000;
};

class Broker {
 public:
  // Connects and opens a session. *control is its control memory.
  //
  // Errors: PQC_UNAVAILABLE (there is no broker), PQC_DEADLINE_EXCEEDED, the broker's own,
  //         PQC_FAILED_PRECONDITION (it speaks another version)
  static pqc_status Open(const BrokerOptions& options, std::unique_ptr<Broker>* broker,
                         std::shared_ptr<Mapping>* control);
  ~Broker();
  Broker(const Broker&) = delete;
  Broker& operator=(const Broker&) = delete;

  // Of kHello; constant.
  const kvstore::BrokerReply& hello() const { return hello_; }

  pqc_status OpenPool(uint64_t cache_id, std::shared_ptr<Mapping>* pool);
  pqc_status OpenStaging(uint64_t slot_bytes, uint32_t slot_count, std::shared_ptr<Mapping>* ring);

  // Closes the connection, and with it the session.
  void End();
  // Waits until the other side has closed the connection or the time is over; says whether it has.
  bool Ended(uint32_t wait_ms) const;

 private:
  explicit Broker(int socket, uint32_t timeout_ms) : socket_(socket), timeout_ms_(timeout_ms) {}

  // Sends a request and maps what the answer brings.
  pqc_status Exchange(const kvstore::BrokerRequest& request, MappingAccess access, const char* name,
                      kvstore::BrokerReply* reply, std::shared_ptr<Mapping>* memory);

  const int socket_;
  const uint32_t timeout_ms_;
  kvstore::BrokerReply hello_;
  std::mutex mutex_;     // of one request and its answer
  bool broken_ = false;  // an exchange was cut short: what comes next is not its answer
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_BROKER_H_
