#include "service/rdma/grant.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"
#include "service/rdma/failure.h"

namespace pqcached::service::rdma {
namespace {

constexpr uint32_t kWindowQueueDepth = 64;  // windows of a connection that are bound at a time
constexpr uint8_t kRetryForever = 7;        // of requests for which the receiver is not ready

uint64_t AddressOf(const std::byte* memory) { return reinterpret_cast<uintptr_t>(memory); }

}  // namespace

Grant::Grant(Verbs& verbs, boost::asio::io_context& io, GrantRequest request, Options options)
    : verbs_(verbs),
      io_(io),
      request_(std::move(request)),
      options_(std::move(options)),
      timer_(io),
      connections_(request_.connection_count),
      posted_(request_.connection_count) {}

void Grant::Start() {
  timer_.expires_at(request_.deadline.ToChrono());
  timer_.async_wait([weak = weak_from_this()](const boost::system::error_code& cancelled) {
    if (cancelled) return;
    if (const std::shared_ptr<Grant> self = weak.lock()) {
      self->Revoke(Unavailable("deadline", "the pull has not ended in time", kNoRetry));
    }
  });
}

absl::StatusOr<std::shared_ptr<Device>> Grant::DeviceOf(const rdma_cm_id& id,
                                                        const std::shared_ptr<Device>& shared) {
  std::shared_ptr<Device>& found = devices_[id.verbs];
  if (found == nullptr && shared->limits().has_windows) found = shared;
  if (found == nullptr) {
    absl::StatusOr<std::shared_ptr<Device>> opened =
        Device::Open(verbs_, id, /*use_windows=*/false);
    if (!opened.ok()) return opened.status();
    found = *std::move(opened);
  }
  return found;
}

absl::Status Grant::Accept(Owned<rdma_cm_id>& id, const Hello& hello, const ConnectionEvent& event,
                           const std::shared_ptr<Device>& shared) {
  if (hello.connection >= connections_.size()) {
    return OutOfRange("connection",
                      absl::StrCat(hello.connection, ", must be less than ", connections_.size()));
  }
  if (phase_ != Phase::kConnecting || connections_[hello.connection] != nullptr) {
    return AlreadyExists("connection", absl::StrCat(hello.connection, " is connected"));
  }
  absl::StatusOr<std::shared_ptr<Device>> device = DeviceOf(*id, shared);
  if (!device.ok()) return device.status();
  const DeviceLimits& limits = (*device)->limits();
  const uint32_t depth =
      limits.has_windows ? std::min(limits.max_work_requests, kWindowQueueDepth) : 1;
  absl::StatusOr<std::unique_ptr<Connection>> connection = Connection::Create(
      verbs_, io_, *device, id, depth,
      [this](const absl::StatusOr<ibv_wc>& completion) { Completed(completion); });
  if (!connection.ok()) {
    End(connection.status());
    return connection.status();
  }
  (*connection)->id()->context = this;
  rdma_conn_param parameters = {};
  parameters.responder_resources =
      static_cast<uint8_t>(std::min<uint32_t>(limits.max_reads_in, event.responder_resources));
  parameters.rnr_retry_count = kRetryForever;
  if (const int error = verbs_.Accept((*connection)->id(), &parameters); error != 0) {
    End(CallFailed("rdma_accept", error));
    return CallFailed("rdma_accept", error);
  }
  connections_[hello.connection] = *std::move(connection);
  return absl::OkStatus();
}

void Grant::Handle(const ConnectionEvent& event) {
  if (phase_ == Phase::kEnded) return;
  if (event.type == RDMA_CM_EVENT_TIMEWAIT_EXIT) return;
  if (event.type != RDMA_CM_EVENT_ESTABLISHED) {
    const bool is_end = event.type == RDMA_CM_EVENT_DISCONNECTED && phase_ == Phase::kGranted;
    return End(is_end ? absl::OkStatus() : ConnectionFailed(event, 0));
  }
  if (++established_count_ < connections_.size()) return;
  region_bytes_ = UINT64_MAX;
  for (const auto& [context, device] : devices_) {
    region_bytes_ = std::min(region_bytes_, device->limits().max_region_bytes);
  }
  phase_ = Phase::kGranting;
  Continue();
}

void Grant::Completed(const absl::StatusOr<ibv_wc>& completion) {
  if (phase_ == Phase::kEnded) return;
  if (!completion.ok()) return End(completion.status());
  if (completion->status != IBV_WC_SUCCESS) return End(CompletionFailed(*completion));
  --posted_[completion->wr_id];
  if (--posted_count_ == 0) Continue();
}

void Grant::ContinueLater() {
  boost::asio::post(io_, [self = shared_from_this()] { self->Continue(); });
}

// Does the next step, when all work of the step before is complete.
void Grant::Continue() {
  if (phase_ == Phase::kEnded || phase_ == Phase::kConnecting || posted_count_ != 0) return;
  if (phase_ == Phase::kRevoking) {
    if (absl::Status status = RevokeStep(); !status.ok()) return End(end_);
    return;
  }
  if (!keys_.empty()) {
    request_.granted(keys_);
    keys_.clear();
    if (phase_ != Phase::kGranting) return;  // the caller has ended the pull
  }
  if (extent_index_ == request_.extents.size()) {
    phase_ = Phase::kGranted;
    return;
  }
  if (absl::Status status = GrantStep(); !status.ok()) End(std::move(status));
}

uint32_t Grant::RoomInQueue(uint32_t connection) const {
  return connections_[connection]->depth() - posted_[connection];
}

absl::Status Grant::GrantStep() {
  uint64_t registered_bytes = 0;
  while (extent_index_ < request_.extents.size() && registered_bytes < options_.step_bytes) {
    if (RoomInQueue(next_connection_) == 0) break;
    const absl::StatusOr<uint64_t> bytes = GrantPiece();
    if (!bytes.ok()) return bytes.status();
    registered_bytes += *bytes;
  }
  if (posted_count_ == 0) ContinueLater();
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Grant::GrantPiece() {
  const std::span<const std::byte> extent = request_.extents[extent_index_];
  const uint64_t part_begin = offset_bytes_ / region_bytes_ * region_bytes_;
  const auto part = extent.subspan(part_begin, std::min(region_bytes_, extent.size() - part_begin));
  Device& device = connections_[next_connection_]->device();
  const size_t region_count = regions_.size();
  const absl::StatusOr<ibv_mr*> region = RegionOf(device, part);
  if (!region.ok()) return region.status();

  Key key = {.extent_index = extent_index_,
             .connection = next_connection_,
             .offset_bytes = offset_bytes_,
             .bytes = std::min(options_.key_bytes, part_begin + part.size() - offset_bytes_),
             .address = AddressOf(extent.data()) + offset_bytes_,
             .key = (*region)->rkey};
  if (device.limits().has_windows) {
    const absl::StatusOr<uint32_t> bound = BindWindow(*region, key);
    if (!bound.ok()) return bound.status();
    key.key = *bound;
  }
  keys_.push_back(key);
  offset_bytes_ += key.bytes;
  next_connection_ = (next_connection_ + 1) % request_.connection_count;
  if (offset_bytes_ == part_begin + part.size()) part_regions_.clear();
  if (offset_bytes_ == extent.size()) {
    ++extent_index_;
    offset_bytes_ = 0;
  }
  return regions_.size() > region_count ? part.size() : 0;
}

absl::StatusOr<ibv_mr*> Grant::RegionOf(Device& device, std::span<const std::byte> part) {
  ibv_mr*& found = part_regions_[&device];
  if (found != nullptr) return found;
  absl::StatusOr<std::shared_ptr<ibv_mr>> region;
  if (device.limits().has_windows) {
    region = device.Share(part.data(), part.size());
  } else {
    absl::StatusOr<Owned<ibv_mr>> own =
        device.Register(part.data(), part.size(), IBV_ACCESS_REMOTE_READ);
    if (!own.ok()) return own.status();
    region = std::shared_ptr<ibv_mr>(*std::move(own));
  }
  if (!region.ok()) return region.status();
  regions_.push_back(*std::move(region));
  return found = regions_.back().get();
}

absl::StatusOr<uint32_t> Grant::BindWindow(ibv_mr* region, const Key& key) {
  Connection& connection = *connections_[key.connection];
  Owned<ibv_mw> window(verbs_.AllocateWindow(connection.device().domain()), Destroyer{&verbs_});
  if (window == nullptr) return CallFailed("ibv_alloc_mw", errno);
  ibv_send_wr work = {};
  work.wr_id = key.connection;
  work.opcode = IBV_WR_BIND_MW;
  work.bind_mw.mw = window.get();
  work.bind_mw.rkey = ibv_inc_rkey(window->rkey);
  work.bind_mw.bind_info = {.mr = region,
                            .addr = key.address,
                            .length = key.bytes,
                            .mw_access_flags = IBV_ACCESS_REMOTE_READ};
  if (absl::Status status = connection.Post(work); !status.ok()) return status;
  ++posted_[key.connection];
  ++posted_count_;
  windows_.push_back({std::move(window), key.connection, work.bind_mw.rkey});
  return work.bind_mw.rkey;
}

void Grant::Revoke(absl::Status why) {
  if (phase_ == Phase::kEnded || phase_ == Phase::kRevoking) return;
  if (phase_ == Phase::kConnecting) return End(std::move(why));
  phase_ = Phase::kRevoking;
  end_ = std::move(why);
  if (windows_.empty()) {
    // The connections still exist: a READ that comes now is refused rather than lost.
    part_regions_.clear();
    regions_.clear();
    return End(end_);
  }
  ContinueLater();
}

absl::Status Grant::RevokeStep() {
  for (; revoked_count_ < windows_.size(); ++revoked_count_) {
    const Window& window = windows_[revoked_count_];
    if (RoomInQueue(window.connection) == 0) return absl::OkStatus();
    ibv_send_wr work = {};
    work.wr_id = window.connection;
    work.opcode = IBV_WR_LOCAL_INV;
    work.invalidate_rkey = window.key;
    if (absl::Status status = connections_[window.connection]->Post(work); !status.ok()) {
      return status;
    }
    ++posted_[window.connection];
    ++posted_count_;
  }
  if (posted_count_ == 0) End(end_);
  return absl::OkStatus();
}

// Ends the pull. What a handler on the stack may still use is destroyed later.
void Grant::End(absl::Status status) {
  if (phase_ == Phase::kEnded) return;
  if (phase_ != Phase::kRevoking) end_ = std::move(status);
  phase_ = Phase::kEnded;
  boost::asio::post(io_, [self = shared_from_this()] {
    if (self->torn_down_) return;
    self->TearDown();
    if (self->options_.gone) self->options_.gone();
    self->request_.ended(self->end_);
  });
}

void Grant::TearDown() {
  if (std::exchange(torn_down_, true)) return;
  phase_ = Phase::kEnded;
  boost::system::error_code ignored;
  timer_.cancel(ignored);
  for (const std::unique_ptr<Connection>& connection : connections_) {
    if (connection != nullptr) connection->Disconnect();
  }
  // Windows first: devices may wait for those that are bound to a queue pair before they destroy it
  // (soft-RoCE does, for 50 s). A queue pair that is gone answers no READ of any key.
  windows_.clear();
  connections_.clear();
  regions_.clear();
  devices_.clear();
  request_.extents.clear();
  request_.lease.reset();
}

}  // namespace pqcached::service::rdma
