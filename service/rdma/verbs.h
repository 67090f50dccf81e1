// Verbs: the functions of libibverbs and librdmacm that transfers call.
//
// LoadVerbs looks the libraries up at run time, so that the project builds into programs that run
// on hosts without them. Tests have an implementation that works in memory and can fail each call.
//
// The names and arguments are those of the C libraries, with three differences: a function that
// returns an int returns 0 or an errno value; events are copied and acknowledged at once; and the
// descriptors of channels do not block. Objects are destroyed by Destroyer (objects.h). Destroying
// cannot fail: all that depends on an object is destroyed before it.
//
// Thread-safe like the libraries.
#ifndef PQCACHED_SERVICE_RDMA_VERBS_H_
#define PQCACHED_SERVICE_RDMA_VERBS_H_

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"

namespace pqcached::service::rdma {

// An event of the connection manager.
struct ConnectionEvent {
  rdma_cm_id* id = nullptr;
  rdma_cm_event_type type = RDMA_CM_EVENT_ADDR_RESOLVED;
  int status = 0;
  uint8_t responder_resources = 0;  // READs that the peer may have in flight to this end
  uint8_t initiator_depth = 0;      // READs that this end may have in flight to the peer
  std::array<std::byte, 256> private_data = {};
  size_t private_bytes = 0;  // may be more than the peer has sent; the rest is 0
};

class Verbs {
 public:
  virtual ~Verbs() = default;

  // Connection manager. GetEvent returns EAGAIN when there is no event.
  virtual rdma_event_channel* CreateEventChannel() = 0;
  virtual int GetEvent(rdma_event_channel* channel, ConnectionEvent* event) = 0;
  virtual int CreateId(rdma_event_channel* channel, rdma_cm_id** id, void* context) = 0;
  virtual int BindAddress(rdma_cm_id* id, sockaddr* address) = 0;
  virtual int Listen(rdma_cm_id* id, int backlog) = 0;
  virtual uint16_t PortOf(rdma_cm_id* id) = 0;
  virtual int ResolveAddress(rdma_cm_id* id, sockaddr* from, sockaddr* to, int timeout_ms) = 0;
  virtual int ResolveRoute(rdma_cm_id* id, int timeout_ms) = 0;
  // Sets the time after which an unacknowledged packet is repeated: 4.096 us * 2^timeout.
  virtual int SetAckTimeout(rdma_cm_id* id, uint8_t timeout) = 0;
  virtual int Connect(rdma_cm_id* id, rdma_conn_param* parameters) = 0;
  virtual int Accept(rdma_cm_id* id, rdma_conn_param* parameters) = 0;
  virtual int Reject(rdma_cm_id* id, std::span<const std::byte> private_data) = 0;
  virtual int Disconnect(rdma_cm_id* id) = 0;
  virtual int CreateQueuePair(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) = 0;

  // Devices and memory.
  virtual int QueryDevice(ibv_context* context, ibv_device_attr* attributes) = 0;
  virtual int QueryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes) = 0;
  virtual ibv_pd* AllocatePd(ibv_context* context) = 0;
  virtual ibv_mr* RegisterMemory(ibv_pd* pd, void* address, size_t bytes, int access) = 0;
  virtual ibv_mw* AllocateWindow(ibv_pd* pd) = 0;  // of type 2

  // Completions. TakeCompletionEvent returns EAGAIN when there is no event; PollCompletions returns
  // their number, or a negative number.
  virtual ibv_comp_channel* CreateCompletionChannel(ibv_context* context) = 0;
  virtual ibv_cq* CreateCompletionQueue(ibv_context* context, int entries,
                                        ibv_comp_channel* channel) = 0;
  virtual int TakeCompletionEvent(ibv_comp_channel* channel) = 0;
  virtual int RequestNotification(ibv_cq* queue) = 0;
  virtual int PollCompletions(ibv_cq* queue, std::span<ibv_wc> completions) = 0;
  virtual int PostSend(ibv_qp* pair, ibv_send_wr* work) = 0;

  virtual void Destroy(rdma_event_channel* channel) = 0;
  virtual void Destroy(rdma_cm_id* id) = 0;  // with its queue pair
  virtual void Destroy(ibv_pd* pd) = 0;
  virtual void Destroy(ibv_mr* region) = 0;
  virtual void Destroy(ibv_mw* window) = 0;
  virtual void Destroy(ibv_comp_channel* channel) = 0;
  virtual void Destroy(ibv_cq* queue) = 0;
};

// Returns the verbs of the host's libraries, which stay loaded.
//
// Errors: kUnimplemented  the host has no libraries, or no connection manager in its kernel
absl::StatusOr<std::unique_ptr<Verbs>> LoadVerbs();

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_SERVICE_RDMA_VERBS_H_
