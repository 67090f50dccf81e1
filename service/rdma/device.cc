#include "service/rdma/device.h"

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"
#include "service/rdma/failure.h"

namespace pqcached::service::rdma {
namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr uint32_t kSmallestMtuBytes = 256;  // of IBV_MTU_256 = 1

// Returns a number of READs that fits into the fields of rdma_conn_param, which have 8 bits.
uint32_t ReadsOf(int count) { return static_cast<uint32_t>(std::clamp(count, 0, 255)); }

DeviceLimits LimitsOf(const ibv_device_attr& device, const ibv_port_attr& port) {
  constexpr unsigned kWindows = IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
  return {.max_region_bytes = device.max_mr_size / kPageBytes * kPageBytes,
          .max_message_bytes = port.max_msg_sz,
          .max_reads_out = ReadsOf(device.max_qp_init_rd_atom),
          .max_reads_in = ReadsOf(device.max_qp_rd_atom),
          .max_work_requests =
              static_cast<uint32_t>(std::max(0, std::min(device.max_qp_wr, device.max_cqe))),
          .mtu_bytes = kSmallestMtuBytes << (std::max<int>(port.active_mtu, 1) - 1),
          .has_windows = (device.device_cap_flags & kWindows) != 0};
}

}  // namespace

absl::StatusOr<std::shared_ptr<Device>> Device::Open(Verbs& verbs, const rdma_cm_id& id,
                                                     bool use_windows) {
  ibv_device_attr device = {};
  if (const int error = verbs.QueryDevice(id.verbs, &device); error != 0) {
    return CallFailed("ibv_query_device", error);
  }
  ibv_port_attr port = {};
  if (const int error = verbs.QueryPort(id.verbs, id.port_num, &port); error != 0) {
    return CallFailed("ibv_query_port", error);
  }
  DeviceLimits limits = LimitsOf(device, port);
  limits.has_windows = limits.has_windows && use_windows;
  if (limits.max_region_bytes == 0 || limits.max_message_bytes == 0 || limits.max_reads_out == 0 ||
      limits.max_reads_in == 0 || limits.max_work_requests == 0) {
    return FailedPrecondition("rdma", "the device has no RDMA READ");
  }
  Owned<ibv_pd> domain(verbs.AllocatePd(id.verbs), Destroyer{&verbs});
  if (domain == nullptr) return CallFailed("ibv_alloc_pd", errno);
  return std::shared_ptr<Device>(new Device(verbs, limits, std::move(domain)));
}

absl::StatusOr<Owned<ibv_mr>> Device::Register(const std::byte* memory, uint64_t bytes,
                                               int access) {
  // The device writes only where `access` says so.
  Owned<ibv_mr> region(
      verbs_.RegisterMemory(domain_.get(), const_cast<std::byte*>(memory), bytes, access),
      Destroyer{&verbs_});
  if (region == nullptr) return CallFailed("ibv_reg_mr", errno);
  return region;
}

absl::StatusOr<std::shared_ptr<ibv_mr>> Device::Share(const std::byte* memory, uint64_t bytes) {
  if (std::shared_ptr<ibv_mr> found = shared_[{memory, bytes}].lock()) return found;
  if (shared_.size() >= sweep_at_) {
    std::erase_if(shared_, [](const auto& each) { return each.second.expired(); });
    sweep_at_ = 2 * shared_.size() + kFirstSweep;
  }
  absl::StatusOr<Owned<ibv_mr>> region = Register(memory, bytes, IBV_ACCESS_MW_BIND);
  if (!region.ok()) return region.status();
  std::shared_ptr<ibv_mr> shared = *std::move(region);
  shared_[{memory, bytes}] = shared;
  return shared;
}

}  // namespace pqcached::service::rdma
