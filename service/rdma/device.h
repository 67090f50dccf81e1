// Device: one port of an RDMA device, with its limits and a protection domain of its own.
//
// Regions and queue pairs work together only within one domain, so a domain is the border between
// pulls, unless windows are.
//
// Thread-compatible.
#ifndef PQCACHED_SERVICE_RDMA_DEVICE_H_
#define PQCACHED_SERVICE_RDMA_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "service/rdma/objects.h"

namespace pqcached::service::rdma {

struct DeviceLimits {
  uint64_t max_region_bytes = 0;
  uint64_t max_message_bytes = 0;
  uint32_t max_reads_out = 0;  // READs in flight of a queue pair that this end has posted
  uint32_t max_reads_in = 0;   // ... that the peer has posted
  uint32_t max_work_requests = 0;
  uint32_t mtu_bytes = 0;
  bool has_windows = false;  // memory windows of type 2
};

class Device {
 public:
  // Reads the limits of the port that `id` is bound to, and makes a domain. Without `use_windows`
  // the device counts as one that has none.
  //
  // Errors: kFailedPrecondition  the device cannot be read from by RDMA READ
  //         those of CallFailed
  static absl::StatusOr<std::shared_ptr<Device>> Open(Verbs& verbs, const rdma_cm_id& id,
                                                      bool use_windows = true);

  const DeviceLimits& limits() const { return limits_; }
  ibv_pd* domain() const { return domain_.get(); }

  // Registers memory; `access`: bits of ibv_access_flags. REQUIRES: at most max_region_bytes.
  //
  // Errors: those of CallFailed
  absl::StatusOr<Owned<ibv_mr>> Register(const std::byte* memory, uint64_t bytes, int access);

  // Returns a region that windows can be bound to, and that gives a peer no access by itself.
  // Calls with the same memory share it, as long as one of them holds it.
  absl::StatusOr<std::shared_ptr<ibv_mr>> Share(const std::byte* memory, uint64_t bytes);

 private:
  static constexpr size_t kFirstSweep = 64;

  Device(Verbs& verbs, DeviceLimits limits, Owned<ibv_pd> domain)
      : verbs_(verbs), limits_(limits), domain_(std::move(domain)) {}

  Verbs& verbs_;
  const DeviceLimits limits_;
  const Owned<ibv_pd> domain_;
  std::map<std::pair<const std::byte*, uint64_t>, std::weak_ptr<ibv_mr>> shared_;
  size_t sweep_at_ = kFirstSweep;  // entries at which those of regions that are gone are removed
};

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_SERVICE_RDMA_DEVICE_H_
