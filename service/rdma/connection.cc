#include "service/rdma/connection.h"

#include <array>
#include <boost/asio/post.hpp>
#include <cerrno>

#include "service/base/refusal.h"
#include "service/rdma/failure.h"

namespace pqcached::service::rdma {
namespace {

// Completions that are handled before other connections have their turn.
constexpr size_t kCompletionsPerTurn = 32;

}  // namespace

absl::StatusOr<std::unique_ptr<Connection>> Connection::Create(Verbs& verbs,
                                                               boost::asio::io_context& io,
                                                               std::shared_ptr<Device> device,
                                                               Owned<rdma_cm_id>& id,
                                                               uint32_t depth, Handler handler) {
  const Destroyer destroyer{&verbs};
  ibv_context* const context = id->verbs;
  std::unique_ptr<Connection> made(
      new Connection(verbs, io, std::move(device), depth, std::move(handler)));
  made->channel_ = {verbs.CreateCompletionChannel(context), destroyer};
  if (made->channel_ == nullptr) return CallFailed("ibv_create_comp_channel", errno);
  made->queue_ = {
      verbs.CreateCompletionQueue(context, static_cast<int>(depth), made->channel_.get()),
      destroyer};
  if (made->queue_ == nullptr) return CallFailed("ibv_create_cq", errno);
  if (const int error = verbs.RequestNotification(made->queue_.get()); error != 0) {
    return CallFailed("ibv_req_notify_cq", error);
  }
  ibv_qp_init_attr attributes = {};
  attributes.send_cq = made->queue_.get();
  attributes.recv_cq = made->queue_.get();
  attributes.cap = {.max_send_wr = depth,
                    .max_recv_wr = 0,
                    .max_send_sge = 1,
                    .max_recv_sge = 0,
                    .max_inline_data = 0};
  attributes.qp_type = IBV_QPT_RC;
  const int error = verbs.CreateQueuePair(id.get(), made->device_->domain(), &attributes);
  if (error != 0) return CallFailed("rdma_create_qp", error);
  made->id_ = std::move(id);
  made->watch_.emplace(io, made->channel_->fd,
                       [connection = made.get()] { connection->TakeEvents(); });
  return made;
}

absl::Status Connection::Post(ibv_send_wr& work) {
  work.next = nullptr;
  work.send_flags = IBV_SEND_SIGNALED;
  if (const int error = verbs_.PostSend(id_->qp, &work); error != 0) {
    return CallFailed("ibv_post_send", error);
  }
  return absl::OkStatus();
}

void Connection::TakeEvents() {
  int error = 0;
  while (error == 0) error = verbs_.TakeCompletionEvent(channel_.get());
  if (error != EAGAIN) return Report(CallFailed("ibv_get_cq_event", error));
  // Completions that come after this call make another event, so that none is overlooked.
  error = verbs_.RequestNotification(queue_.get());
  if (error != 0) return Report(CallFailed("ibv_req_notify_cq", error));
  Drain();
}

void Connection::Drain() {
  std::array<ibv_wc, kCompletionsPerTurn> completions;
  const int count = verbs_.PollCompletions(queue_.get(), completions);
  if (count < 0) return Report(CallFailed("ibv_poll_cq", EIO));
  for (int index = 0; index < count; ++index) Report(completions[static_cast<size_t>(index)]);
  if (static_cast<size_t>(count) < completions.size()) return;
  boost::asio::post(io_, [this, alive = std::weak_ptr<Handler>(handler_)] {
    if (!alive.expired()) Drain();
  });
}

}  // namespace pqcached::service::rdma
