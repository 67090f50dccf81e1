// A real pqcached on a unix socket in a folder of its own.
#ifndef PQCACHED_TESTS_CLIENT_DAEMON_H_
#define PQCACHED_TESTS_CLIENT_DAEMON_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/layer.h"
#include "tests/client/process.h"

namespace pqcached::testing {

// Small segments, so that a few hundred tokens lie in several of them. Runs until its end.
//
// With PQCACHED_TEST_TCP_HOST in the environment (travel/travel_test.py) it serves that address too,
// and clients on the remote path use it. PQCACHED_TEST_TCP_COMMAND is then put before the daemon's
// command; PQCACHED_TEST_TLS is a folder with certificates, for TLS.
class Daemon {
 public:
  explicit Daemon(const std::vector<std::string>& flags = {});

  const std::string& endpoint() const { return endpoint_; }
  // "host:port"; empty when it serves no TCP.
  const std::string& tcp_address() const { return tcp_address_; }
  Process& process() { return *process_; }
  // A client of it; throws when it cannot be opened within a minute.
  Client OpenClient(const std::string& tenant = "default",
                    pqc_path_choice path = PQC_PATH_ANY) const;
  // Until it listens for local and remote clients; throws when it does not within a minute.
  void AwaitServing() const { OpenClient("default", PQC_PATH_ONLY_REMOTE); }

 private:
  TempFolder folder_;
  std::string endpoint_;
  std::string tcp_address_;
  std::unique_ptr<Process> process_;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_DAEMON_H_
