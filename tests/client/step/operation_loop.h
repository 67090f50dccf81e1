// What an engine's loop does with the events of a client, for tests of operations.
#ifndef PQCACHED_TESTS_CLIENT_STEP_OPERATION_LOOP_H_
#define PQCACHED_TESTS_CLIENT_STEP_OPERATION_LOOP_H_

#include <poll.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <stdexcept>

#include "pqcached/operation.hpp"
#include "tests/client/layer.h"

namespace pqcached::testing {

inline constexpr int kLoopLimitMs = 60000;  // of the test, not of the client

inline bool IsReadable(int fd, int wait_ms = 0) {
  pollfd polled{.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&polled, 1, wait_ms) == 1 && (polled.revents & POLLIN) != 0;
}

// Takes the next event; its kind is PQC_EVENT_NONE when there is none.
inline pqc_event TakeEvent(const Client& client) {
  pqc_event event = PQC_INIT(pqc_event);
  if (pqc_client_next_event(client.get(), &event) != PQC_OK) {
    throw std::runtime_error(pqc_last_error());
  }
  return event;
}

// Waits for an event by the descriptor, as a loop does.
inline pqc_event AwaitEvent(const Client& client, int fd) {
  if (!IsReadable(fd, kLoopLimitMs)) throw std::runtime_error("no event in time");
  return TakeEvent(client);
}

// Blocks threads that pass, until it is opened.
class Door {
 public:
  void Pass() {
    std::unique_lock lock(mutex_);
    ++passing_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  // Waits until so many threads have come.
  void AwaitPassing(int count) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::milliseconds(kLoopLimitMs),
                           [&] { return passing_ >= count; })) {
      throw std::runtime_error("no thread comes to the door");
    }
  }
  void Open() {
    {
      const std::lock_guard lock(mutex_);
      open_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int passing_ = 0;
  bool open_ = false;
};

inline size_t CountOwn(const char* what) {  // "task" or "fd" of this process
  const std::filesystem::directory_iterator found(std::string("/proc/self/") + what);
  return static_cast<size_t>(std::distance(begin(found), end(found)));
}

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_STEP_OPERATION_LOOP_H_
