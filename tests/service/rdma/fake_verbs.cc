#include "tests/service/rdma/fake_verbs.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "tests/service/rdma/fake_objects.h"

namespace pqcached::service::rdma {
namespace {

int NewEvents() { return eventfd(0, EFD_SEMAPHORE | EFD_NONBLOCK | EFD_CLOEXEC); }

bool Take(int events) {
  uint64_t one = 0;
  return read(events, &one, sizeof(one)) == sizeof(one);
}

void Give(int events) {
  const uint64_t one = 1;
  (void)!write(events, &one, sizeof(one));
}

std::string TextOf(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address->sa_family == AF_INET6) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text,
              sizeof(text));
  } else {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text,
              sizeof(text));
  }
  return text;
}

uint64_t Number(const void* pointer) { return std::bit_cast<uint64_t>(pointer); }

}  // namespace

FakeVerbs::FakeVerbs(FakeFabric& fabric, std::vector<FakeDevice> devices)
    : fabric_(fabric), devices_(std::move(devices)) {
  fabric_.hosts.insert(this);
}

FakeVerbs::~FakeVerbs() { fabric_.hosts.erase(this); }

bool FakeVerbs::Fails(const char* call) {
  if (++calls_ != fail_call_) return false;
  failed_call_ = call;
  errno = ENOMEM;
  return true;
}

std::map<std::string, int> FakeVerbs::objects() const {
  std::map<std::string, int> counts;
  const auto add = [&counts](const char* kind, const auto& objects) {
    if (!objects.empty()) counts[kind] = static_cast<int>(objects.size());
  };
  add("event channel", channels_);
  add("id", ids_);
  add("domain", domains_);
  add("region", regions_);
  add("window", windows_);
  add("completion channel", completion_channels_);
  add("completion queue", queues_);
  return counts;
}

size_t FakeVerbs::remote_keys() const {
  return static_cast<size_t>(
      std::ranges::count_if(windows_, [](const Window* each) { return each->region != nullptr; }) +
      std::ranges::count_if(regions_, [](const Region* each) {
        return (each->access & IBV_ACCESS_REMOTE_READ) != 0;
      }));
}

uint64_t FakeVerbs::reads_of(const std::string& address) const {
  const auto found = reads_.find(address);
  return found == reads_.end() ? 0 : found->second;
}

FakeDevice* FakeVerbs::DeviceAt(const sockaddr* address) {
  for (FakeDevice& device : devices_) {
    if (address == nullptr || device.address == TextOf(address)) return &device;
  }
  return nullptr;
}

FakeDevice& FakeVerbs::DeviceOf(const ibv_context* context) {
  return *std::ranges::find_if(devices_,
                               [context](const auto& each) { return &each.context == context; });
}

FakeId* FakeVerbs::ListenerAt(const std::string& address, uint16_t port) {
  for (FakeId* id : ids_) {
    if (id->is_listener && id->device->address == address && id->port == port) return id;
  }
  return nullptr;
}

void FakeVerbs::Send(FakeId& id, ConnectionEvent event) {
  event.id = &id;
  static_cast<Channel*>(id.channel)->events.push_back(event);
  Give(id.channel->fd);
}

rdma_event_channel* FakeVerbs::CreateEventChannel() {
  if (Fails("CreateEventChannel")) return nullptr;
  auto* const channel = new Channel;
  channel->fd = NewEvents();
  channels_.insert(channel);
  return channel;
}

int FakeVerbs::GetEvent(rdma_event_channel* channel, ConnectionEvent* event) {
  auto& events = static_cast<Channel*>(channel)->events;
  if (Fails("GetEvent")) return ENOMEM;
  const bool is_given = Take(channel->fd);
  if (events.empty()) {
    while (Take(channel->fd)) {  // of ids that are gone
    }
    return EAGAIN;
  }
  if (!is_given) return EAGAIN;
  *event = events.front();
  events.pop_front();
  return 0;
}

int FakeVerbs::CreateId(rdma_event_channel* channel, rdma_cm_id** id, void* context) {
  if (Fails("CreateId")) return ENOMEM;
  auto* const made = new FakeId;
  made->host = this;
  made->channel = channel;
  made->context = context;
  ids_.insert(made);
  *id = made;
  return 0;
}

