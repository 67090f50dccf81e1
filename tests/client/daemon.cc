#include "tests/client/daemon.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <stdexcept>

namespace pqcached::testing {

Daemon::Daemon(const std::vector<std::string>& flags) : endpoint_("unix://" + folder_.File("s")) {
  const char* rewritten = std::getenv("PQCACHED_TEST_REWRITTEN_DAEMON");
  std::vector<std::string> command = {rewritten ? rewritten : PQCACHED_DAEMON,
                                      "--listen",
                                      endpoint_,
                                      "--segment-tokens",
                                      "256",
                                      "--tail-tokens",
                                      "128",
                                      "--codebook-tokens",
                                      "512",
                                      "--max-pool-bytes",
                                      "256mib",
                                      "--log-file",
                                      folder_.File("log"),
                                      "--shutdown-timeout",
                                      "2s"};
  for (size_t i = 0; i + 1 < flags.size(); i += 2) {  // those given replace those above
    const auto above = std::find(command.begin(), command.end(), flags[i]);
    if (above != command.end()) {
      *(above + 1) = flags[i + 1];
    } else {
      command.insert(command.end(), {flags[i], flags[i + 1]});
    }
  }
  process_ = std::make_unique<Process>(command);
}

Client Daemon::OpenClient(const std::string& tenant, pqc_path_choice path) const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (;;) {
    Result<Client> client =
        Client::Open({.endpoint = endpoint_, .tenant = tenant, .timeout_ms = 60000, .path = path});
    if (client.ok()) return std::move(*client);
    // Until the daemon listens; what else may be wrong does not go away.
    if (client.status().code() != PQC_UNAVAILABLE || std::chrono::steady_clock::now() > deadline) {
      throw std::runtime_error(client.status().ToString());
    }
    poll(nullptr, 0, 10);
  }
}

}  // namespace pqcached::testing
