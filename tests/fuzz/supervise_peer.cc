#include "tests/fuzz/supervise_peer.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <utility>

#include "tests/fuzz/target.h"

namespace pqcached::fuzz {

using kvstore::FileDescriptor;

SupervisePeer::SupervisePeer(const std::string& path)
    : socket_(*service::NotifySocket::Bind(path)),
      sender_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)),
      thread_([this] { Serve(); }) {}

SupervisePeer::~SupervisePeer() {
  wanted_ = -1;
  wanted_.notify_all();
  thread_.join();
}

void SupervisePeer::Answer(std::vector<Message> messages) {
  messages_ = std::move(messages);
  ++wanted_;
  wanted_.notify_all();
}

void SupervisePeer::AwaitEnd() const {
  for (int given = given_; given != wanted_; given = given_) given_.wait(given);
}

void SupervisePeer::Serve() {
  for (;;) {
    wanted_.wait(given_);
    if (wanted_ < 0) return;
    std::optional<service::Notification> asked;
    while (!asked) {
      pollfd ready = {.fd = socket_->descriptor(), .events = POLLIN, .revents = 0};
      poll(&ready, 1, -1);
      asked = socket_->Receive();
    }
    if (asked->descriptors.size() != 1) Found("a take-over without its socket");
    {
      const FileDescriptor successor = std::move(asked->descriptors[0]);
      for (const Message& message : messages_) {
        Send(successor.get(), "", message.text, message.descriptors);
      }
    }
    ++given_;
    given_.notify_all();
  }
}

void SupervisePeer::Send(int socket, const std::string& path, std::string_view text,
                         size_t descriptor_count) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  iovec part = {const_cast<char*>(text.data()), text.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!path.empty()) {
    message.msg_name = &address;
    message.msg_namelen = sizeof(address);
  }
  const std::vector<int> descriptors(descriptor_count, STDIN_FILENO);
  std::vector<char> control(CMSG_SPACE(descriptor_count * sizeof(int)));
  if (descriptor_count > 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptor_count * sizeof(int));
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptor_count * sizeof(int));
  }
  sendmsg(socket, &message, MSG_NOSIGNAL);
}

}  // namespace pqcached::fuzz
