// NotifySocket receives the messages of a worker's Notifier in its supervisor.
//
// It is a datagram socket at a path that only this user may write to. The kernel attaches the
// sender's pid and uid to each message.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_SUPERVISE_NOTIFY_SOCKET_H_
#define PQCACHED_SERVICE_SUPERVISE_NOTIFY_SOCKET_H_

#include <sys/types.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/local_session.h"

namespace pqcached::service {

// Notification is the content of one datagram: lines NAME=VALUE. When a name occurs several times,
// the last value counts.
struct Notification {
  pid_t pid = 0;  // pid of the sender
  uid_t uid = 0;
  std::map<std::string, std::string> fields;
  std::vector<kvstore::FileDescriptor> descriptors;

  bool Has(const std::string& name, const std::string& value) const {
    const auto found = fields.find(name);
    return found != fields.end() && found->second == value;
  }
  std::string Get(const std::string& name) const {
    const auto found = fields.find(name);
    return found == fields.end() ? std::string() : found->second;
  }
};

class NotifySocket {
 public:
  // Binds the socket and replaces an existing one at `path`, on which the caller must hold the
  // claim.
  //
  // Errors: kFailedPrecondition  it cannot be bound
  static absl::StatusOr<std::unique_ptr<NotifySocket>> Bind(const std::string& path);
  // Removes the socket.
  ~NotifySocket();
  NotifySocket(const NotifySocket&) = delete;
  NotifySocket& operator=(const NotifySocket&) = delete;

  const std::string& path() const { return path_; }
  int descriptor() const { return socket_.get(); }

  // Returns the next message, or nothing when none waits. Skips messages that are truncated or
  // carry no sender.
  std::optional<Notification> Receive();

 private:
  NotifySocket(std::string path, kvstore::FileDescriptor socket)
      : path_(std::move(path)), socket_(std::move(socket)) {}

  const std::string path_;
  const kvstore::FileDescriptor socket_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SUPERVISE_NOTIFY_SOCKET_H_
