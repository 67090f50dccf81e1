#include "tests/client/daemon.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <stdexcept>

namespace pqcached::testing {

namespace {

constexpr int kFirstPort = 7070;  // in a namespace of the test's own

std::string VariableOf(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string TlsFile(const std::string& name) {
  return VariableOf("PQCACHED_TEST_TLS") + "/" + name;
}

bool UsesTls() { return !VariableOf("PQCACHED_TEST_TLS").empty(); }

}  // namespace

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
  if (const std::string host = VariableOf("PQCACHED_TEST_TCP_HOST"); !host.empty()) {
    static std::atomic<int> last_port = kFirstPort;
    tcp_address_ = host + ":" + std::to_string(++last_port);
    command.insert(command.end(), {"--tcp-listen", tcp_address_});
    if (UsesTls()) {
      command.insert(command.end(), {"--tls-certificate", TlsFile("server.pem"), "--tls-key",
                                     TlsFile("server.key"), "--tls-client-ca", TlsFile("ca.pem")});
    } else {
      command.insert(command.end(), {"--plain-tcp", "true"});
    }
    std::istringstream words(VariableOf("PQCACHED_TEST_TCP_COMMAND"));
    command.insert(command.begin(), std::istream_iterator<std::string>(words), {});
  }
  process_ = std::make_unique<Process>(command);
}

Client Daemon::OpenClient(const std::string& tenant, pqc_path_choice path) const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  ClientOptions options{.endpoint = endpoint_, .tenant = tenant, .timeout_ms = 60000, .path = path};
  if (path == PQC_PATH_ONLY_REMOTE && !tcp_address_.empty()) {
    options.endpoint = tcp_address_;
    if (UsesTls()) {
      options.tls_ca = TlsFile("ca.pem");
      options.tls_certificate = TlsFile(tenant + ".pem");
      options.tls_key = TlsFile(tenant + ".key");
    }
  }
  for (;;) {
    Result<Client> client = Client::Open(options);
    if (client.ok()) return std::move(*client);
    // Until the daemon listens; what else may be wrong does not go away.
    if (client.status().code() != PQC_UNAVAILABLE || std::chrono::steady_clock::now() > deadline) {
      throw std::runtime_error(client.status().ToString());
    }
    poll(nullptr, 0, 10);
  }
}

}  // namespace pqcached::testing
