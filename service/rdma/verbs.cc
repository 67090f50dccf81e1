#include "service/rdma/verbs.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"

namespace pqcached::service::rdma {
namespace {

constexpr const char* kConnectionManager = "/dev/infiniband/rdma_cm";

// The functions that are exported; the others are inline in <infiniband/verbs.h>.
// X(library, name)
// clang-format off
#define PQCACHED_RDMA_FUNCTIONS(X) \
  X(cm_, rdma_create_event_channel) X(cm_, rdma_destroy_event_channel) \
  X(cm_, rdma_get_cm_event) X(cm_, rdma_ack_cm_event) X(cm_, rdma_create_id) \
  X(cm_, rdma_destroy_id) X(cm_, rdma_bind_addr) X(cm_, rdma_listen) X(cm_, rdma_get_src_port) \
  X(cm_, rdma_resolve_addr) X(cm_, rdma_resolve_route) X(cm_, rdma_set_option) \
  X(cm_, rdma_connect) X(cm_, rdma_accept) X(cm_, rdma_reject) X(cm_, rdma_disconnect) \
  X(cm_, rdma_create_qp) X(cm_, rdma_destroy_qp) X(ibv_, ibv_query_device) \
  X(ibv_, ibv_query_port) X(ibv_, ibv_alloc_pd) X(ibv_, ibv_dealloc_pd) X(ibv_, ibv_reg_mr) \
  X(ibv_, ibv_dereg_mr) X(ibv_, ibv_create_comp_channel) X(ibv_, ibv_destroy_comp_channel) \
  X(ibv_, ibv_create_cq) X(ibv_, ibv_destroy_cq) X(ibv_, ibv_get_cq_event) \
  X(ibv_, ibv_ack_cq_events)
// clang-format on

// Returns errno when a function of librdmacm has failed.
int ErrorOf(int result) { return result == 0 ? 0 : errno; }

bool StopBlocking(int descriptor) {
  const int flags = fcntl(descriptor, F_GETFL);
  return flags >= 0 && fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) == 0;
}

class LibraryVerbs : public Verbs {
 public:
  absl::Status Load() {
    cm_ = dlopen("librdmacm.so.1", RTLD_NOW | RTLD_LOCAL);
    ibv_ = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (cm_ == nullptr || ibv_ == nullptr) {
      return Unimplemented("", absl::StrCat("RDMA needs its libraries: ", dlerror()));
    }
#define PQCACHED_RDMA_LOOK_UP(library, name)                            \
  name##_ = reinterpret_cast<decltype(name##_)>(dlsym(library, #name)); \
  if (name##_ == nullptr) return Unimplemented("", "the libraries of RDMA have no " #name);
    PQCACHED_RDMA_FUNCTIONS(PQCACHED_RDMA_LOOK_UP)
#undef PQCACHED_RDMA_LOOK_UP
    return absl::OkStatus();
  }

  rdma_event_channel* CreateEventChannel() override {
    rdma_event_channel* channel = rdma_create_event_channel_();
    if (channel == nullptr || StopBlocking(channel->fd)) return channel;
    rdma_destroy_event_channel_(channel);
    return nullptr;
  }

  int GetEvent(rdma_event_channel* channel, ConnectionEvent* event) override {
    rdma_cm_event* found = nullptr;
    if (rdma_get_cm_event_(channel, &found) != 0) return errno;
    const rdma_conn_param& peer = found->param.conn;
    *event = {.id = found->id, .type = found->event, .status = found->status};
    event->responder_resources = peer.responder_resources;
    event->initiator_depth = peer.initiator_depth;
    if (peer.private_data != nullptr) {
      event->private_bytes = std::min<size_t>(peer.private_data_len, event->private_data.size());
      std::memcpy(event->private_data.data(), peer.private_data, event->private_bytes);
    }
    return ErrorOf(rdma_ack_cm_event_(found));
  }

  int CreateId(rdma_event_channel* channel, rdma_cm_id** id, void* context) override {
    return ErrorOf(rdma_create_id_(channel, id, context, RDMA_PS_TCP));
  }
  int BindAddress(rdma_cm_id* id, sockaddr* address) override {
    return ErrorOf(rdma_bind_addr_(id, address));
  }
  int Listen(rdma_cm_id* id, int backlog) override { return ErrorOf(rdma_listen_(id, backlog)); }
  uint16_t PortOf(rdma_cm_id* id) override { return be16toh(rdma_get_src_port_(id)); }
  int ResolveAddress(rdma_cm_id* id, sockaddr* from, sockaddr* to, int timeout_ms) override {
    return ErrorOf(rdma_resolve_addr_(id, from, to, timeout_ms));
  }
  int ResolveRoute(rdma_cm_id* id, int timeout_ms) override {
    return ErrorOf(rdma_resolve_route_(id, timeout_ms));
  }
  int SetAckTimeout(rdma_cm_id* id, uint8_t timeout) override {
    return ErrorOf(rdma_set_option_(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout,
                                    sizeof(timeout)));
  }
  int Connect(rdma_cm_id* id, rdma_conn_param* parameters) override {
    return ErrorOf(rdma_connect_(id, parameters));
  }
  int Accept(rdma_cm_id* id, rdma_conn_param* parameters) override {
    return ErrorOf(rdma_accept_(id, parameters));
  }
  int Reject(rdma_cm_id* id, std::span<const std::byte> private_data) override {
    return ErrorOf(
        rdma_reject_(id, private_data.data(), static_cast<uint8_t>(private_data.size())));
  }
  int Disconnect(rdma_cm_id* id) override { return ErrorOf(rdma_disconnect_(id)); }
  int CreateQueuePair(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) override {
    return ErrorOf(rdma_create_qp_(id, pd, attributes));
  }

  int QueryDevice(ibv_context* context, ibv_device_attr* attributes) override {
    return ibv_query_device_(context, attributes);
  }
  int QueryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes) override {
    *attributes = {};  // the exported function fills the fields of its first version
    return ibv_query_port_(context, port, reinterpret_cast<_compat_ibv_port_attr*>(attributes));
  }
  ibv_pd* AllocatePd(ibv_context* context) override { return ibv_alloc_pd_(context); }
  ibv_mr* RegisterMemory(ibv_pd* pd, void* address, size_t bytes, int access) override {
    return ibv_reg_mr_(pd, address, bytes, access);
  }
  ibv_mw* AllocateWindow(ibv_pd* pd) override { return ibv_alloc_mw(pd, IBV_MW_TYPE_2); }