int FakeVerbs::BindAddress(rdma_cm_id* id, sockaddr* address) {
  if (Fails("BindAddress")) return ENOMEM;
  auto* const bound = static_cast<FakeId*>(id);
  bound->device = DeviceAt(address);
  if (bound->device == nullptr) return ENODEV;
  bound->verbs = &bound->device->context;
  bound->port_num = 1;
  bound->port = next_port_++;
  return 0;
}

int FakeVerbs::Listen(rdma_cm_id* id, int) {
  if (Fails("Listen")) return ENOMEM;
  static_cast<FakeId*>(id)->is_listener = true;
  return 0;
}

uint16_t FakeVerbs::PortOf(rdma_cm_id* id) { return static_cast<FakeId*>(id)->port; }

int FakeVerbs::ResolveAddress(rdma_cm_id* id, sockaddr* from, sockaddr* to, int) {
  if (Fails("ResolveAddress")) return ENOMEM;
  auto* const active = static_cast<FakeId*>(id);
  active->device = DeviceAt(from);
  if (active->device == nullptr) return ENODEV;
  active->verbs = &active->device->context;
  active->port_num = 1;
  active->to = TextOf(to);
  active->port = ntohs(reinterpret_cast<sockaddr_in*>(to)->sin_port);
  Send(*active,
       {.type = fabric_.has_route ? RDMA_CM_EVENT_ADDR_RESOLVED : RDMA_CM_EVENT_ADDR_ERROR});
  return 0;
}

int FakeVerbs::ResolveRoute(rdma_cm_id* id, int) {
  if (Fails("ResolveRoute")) return ENOMEM;
  Send(*static_cast<FakeId*>(id), {.type = RDMA_CM_EVENT_ROUTE_RESOLVED});
  return 0;
}

int FakeVerbs::SetAckTimeout(rdma_cm_id*, uint8_t) { return Fails("SetAckTimeout") ? ENOMEM : 0; }

int FakeVerbs::Connect(rdma_cm_id* id, rdma_conn_param* parameters) {
  if (Fails("Connect")) return ENOMEM;
  auto* const active = static_cast<FakeId*>(id);
  if (fabric_.is_silent) return 0;
  FakeId* listener = nullptr;
  for (FakeVerbs* host : fabric_.hosts) {
    if (FakeId* found = host->ListenerAt(active->to, active->port)) listener = found;
  }
  if (listener == nullptr) {
    Send(*active, {.type = RDMA_CM_EVENT_REJECTED, .status = ECONNREFUSED});
    return 0;
  }
  auto* const passive = new FakeId;
  passive->host = listener->host;
  passive->channel = listener->channel;
  passive->device = listener->device;
  passive->verbs = listener->verbs;
  passive->port_num = 1;
  passive->is_passive = true;
  passive->peer = active;
  active->peer = passive;
  listener->host->ids_.insert(passive);
  ConnectionEvent event = {.type = RDMA_CM_EVENT_CONNECT_REQUEST,
                           .responder_resources = parameters->initiator_depth};
  event.private_bytes = 56;  // like the kernel, padded
  if (!private_data_.empty()) {
    event.private_bytes = private_data_.size();
    std::memcpy(event.private_data.data(), private_data_.data(), private_data_.size());
    Send(*passive, event);
    return 0;
  }
  std::memcpy(event.private_data.data(), parameters->private_data, parameters->private_data_len);
  Send(*passive, event);
  return 0;
}

int FakeVerbs::Accept(rdma_cm_id* id, rdma_conn_param* parameters) {
  if (Fails("Accept")) return ENOMEM;
  auto* const passive = static_cast<FakeId*>(id);
  if (passive->peer == nullptr) return ECONNRESET;
  passive->is_connected = passive->peer->is_connected = true;
  Send(*passive->peer,
       {.type = RDMA_CM_EVENT_ESTABLISHED, .initiator_depth = parameters->responder_resources});
  Send(*passive, {.type = RDMA_CM_EVENT_ESTABLISHED});
  return 0;
}

