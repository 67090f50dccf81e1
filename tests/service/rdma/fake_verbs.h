// FakeVerbs: RDMA hosts in one process. READs are copies; keys are checked like a device checks
// them: a READ with a wrong key, out of range or in a foreign domain completes with an error, and
// leaves both queue pairs in the error state. Each call can be made to fail, and every object is
// counted.
//
// Single-threaded.
#ifndef PQCACHED_TESTS_SERVICE_RDMA_FAKE_VERBS_H_
#define PQCACHED_TESTS_SERVICE_RDMA_FAKE_VERBS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "service/rdma/verbs.h"

namespace pqcached::service::rdma {

class FakeVerbs;
struct FakeId;
struct FakeQueuePair;

// What connects the hosts.
struct FakeFabric {
  std::set<FakeVerbs*> hosts;
  bool holds_reads = false;  // READs stay in flight
  bool is_silent = false;    // ... and nothing reports the end of a peer
  bool has_route = true;
};

struct FakeDevice {
  std::string address;
  uint64_t max_region_bytes = uint64_t{1} << 40;
  uint32_t max_message_bytes = 1u << 30;
  int max_reads = 16;
  ibv_mtu mtu = IBV_MTU_4096;
  bool has_windows = true;
  ibv_context context = {};
};

class FakeVerbs : public Verbs {
 public:
  FakeVerbs(FakeFabric& fabric, std::vector<FakeDevice> devices);
  ~FakeVerbs() override;

  // Makes the call with this number fail, counted from now on; 0: none.
  void FailCall(uint64_t number) { fail_call_ = number == 0 ? 0 : calls_ + number; }
  uint64_t calls() const { return calls_; }
  const std::string& failed_call() const { return failed_call_; }

  // Objects that exist, by their kinds: "id", "region", ...
  std::map<std::string, int> objects() const;
  // Keys with which a peer could read at present.
  size_t remote_keys() const;
  // Objects that were destroyed before those that depend on them.
  const std::vector<std::string>& violations() const { return violations_; }
  uint64_t regions_made() const { return regions_made_; }
  uint64_t reads_of(const std::string& address) const;
  uint32_t most_reads_in_flight() const { return most_reads_in_flight_; }
  // Executes READs that are held, the oldest first.
  void ReleaseReads(size_t count);
  size_t held_reads() const { return held_.size(); }
  // Connections are requested with these private data.
  void ReplacePrivateData(std::span<const std::byte> data) {
    private_data_.assign(data.begin(), data.end());
  }
  // Changes bytes that arrive.
  void CorruptReads() { corrupts_ = true; }

  rdma_event_channel* CreateEventChannel() override;
  int GetEvent(rdma_event_channel* channel, ConnectionEvent* event) override;
  int CreateId(rdma_event_channel* channel, rdma_cm_id** id, void* context) override;
  int BindAddress(rdma_cm_id* id, sockaddr* address) override;
  int Listen(rdma_cm_id* id, int backlog) override;
  uint16_t PortOf(rdma_cm_id* id) override;
  int ResolveAddress(rdma_cm_id* id, sockaddr* from, sockaddr* to, int timeout_ms) override;
  int ResolveRoute(rdma_cm_id* id, int timeout_ms) override;
  int SetAckTimeout(rdma_cm_id* id, uint8_t timeout) override;
  int Connect(rdma_cm_id* id, rdma_conn_param* parameters) override;
  int Accept(rdma_cm_id* id, rdma_conn_param* parameters) override;
  int Reject(rdma_cm_id* id, std::span<const std::byte> private_data) override;
  int Disconnect(rdma_cm_id* id) override;
  int CreateQueuePair(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) override;

  int QueryDevice(ibv_context* context, ibv_device_attr* attributes) override;
  int QueryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes) override;
  ibv_pd* AllocatePd(ibv_context* context) override;
  ibv_mr* RegisterMemory(ibv_pd* pd, void* address, size_t bytes, int access) override;
  ibv_mw* AllocateWindow(ibv_pd* pd) override;

  ibv_comp_channel* CreateCompletionChannel(ibv_context* context) override;
  ibv_cq* CreateCompletionQueue(ibv_context* context, int entries,
                                ibv_comp_channel* channel) override;
  int TakeCompletionEvent(ibv_comp_channel* channel) override;
  int RequestNotification(ibv_cq* queue) override;
  int PollCompletions(ibv_cq* queue, std::span<ibv_wc> completions) override;
  int PostSend(ibv_qp* pair, ibv_send_wr* work) override;

  void Destroy(rdma_event_channel* channel) override;
  void Destroy(rdma_cm_id* id) override;
  void Destroy(ibv_pd* pd) override;
  void Destroy(ibv_mr* region) override;
  void Destroy(ibv_mw* window) override;
  void Destroy(ibv_comp_channel* channel) override;
  void Destroy(ibv_cq* queue) override;

 private:
  struct Channel;
  struct Region;
  struct Window;
  struct Queue;
  struct HeldRead {
    FakeQueuePair* pair = nullptr;
    ibv_send_wr work = {};
    ibv_sge piece = {};
  };

  bool Fails(const char* call);
  FakeDevice* DeviceAt(const sockaddr* address);
  FakeDevice& DeviceOf(const ibv_context* context);
  FakeId* ListenerAt(const std::string& address, uint16_t port);
  static void Send(FakeId& id, ConnectionEvent event);
  static void Complete(FakeQueuePair& pair, uint64_t work_id, ibv_wc_status status);
  static void Break(FakeQueuePair& pair);
  static void Part(FakeId& id);  // ends the connection, at both ends
  ibv_wc_status Read(FakeQueuePair& pair, const ibv_send_wr& work, const ibv_sge& piece);
  void Execute(FakeQueuePair& pair, const ibv_send_wr& work, const ibv_sge& piece);
  // Returns where the bytes of a remote key are; null: the device refuses the key.
  const std::byte* Find(uint32_t key, uint64_t address, uint64_t bytes, const FakeQueuePair& pair);
  ibv_wc_status BindWindow(FakeQueuePair& pair, const ibv_send_wr& work);
  ibv_wc_status InvalidateWindow(const ibv_send_wr& work);

  FakeFabric& fabric_;
  std::vector<FakeDevice> devices_;
  std::set<Channel*> channels_;
  std::set<FakeId*> ids_;
  std::set<ibv_pd*> domains_;
  std::set<Region*> regions_;
  std::set<Window*> windows_;
  std::set<ibv_comp_channel*> completion_channels_;
  std::set<Queue*> queues_;
  std::deque<HeldRead> held_;
  std::map<std::string, uint64_t> reads_;
  std::vector<std::string> violations_;
  uint64_t calls_ = 0;
  uint64_t fail_call_ = 0;
  std::string failed_call_;
  uint64_t regions_made_ = 0;
  uint32_t next_key_ = 0x1000;
  uint16_t next_port_ = 1000;
  uint32_t most_reads_in_flight_ = 0;
  bool corrupts_ = false;
  std::vector<std::byte> private_data_;

  friend struct FakeId;
  friend struct FakeQueuePair;
};

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_TESTS_SERVICE_RDMA_FAKE_VERBS_H_
