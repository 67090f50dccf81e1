// Watch calls a function whenever a descriptor is readable. The descriptor has another owner, which
// must destroy the Watch first.
//
// Single-threaded: create, destroy and run on the thread of the io_context. The function may
// destroy its own Watch.
#ifndef PQCACHED_SERVICE_RDMA_WATCH_H_
#define PQCACHED_SERVICE_RDMA_WATCH_H_

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <functional>
#include <memory>
#include <utility>

namespace pqcached::service::rdma {

class Watch {
 public:
  Watch(boost::asio::io_context& io, int descriptor, std::function<void()> readable)
      : state_(std::make_shared<State>(io, descriptor, std::move(readable))) {
    Wait(state_);
  }
  ~Watch() {
    state_->ended = true;
    state_->descriptor.release();  // ends the wait, and leaves the descriptor open
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  using Descriptor = boost::asio::posix::stream_descriptor;
  struct State {
    State(boost::asio::io_context& io, int number, std::function<void()> function)
        : descriptor(io, number), readable(std::move(function)) {}
    Descriptor descriptor;
    std::function<void()> readable;
    bool ended = false;
  };

  static void Wait(const std::shared_ptr<State>& state) {
    state->descriptor.async_wait(Descriptor::wait_read,
                                 [state](const boost::system::error_code& error) {
                                   if (error || state->ended) return;
                                   state->readable();
                                   if (!state->ended) Wait(state);
                                 });
  }

  // Shared with the wait, whose end may come after that of the Watch.
  const std::shared_ptr<State> state_;
};

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_SERVICE_RDMA_WATCH_H_