int FakeVerbs::Reject(rdma_cm_id* id, std::span<const std::byte> private_data) {
  if (Fails("Reject")) return ENOMEM;
  auto* const passive = static_cast<FakeId*>(id);
  if (passive->peer == nullptr) return ECONNRESET;
  ConnectionEvent event = {.type = RDMA_CM_EVENT_REJECTED};
  event.private_bytes = 148;
  std::memcpy(event.private_data.data(), private_data.data(), private_data.size());
  Send(*passive->peer, event);
  passive->peer->peer = nullptr;
  passive->peer = nullptr;
  return 0;
}

void FakeVerbs::Complete(FakeQueuePair& pair, uint64_t work_id, ibv_wc_status status) {
  auto* const queue = static_cast<Queue*>(pair.send_cq);
  ibv_wc completion = {};
  completion.wr_id = work_id;
  completion.status = status;
  queue->completions.emplace_back(&pair, completion);
  if (std::exchange(queue->is_armed, false)) Give(queue->channel->fd);
}

void FakeVerbs::Break(FakeQueuePair& pair) {
  pair.is_broken = true;
  auto& held = pair.owner->host->held_;
  for (const HeldRead& read : held) {
    if (read.pair == &pair) Complete(pair, read.work.wr_id, IBV_WC_WR_FLUSH_ERR);
  }
  std::erase_if(held, [&pair](const HeldRead& read) { return read.pair == &pair; });
}

void FakeVerbs::Part(FakeId& id) {
  FakeId* const peer = std::exchange(id.peer, nullptr);
  if (peer == nullptr) return;
  peer->peer = nullptr;
  if (id.host->fabric_.is_silent) return;
  if (!id.is_connected) {
    if (id.is_passive) Send(*peer, {.type = RDMA_CM_EVENT_REJECTED});
    return;
  }
  for (FakeId* each : {&id, peer}) {
    each->is_connected = false;
    if (each->pair != nullptr) Break(*each->pair);
    Send(*each, {.type = RDMA_CM_EVENT_DISCONNECTED});
  }
}

int FakeVerbs::Disconnect(rdma_cm_id* id) {
  if (Fails("Disconnect")) return ENOMEM;
  Part(*static_cast<FakeId*>(id));
  return 0;
}

int FakeVerbs::CreateQueuePair(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) {
  if (Fails("CreateQueuePair")) return ENOMEM;
  auto* const owner = static_cast<FakeId*>(id);
  owner->pair = std::make_unique<FakeQueuePair>();
  owner->pair->owner = owner;
  owner->pair->pd = pd;
  owner->pair->send_cq = attributes->send_cq;
  owner->pair->depth = attributes->cap.max_send_wr;
  owner->qp = owner->pair.get();
  return 0;
}

int FakeVerbs::QueryDevice(ibv_context* context, ibv_device_attr* attributes) {
  if (Fails("QueryDevice")) return ENOMEM;
  const FakeDevice& device = DeviceOf(context);
  *attributes = {};
  attributes->max_mr_size = device.max_region_bytes;
  attributes->max_qp_init_rd_atom = device.max_reads;
  attributes->max_qp_rd_atom = device.max_reads;
  attributes->max_qp_wr = 1024;
  attributes->max_cqe = 1024;
  attributes->device_cap_flags = device.has_windows ? IBV_DEVICE_MEM_WINDOW_TYPE_2B : 0;
  return 0;
}

int FakeVerbs::QueryPort(ibv_context* context, uint8_t, ibv_port_attr* attributes) {
  if (Fails("QueryPort")) return ENOMEM;
  const FakeDevice& device = DeviceOf(context);
  *attributes = {};
  attributes->max_msg_sz = device.max_message_bytes;
  attributes->active_mtu = device.mtu;
  return 0;
}

ibv_pd* FakeVerbs::AllocatePd(ibv_context* context) {
  if (Fails("AllocatePd")) return nullptr;
  return *domains_.insert(new ibv_pd{.context = context, .handle = 0}).first;
}

