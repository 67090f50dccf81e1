// Connection: one reliable connection with its queue pair, and a completion queue whose channel is
// watched by Asio.
//
// Single-threaded: used on the thread of the io_context. The handler may destroy anything except
// the connection that calls it.
#ifndef PQCACHED_SERVICE_RDMA_CONNECTION_H_
#define PQCACHED_SERVICE_RDMA_CONNECTION_H_

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/rdma/device.h"
#include "service/rdma/objects.h"
#include "service/rdma/watch.h"

namespace pqcached::service::rdma {

class Connection {
 public:
  // Receives each completion, or the refusal after which there are none any more.
  using Handler = std::function<void(const absl::StatusOr<ibv_wc>&)>;

  // Makes a queue pair on `id` that has room for `depth` work requests at a time. Takes `id` over
  // when it succeeds.
  //
  // Errors: those of CallFailed
  static absl::StatusOr<std::unique_ptr<Connection>> Create(Verbs& verbs,
                                                            boost::asio::io_context& io,
                                                            std::shared_ptr<Device> device,
                                                            Owned<rdma_cm_id>& id, uint32_t depth,
                                                            Handler handler);

  rdma_cm_id* id() const { return id_.get(); }
  Device& device() const { return *device_; }
  uint32_t depth() const { return depth_; }

  // Posts one work request, signalled.
  //
  // Errors: those of CallFailed
  absl::Status Post(ibv_send_wr& work);
  // Starts the end of the connection; both ends receive an event of it.
  void Disconnect() { verbs_.Disconnect(id_.get()); }

 private:
  Connection(Verbs& verbs, boost::asio::io_context& io, std::shared_ptr<Device> device,
             uint32_t depth, Handler handler)
      : verbs_(verbs),
        io_(io),
        device_(std::move(device)),
        depth_(depth),
        handler_(std::make_shared<Handler>(std::move(handler))) {}

  void TakeEvents();
  void Drain();
  void Report(const absl::StatusOr<ibv_wc>& completion) { (*handler_)(completion); }

  Verbs& verbs_;
  boost::asio::io_context& io_;
  const std::shared_ptr<Device> device_;
  const uint32_t depth_;
  const std::shared_ptr<Handler> handler_;  // shared with postponed drains, which thus see its end
  Owned<ibv_comp_channel> channel_;
  Owned<ibv_cq> queue_;
  Owned<rdma_cm_id> id_;
  std::optional<Watch> watch_;
};

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_SERVICE_RDMA_CONNECTION_H_