  ibv_comp_channel* CreateCompletionChannel(ibv_context* context) override {
    ibv_comp_channel* channel = ibv_create_comp_channel_(context);
    if (channel == nullptr || StopBlocking(channel->fd)) return channel;
    ibv_destroy_comp_channel_(channel);
    return nullptr;
  }
  ibv_cq* CreateCompletionQueue(ibv_context* context, int entries,
                                ibv_comp_channel* channel) override {
    return ibv_create_cq_(context, entries, nullptr, channel, 0);
  }
  int TakeCompletionEvent(ibv_comp_channel* channel) override {
    ibv_cq* queue = nullptr;
    void* context = nullptr;
    if (ibv_get_cq_event_(channel, &queue, &context) != 0) return errno;
    ibv_ack_cq_events_(queue, 1);
    return 0;
  }
  int RequestNotification(ibv_cq* queue) override { return ibv_req_notify_cq(queue, 0); }
  int PollCompletions(ibv_cq* queue, std::span<ibv_wc> completions) override {
    return ibv_poll_cq(queue, static_cast<int>(completions.size()), completions.data());
  }
  int PostSend(ibv_qp* pair, ibv_send_wr* work) override {
    ibv_send_wr* refused = nullptr;
    return ibv_post_send(pair, work, &refused);
  }

  void Destroy(rdma_event_channel* channel) override { rdma_destroy_event_channel_(channel); }
  void Destroy(rdma_cm_id* id) override {
    if (id->qp != nullptr) rdma_destroy_qp_(id);
    rdma_destroy_id_(id);
  }
  void Destroy(ibv_pd* pd) override { ibv_dealloc_pd_(pd); }
  void Destroy(ibv_mr* region) override { ibv_dereg_mr_(region); }
  void Destroy(ibv_mw* window) override { ibv_dealloc_mw(window); }
  void Destroy(ibv_comp_channel* channel) override { ibv_destroy_comp_channel_(channel); }
  void Destroy(ibv_cq* queue) override { ibv_destroy_cq_(queue); }

 private:
  void* cm_ = nullptr;
  void* ibv_ = nullptr;
#define PQCACHED_RDMA_DECLARE(library, name) decltype(&::name) name##_ = nullptr;
  PQCACHED_RDMA_FUNCTIONS(PQCACHED_RDMA_DECLARE)
#undef PQCACHED_RDMA_DECLARE
};

}  // namespace

absl::StatusOr<std::unique_ptr<Verbs>> LoadVerbs() {
  if (access(kConnectionManager, R_OK | W_OK) != 0) {
    return Unimplemented("", absl::StrCat(kConnectionManager, ": ", std::strerror(errno)));
  }
  auto verbs = std::make_unique<LibraryVerbs>();
  if (absl::Status status = verbs->Load(); !status.ok()) return status;
  return verbs;
}

}  // namespace pqcached::service::rdma