ibv_mr* FakeVerbs::RegisterMemory(ibv_pd* pd, void* address, size_t bytes, int access) {
  if (Fails("RegisterMemory")) return nullptr;
  if (bytes > DeviceOf(pd->context).max_region_bytes) {
    errno = EINVAL;
    return nullptr;
  }
  auto* const region = new Region;
  region->context = pd->context;
  region->pd = pd;
  region->addr = address;
  region->length = bytes;
  region->access = access;
  region->lkey = region->rkey = next_key_ += 0x100;
  regions_.insert(region);
  ++regions_made_;
  return region;
}

ibv_mw* FakeVerbs::AllocateWindow(ibv_pd* pd) {
  if (Fails("AllocateWindow")) return nullptr;
  auto* const window = new Window;
  window->context = pd->context;
  window->pd = pd;
  window->type = IBV_MW_TYPE_2;
  window->rkey = next_key_ += 0x100;
  windows_.insert(window);
  return window;
}

ibv_comp_channel* FakeVerbs::CreateCompletionChannel(ibv_context* context) {
  if (Fails("CreateCompletionChannel")) return nullptr;
  auto* const channel = new ibv_comp_channel{.context = context, .fd = NewEvents(), .refcnt = 0};
  completion_channels_.insert(channel);
  return channel;
}

ibv_cq* FakeVerbs::CreateCompletionQueue(ibv_context* context, int entries,
                                         ibv_comp_channel* channel) {
  if (Fails("CreateCompletionQueue")) return nullptr;
  auto* const queue = new Queue;
  queue->context = context;
  queue->channel = channel;
  queue->entries = static_cast<size_t>(entries);
  queues_.insert(queue);
  return queue;
}

int FakeVerbs::TakeCompletionEvent(ibv_comp_channel* channel) {
  if (Fails("TakeCompletionEvent")) return ENOMEM;
  return Take(channel->fd) ? 0 : EAGAIN;
}

int FakeVerbs::RequestNotification(ibv_cq* queue) {
  if (Fails("RequestNotification")) return ENOMEM;
  static_cast<Queue*>(queue)->is_armed = true;
  return 0;
}

int FakeVerbs::PollCompletions(ibv_cq* queue, std::span<ibv_wc> completions) {
  if (Fails("PollCompletions")) return -1;
  auto& found = static_cast<Queue*>(queue)->completions;
  const size_t count = std::min(found.size(), completions.size());
  for (size_t index = 0; index < count; ++index) {
    const auto& [pair, completion] = found.front();
    --pair->posted;
    completions[index] = completion;
    found.pop_front();
  }
  return static_cast<int>(count);
}

const std::byte* FakeVerbs::Find(uint32_t key, uint64_t address, uint64_t bytes,
                                 const FakeQueuePair& pair) {
  const auto lies_in = [&](uint64_t begin, uint64_t size) {
    return address >= begin && bytes <= size && address - begin <= size - bytes;
  };
  const auto bytes_of = [&](const Region& region) {
    return static_cast<const std::byte*>(region.addr) + (address - Number(region.addr));
  };
  for (const Region* region : regions_) {
    if (region->rkey == key && (region->access & IBV_ACCESS_REMOTE_READ) != 0 &&
        region->pd == pair.pd && lies_in(Number(region->addr), region->length)) {
      return bytes_of(*region);
    }
  }
  for (const Window* window : windows_) {
    if (window->key == key && window->region != nullptr && window->pair == &pair &&
        lies_in(window->begin, window->bytes)) {
      return bytes_of(*window->region);
    }
  }
  return nullptr;
}

