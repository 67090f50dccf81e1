#include "service/supervise/status_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"
#include "service/supervise/socket_claim.h"

namespace pqcached::service {
namespace {

constexpr size_t kBacklog = 16;

}  // namespace

absl::StatusOr<std::unique_ptr<StatusSocket>> StatusSocket::Bind(const std::string& path) {
  const auto failed = [&path](const char* action) {
    return FailedPrecondition("listen",
                              absl::StrCat(path, ": ", action, ": ", std::strerror(errno)));
  };
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return FailedPrecondition("listen", absl::StrCat(path, " is too long"));
  }
  path.copy(address.sun_path, path.size());
  kvstore::FileDescriptor bound(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!bound.valid()) return failed("socket");
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return failed("cannot remove the stale socket");
  const ScopedUmask mask(0177);
  if (bind(bound.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(bound.get(), kBacklog) != 0) {
    return failed("cannot bind");
  }
  return std::unique_ptr<StatusSocket>(new StatusSocket(path, std::move(bound)));
}

StatusSocket::~StatusSocket() { unlink(path_.c_str()); }

void StatusSocket::Answer(absl::FunctionRef<std::string()> line) const {
  std::vector<kvstore::FileDescriptor> connections;
  while (connections.size() < kBacklog) {
    kvstore::FileDescriptor connection(
        accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection.valid()) break;
    connections.push_back(std::move(connection));
  }
  if (connections.empty()) return;
  const std::string text = line();
  for (const kvstore::FileDescriptor& connection : connections) {
    send(connection.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
}

}  // namespace pqcached::service
