#include "service/supervise/notify_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "service/base/refusal.h"
#include "service/supervise/socket_claim.h"

namespace pqcached::service {
namespace {

using kvstore::FileDescriptor;

constexpr size_t kMaxMessageBytes = 4096;
constexpr size_t kMaxDescriptors = 16;  // more are cut off by the kernel, and closed

// Reads the descriptors of a message, each into an owner, and the sender's pid and uid.
void ReadControl(msghdr& header, Notification& message, bool& has_sender) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET) continue;
    if (part->cmsg_type == SCM_RIGHTS) {
      const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int descriptor = -1;
        std::memcpy(&descriptor, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
        message.descriptors.emplace_back(descriptor);
      }
    } else if (part->cmsg_type == SCM_CREDENTIALS) {
      ucred sender = {};
      std::memcpy(&sender, CMSG_DATA(part), sizeof(sender));
      message.pid = sender.pid;
      message.uid = sender.uid;
      has_sender = true;
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<NotifySocket>> NotifySocket::Bind(const std::string& path) {
  const auto failed = [&path](const char* what) {
    return FailedPrecondition("listen", absl::StrCat(path, ": ", what, ": ", std::strerror(errno)));
  };
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return FailedPrecondition("listen", absl::StrCat(path, " is too long"));
  }
  path.copy(address.sun_path, path.size());
  FileDescriptor bound(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int yes = 1;
  if (!bound.valid() || setsockopt(bound.get(), SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)) != 0) {
    return failed("socket");
  }
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return failed("cannot remove the stale socket");
  const ScopedUmask mask(0177);
  if (bind(bound.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return failed("cannot bind");
  }
  return std::unique_ptr<NotifySocket>(new NotifySocket(path, std::move(bound)));
}

NotifySocket::~NotifySocket() { unlink(path_.c_str()); }

std::optional<Notification> NotifySocket::Receive() {
  while (true) {
    std::array<char, kMaxMessageBytes> text;
    iovec part = {text.data(), text.size()};
    alignas(cmsghdr)
        std::array<char, CMSG_SPACE(sizeof(ucred)) + CMSG_SPACE(kMaxDescriptors * sizeof(int))>
            control = {};
    msghdr header = {};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const ssize_t got = recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::nullopt;
    Notification message;
    bool has_sender = false;
    ReadControl(header, message, has_sender);
    if (!has_sender || (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) continue;
    const absl::string_view lines(text.data(), static_cast<size_t>(got));
    for (const absl::string_view line : absl::StrSplit(lines, '\n')) {
      const std::pair<absl::string_view, absl::string_view> field =
          absl::StrSplit(line, absl::MaxSplits('=', 1));
      message.fields[std::string(field.first)] = std::string(field.second);
    }
    return message;
  }
}

}  // namespace pqcached::service