ibv_wc_status FakeVerbs::Read(FakeQueuePair& pair, const ibv_send_wr& work, const ibv_sge& piece) {
  if (piece.length > DeviceOf(pair.pd->context).max_message_bytes) return IBV_WC_LOC_LEN_ERR;
  const auto local = std::ranges::find_if(regions_, [&](const Region* region) {
    const uint64_t begin = Number(region->addr);
    return region->lkey == piece.lkey && (region->access & IBV_ACCESS_LOCAL_WRITE) != 0 &&
           region->pd == pair.pd && piece.addr >= begin && piece.length <= region->length &&
           piece.addr - begin <= region->length - piece.length;
  });
  if (local == regions_.end()) return IBV_WC_LOC_PROT_ERR;
  FakeId* const peer = pair.owner->peer;
  if (peer == nullptr || peer->pair == nullptr) return IBV_WC_RETRY_EXC_ERR;
  const std::byte* const from =
      peer->host->Find(work.wr.rdma.rkey, work.wr.rdma.remote_addr, piece.length, *peer->pair);
  if (from == nullptr) {
    Break(*peer->pair);
    return IBV_WC_REM_ACCESS_ERR;
  }
  auto* const to = static_cast<std::byte*>((*local)->addr) + (piece.addr - Number((*local)->addr));
  std::memcpy(to, from, piece.length);
  if (corrupts_) *to ^= std::byte{1};
  ++reads_[pair.owner->device->address];
  return IBV_WC_SUCCESS;
}

void FakeVerbs::Execute(FakeQueuePair& pair, const ibv_send_wr& work, const ibv_sge& piece) {
  ibv_wc_status status = IBV_WC_WR_FLUSH_ERR;
  if (!pair.is_broken) {
    switch (work.opcode) {
      case IBV_WR_RDMA_READ:
        status = Read(pair, work, piece);
        break;
      case IBV_WR_BIND_MW:
        status = BindWindow(pair, work);
        break;
      case IBV_WR_LOCAL_INV:
        status = InvalidateWindow(work);
        break;
      default:
        status = IBV_WC_LOC_QP_OP_ERR;
    }
  }
  Complete(pair, work.wr_id, status);
  if (status != IBV_WC_SUCCESS) Break(pair);
}

ibv_wc_status FakeVerbs::BindWindow(FakeQueuePair& pair, const ibv_send_wr& work) {
  auto* const window = static_cast<Window*>(work.bind_mw.mw);
  const ibv_mw_bind_info& info = work.bind_mw.bind_info;
  auto* const region = static_cast<Region*>(info.mr);
  const uint64_t begin = Number(region->addr);
  const bool is_right = window->region == nullptr && window->pd == pair.pd &&
                        region->pd == pair.pd && (region->access & IBV_ACCESS_MW_BIND) != 0 &&
                        (work.bind_mw.rkey & ~0xffu) == (window->rkey & ~0xffu) &&
                        work.bind_mw.rkey != window->rkey && info.addr >= begin &&
                        info.addr + info.length <= begin + region->length &&
                        info.mw_access_flags == IBV_ACCESS_REMOTE_READ;
  if (!is_right) return IBV_WC_MW_BIND_ERR;
  window->region = region;
  window->pair = &pair;
  window->begin = info.addr;
  window->bytes = info.length;
  window->key = work.bind_mw.rkey;
  return IBV_WC_SUCCESS;
}

ibv_wc_status FakeVerbs::InvalidateWindow(const ibv_send_wr& work) {
  for (Window* window : windows_) {
    if (window->region == nullptr || window->key != work.invalidate_rkey) continue;
    window->region = nullptr;
    return IBV_WC_SUCCESS;
  }
  return IBV_WC_MW_BIND_ERR;
}

int FakeVerbs::PostSend(ibv_qp* qp, ibv_send_wr* work) {
  if (Fails("PostSend")) return ENOMEM;
  auto& pair = *static_cast<FakeQueuePair*>(qp);
  if (pair.posted == pair.depth) return ENOMEM;
  ++pair.posted;
  const ibv_sge piece = work->num_sge == 0 ? ibv_sge{} : *work->sg_list;
  if (work->opcode == IBV_WR_RDMA_READ) {
    most_reads_in_flight_ = std::max(most_reads_in_flight_, pair.posted);
    if (fabric_.holds_reads && !pair.is_broken) {
      held_.push_back({&pair, *work, piece});
      return 0;
    }
  }
  Execute(pair, *work, piece);
  return 0;
}

void FakeVerbs::ReleaseReads(size_t count) {
  for (; count > 0 && !held_.empty(); --count) {
    const HeldRead read = held_.front();
    held_.pop_front();
    Execute(*read.pair, read.work, read.piece);
  }
}

}  // namespace pqcached::service::rdma
