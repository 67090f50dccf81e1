// SupervisePeer: the other side of a supervisor's sockets. A thread answers take-overs as it is told
// to.
#ifndef PQCACHED_TESTS_FUZZ_SUPERVISE_PEER_H_
#define PQCACHED_TESTS_FUZZ_SUPERVISE_PEER_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kvstore/local_session.h"
#include "service/supervise/notify_socket.h"

namespace pqcached::fuzz {

class SupervisePeer {
 public:
  struct Message {
    std::string text;
    size_t descriptors = 0;  // copies of standard input
  };

  // Binds a socket at the path.
  explicit SupervisePeer(const std::string& path);
  ~SupervisePeer();
  SupervisePeer(const SupervisePeer&) = delete;
  SupervisePeer& operator=(const SupervisePeer&) = delete;

  // Sends these messages to the next process that takes over, then ends.
  void Answer(std::vector<Message> messages);
  // Returns when the answer has been given.
  void AwaitEnd() const;

  const std::string& path() const { return socket_->path(); }
  int sender() const { return sender_.get(); }

  // Sends one message; to `path`, or, if it is empty, to the peer of the socket.
  static void Send(int socket, const std::string& path, std::string_view text,
                   size_t descriptor_count);

 private:
  void Serve();

  const std::unique_ptr<service::NotifySocket> socket_;
  const kvstore::FileDescriptor sender_;
  std::vector<Message> messages_;
  std::atomic<int> wanted_ = 0;  // answers; -1 ends the thread
  std::atomic<int> given_ = 0;
  std::thread thread_;
};

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_SUPERVISE_PEER_H_
