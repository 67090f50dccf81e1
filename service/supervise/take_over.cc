#include "service/supervise/take_over.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

using kvstore::FileDescriptor;

constexpr absl::Duration kSendTimeout = absl::Seconds(10);
constexpr absl::string_view kDone = "=done";  // cannot be the name of a descriptor

absl::Status Failed(const char* what, int error) {
  const std::string message = absl::StrCat("take-over: ", what, ": ", std::strerror(error));
  if (error == ENOENT || error == ECONNREFUSED) return NotFound("", message);
  if (error == EACCES || error == EPERM) return PermissionDenied("", message);
  return Unavailable("", message, kNoRetry);
}

// Sends one message, with the descriptor if there is one. Returns 0, or errno.
int Send(int socket, absl::string_view text, int descriptor, sockaddr_un* address) {
  iovec part = {const_cast<char*>(text.data()), text.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (address != nullptr) {
    message.msg_name = address;
    message.msg_namelen = sizeof(*address);
  }
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  while (sendmsg(socket, &message, MSG_NOSIGNAL) < 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

struct Received {
  std::string text;
  FileDescriptor descriptor;
};

// Waits for the next message; its text is empty at the end of the stream.
absl::StatusOr<Received> Receive(int socket, kvstore::SteadyTime until) {
  pollfd ready = {.fd = socket, .events = POLLIN, .revents = 0};
  int count = 0;
  do {
    const int64_t left = absl::ToInt64Milliseconds(until - kvstore::SteadyTime::Now());
    count = poll(&ready, 1, static_cast<int>(std::clamp<int64_t>(left, 0, INT32_MAX)));
  } while (count < 0 && errno == EINTR);
  if (count <= 0) return Failed("no answer", ETIMEDOUT);
  std::array<char, 1024> text;
  iovec part = {text.data(), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (got < 0) return Failed("receiving", errno);
  Received received{std::string(text.data(), static_cast<size_t>(got)), {}};
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return received;
  // The padded buffer has room for more than one descriptor; the others are closed.
  const size_t descriptor_count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
  for (size_t i = 0; i < descriptor_count; ++i) {
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
    FileDescriptor owner(descriptor);
    if (i == 0) received.descriptor = std::move(owner);
  }
  return received;
}

}  // namespace

absl::StatusOr<KeptDescriptors> TakeOver(const std::string& socket_path, absl::Duration timeout) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (socket_path.size() >= sizeof(address.sun_path)) return Failed("path", ENAMETOOLONG);
  socket_path.copy(address.sun_path, socket_path.size());
  int ends[2] = {};
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return Failed("socketpair", errno);
  }
  const FileDescriptor mine(ends[0]);
  {
    const FileDescriptor theirs(ends[1]);
    const FileDescriptor asking(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int error =
        Send(asking.get(), absl::StrCat(kTakeOverField, "=1"), theirs.get(), &address);
    if (error != 0) return Failed(socket_path.c_str(), error);
  }
  const kvstore::SteadyTime until = kvstore::SteadyTime::Now() + timeout;
  KeptDescriptors kept;
  bool done = false;
  while (true) {
    ASSIGN_OR_RETURN(Received received, Receive(mine.get(), until));
    if (received.text.empty()) break;
    if (received.text == kDone) {
      done = true;
    } else if (kvstore::IsKeeperName(received.text) && received.descriptor.valid()) {
      kept.insert_or_assign(std::move(received.text), std::move(received.descriptor));
    }
  }
  if (!done) return Failed("the other supervisor continues to serve", ECONNABORTED);
  return kept;
}

absl::Status SendKept(int successor, const KeptDescriptors& kept) {
  const timeval timeout = absl::ToTimeval(kSendTimeout);
  setsockopt(successor, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  for (const auto& [name, descriptor] : kept) {
    if (const int error = Send(successor, name, descriptor.get(), nullptr); error != 0) {
      return Unavailable("take-over", absl::StrCat("sending: ", std::strerror(error)), kNoRetry);
    }
  }
  const int error = Send(successor, kDone, -1, nullptr);
  return error == 0 ? absl::OkStatus() : Unavailable("", std::strerror(error), kNoRetry);
}

}  // namespace pqcached::service
