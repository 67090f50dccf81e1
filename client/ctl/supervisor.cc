#include "client/ctl/supervisor.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

namespace pqcached::ctl {
namespace {

constexpr char kScheme[] = "unix://";
constexpr time_t kTimeoutSeconds = 5;

class Socket {
 public:
  explicit Socket(int type) : descriptor_(socket(AF_UNIX, type | SOCK_CLOEXEC, 0)) {
    const timeval timeout = {.tv_sec = kTimeoutSeconds, .tv_usec = 0};
    setsockopt(descriptor_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    setsockopt(descriptor_, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  }
  ~Socket() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  Status Connect(const std::string& endpoint, const char* suffix) const {
    if (!endpoint.starts_with(kScheme)) {
      return Status(PQC_INVALID_ARGUMENT, "endpoint: must be unix:///path");
    }
    const std::string path = endpoint.substr(std::strlen(kScheme)) + suffix;
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof(address.sun_path)) {
      return Status(PQC_INVALID_ARGUMENT, "endpoint: " + path + " is too long");
    }
    path.copy(address.sun_path, path.size());
    if (connect(descriptor_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      return Status(PQC_UNAVAILABLE, path + ": " + std::strerror(errno));
    }
    return Status();
  }

  int descriptor() const { return descriptor_; }

 private:
  const int descriptor_;
};

}  // namespace

Result<Json> ReadSupervisor(const std::string& endpoint) {
  const Socket connection(SOCK_STREAM);
  if (Status status = connection.Connect(endpoint, ".status"); !status.ok()) return status;
  std::string line;
  char buffer[4096];
  ssize_t got = 0;
  while ((got = recv(connection.descriptor(), buffer, sizeof(buffer), 0)) > 0) {
    line.append(buffer, static_cast<size_t>(got));
  }
  Json state = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!state.is_object() || !state.contains("state")) {
    return Status(PQC_UNAVAILABLE, "the supervisor does not answer");
  }
  return state;
}

Status SendChoice(const std::string& endpoint, const std::string& choice) {
  const Socket connection(SOCK_DGRAM);
  if (Status status = connection.Connect(endpoint, ".supervisor"); !status.ok()) return status;
  const std::string message = "PQCACHED_RECOVER=" + choice;
  if (send(connection.descriptor(), message.data(), message.size(), MSG_NOSIGNAL) < 0) {
    return Status(PQC_UNAVAILABLE, std::string(".supervisor: ") + std::strerror(errno));
  }
  return Status();
}

}  // namespace pqcached::ctl
