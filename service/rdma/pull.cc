#include "service/rdma/pull.h"

#include <algorithm>
#include <bit>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/crc32c.h"
#include "service/base/refusal.h"
#include "service/rdma/address.h"
#include "service/rdma/failure.h"

namespace pqcached::service::rdma {
namespace {

constexpr int kResolveTimeoutMs = 2000;  // of each step; the deadline of the pull holds as well
// Packets are repeated after 4.096 us * 2^16 = 0.27 s, seven times: a host that is gone is noticed
// after some seconds, whatever the deadline is.
constexpr uint8_t kAckTimeout = 16;
constexpr uint8_t kRetries = 7;
constexpr uint64_t kMaxReadBytes = 1u << 30;
constexpr uint32_t kMaxPullTargets = 1u << 20;

// A READ is known by its target and its size.
uint64_t WorkId(uint32_t target_index, uint64_t bytes) {
  return uint64_t{target_index} << 32 | bytes;
}
uint32_t TargetOf(uint64_t work_id) { return static_cast<uint32_t>(work_id >> 32); }
uint64_t BytesOf(uint64_t work_id) { return work_id & UINT32_MAX; }

absl::Status CheckPullOptions(const Pull::Options& options) {
  if (options.max_reads_in_flight == 0 || options.max_reads_in_flight > 255) {
    return InvalidArgument("max_reads_in_flight",
                           absl::StrCat(options.max_reads_in_flight, ", must be 1 to 255"));
  }
  if (options.read_bytes == 0 || options.read_bytes > kMaxReadBytes) {
    return InvalidArgument("read_bytes",
                           absl::StrCat(options.read_bytes, ", must be 1 to ", kMaxReadBytes));
  }
  return absl::OkStatus();
}

absl::Status CheckPullRequest(const PullRequest& request) {
  const Offer& offer = request.offer;
  if (offer.rails.empty() || offer.rails.size() > kMaxRails) {
    return InvalidArgument("offer.rails",
                           absl::StrCat(offer.rails.size(), ", must be 1 to ", kMaxRails));
  }
  if (offer.connection_count == 0 || offer.connection_count > kMaxConnections) {
    return InvalidArgument(
        "offer.connection_count",
        absl::StrCat(offer.connection_count, ", must be 1 to ", kMaxConnections));
  }
  if (request.targets.empty() || request.targets.size() > kMaxPullTargets) {
    return InvalidArgument(
        "targets", absl::StrCat(request.targets.size(), ", must be 1 to ", kMaxPullTargets));
  }
  uint32_t part_index = 0;
  for (size_t index = 0; index < request.targets.size(); ++index) {
    const PullTarget& target = request.targets[index];
    const std::string field = absl::StrCat("targets[", index, "]");
    if (target.memory.empty()) return InvalidArgument(field, "has no bytes");
    if (target.part_index < part_index || target.part_index > part_index + 1) {
      return InvalidArgument(absl::StrCat(field, ".part_index"),
                             absl::StrCat(target.part_index, ", follows ", part_index));
    }
    part_index = target.part_index;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<Pull>> Pull::Start(Verbs& verbs, boost::asio::io_context& io,
                                                  Options options, PullRequest request) {
  if (absl::Status status = CheckPullOptions(options); !status.ok()) return status;
  if (absl::Status status = CheckPullRequest(request); !status.ok()) return status;
  std::shared_ptr<Pull> pull(new Pull(verbs, io, std::move(options), std::move(request)));
  if (absl::Status status = pull->Connect(); !status.ok()) return status;
  return pull;
}

Pull::Pull(Verbs& verbs, boost::asio::io_context& io, Options options, PullRequest request)
    : verbs_(verbs),
      io_(io),
      options_(std::move(options)),
      request_(std::move(request)),
      timer_(io),
      lanes_(request_.offer.connection_count) {
  for (const PullTarget& target : request_.targets) {
    missing_bytes_.push_back(target.memory.size());
    missing_targets_.resize(target.part_index + 1);
    ++missing_targets_[target.part_index];
  }
}

absl::Status Pull::Connect() {
  channel_ = {verbs_.CreateEventChannel(), Destroyer{&verbs_}};
  if (channel_ == nullptr) return CallFailed("rdma_create_event_channel", errno);
  for (uint32_t index = 0; index < lanes_.size(); ++index) {
    if (absl::Status status = ConnectLane(index); !status.ok()) return status;
  }
  watch_.emplace(io_, channel_->fd, [this] { TakeEvents(); });
  timer_.expires_at(request_.deadline.ToChrono());
  timer_.async_wait([weak = weak_from_this()](const boost::system::error_code& cancelled) {
    if (cancelled) return;
    if (const std::shared_ptr<Pull> self = weak.lock()) {
      self->End(Unavailable("deadline", "the source has not sent everything in time", kRetryPeer));
    }
  });
  return absl::OkStatus();
}

absl::Status Pull::ConnectLane(uint32_t index) {
  const size_t rail_index = index % request_.offer.rails.size();
  const std::string field = absl::StrCat("offer.rails[", rail_index, "]");
  const Rail& rail = request_.offer.rails[rail_index];
  absl::StatusOr<sockaddr_storage> to = ParseAddress(field, rail.address, rail.port);
  if (!to.ok()) return to.status();
  std::optional<sockaddr_storage> from;
  if (!options_.addresses.empty()) {
    const size_t address_index = rail_index % options_.addresses.size();
    absl::StatusOr<sockaddr_storage> parsed = ParseAddress(
        absl::StrCat("addresses[", address_index, "]"), options_.addresses[address_index], 0);
    if (!parsed.ok()) return parsed.status();
    from = *parsed;
  }
  rdma_cm_id* id = nullptr;
  int error = verbs_.CreateId(channel_.get(), &id, nullptr);
  if (error != 0) return CallFailed("rdma_create_id", error);
  lanes_[index].id = {id, Destroyer{&verbs_}};
  error = verbs_.ResolveAddress(id, from ? reinterpret_cast<sockaddr*>(&*from) : nullptr,
                                reinterpret_cast<sockaddr*>(&*to), kResolveTimeoutMs);
  if (error != 0) return ReplaceField(field, CallFailed("rdma_resolve_addr", error));
  return absl::OkStatus();
}

void Pull::TakeEvents() {
  ConnectionEvent event;
  int error = 0;
  while (!ended_ && (error = verbs_.GetEvent(channel_.get(), &event)) == 0) {
    if (absl::Status status = Handle(event); !status.ok()) End(std::move(status));
  }
  if (!ended_ && error != EAGAIN) End(CallFailed("rdma_get_cm_event", error));
}

absl::Status Pull::Handle(const ConnectionEvent& event) {
  const auto found = std::ranges::find_if(lanes_, [&event](const Lane& lane) {
    return event.id == (lane.connection ? lane.connection->id() : lane.id.get());
  });
  if (found == lanes_.end()) return absl::OkStatus();
  Lane& lane = *found;
  switch (event.type) {
    case RDMA_CM_EVENT_ADDR_RESOLVED: {
      const int error = verbs_.ResolveRoute(event.id, kResolveTimeoutMs);
      return error == 0 ? absl::OkStatus() : CallFailed("rdma_resolve_route", error);
    }
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
      return RequestConnection(static_cast<uint32_t>(found - lanes_.begin()));
    case RDMA_CM_EVENT_ESTABLISHED:
      lane.credits = std::min<uint32_t>(lane.connection->depth(), event.initiator_depth);
      if (lane.credits == 0) return FailedPrecondition("offer", "the source allows no READ");
      return PostReads(lane);
    case RDMA_CM_EVENT_TIMEWAIT_EXIT:
      return absl::OkStatus();
    default:
      return ConnectionFailed(
          event, lane.connection == nullptr ? 0 : lane.connection->device().limits().mtu_bytes);
  }
}

absl::StatusOr<std::shared_ptr<Device>> Pull::DeviceOf(const rdma_cm_id& id) {
  std::shared_ptr<Device>& found = devices_[id.verbs];
  if (found == nullptr) {
    absl::StatusOr<std::shared_ptr<Device>> opened = Device::Open(verbs_, id);
    if (!opened.ok()) return opened.status();
    found = *std::move(opened);
  }
  return found;
}

absl::Status Pull::RequestConnection(uint32_t index) {
  Lane& lane = lanes_[index];
  absl::StatusOr<std::shared_ptr<Device>> device = DeviceOf(*lane.id);
  if (!device.ok()) return device.status();
  const DeviceLimits& limits = (*device)->limits();
  const uint32_t depth =
      std::min({options_.max_reads_in_flight, limits.max_reads_out, limits.max_work_requests});
  absl::StatusOr<std::unique_ptr<Connection>> connection = Connection::Create(
      verbs_, io_, *device, lane.id, depth,
      [this, index](const absl::StatusOr<ibv_wc>& done) { Completed(lanes_[index], done); });
  if (!connection.ok()) return connection.status();
  lane.connection = *std::move(connection);
  int error = verbs_.SetAckTimeout(lane.connection->id(), kAckTimeout);
  if (error != 0) return CallFailed("rdma_set_option", error);
  Hello hello = {.token = request_.offer.token, .connection = index, .mtu_bytes = limits.mtu_bytes};
  rdma_conn_param parameters = {};
  parameters.private_data = &hello;
  parameters.private_data_len = sizeof(hello);
  parameters.initiator_depth = static_cast<uint8_t>(depth);
  parameters.retry_count = kRetries;
  parameters.rnr_retry_count = kRetries;
  error = verbs_.Connect(lane.connection->id(), &parameters);
  return error == 0 ? absl::OkStatus() : CallFailed("rdma_connect", error);
}

absl::Status Pull::CheckKey(const Key& key) const {
  if (key.connection >= lanes_.size()) {
    return InvalidArgument("connection",
                           absl::StrCat(key.connection, ", must be less than ", lanes_.size()));
  }
  if (key_target_ == request_.targets.size() || key.extent_index != key_target_) {
    return InvalidArgument("extent_index", absl::StrCat(key.extent_index, ", must be ", key_target_,
                                                        " of ", request_.targets.size()));
  }
  if (key.offset_bytes != key_offset_bytes_) {
    return InvalidArgument("offset_bytes",
                           absl::StrCat(key.offset_bytes, ", must be ", key_offset_bytes_));
  }
  const uint64_t rest = request_.targets[key_target_].memory.size() - key_offset_bytes_;
  if (key.bytes == 0 || key.bytes > rest || (key.bytes < rest && key.bytes < kMinKeyBytes)) {
    return InvalidArgument("bytes",
                           absl::StrCat(key.bytes, ", must be ", kMinKeyBytes, " to ", rest));
  }
  return absl::OkStatus();
}

absl::Status Pull::AddKeys(std::span<const Key> keys) {
  if (ended_) return end_;
  for (const Key& key : keys) {
    if (absl::Status status = CheckKey(key); !status.ok()) {
      End(PrefixField("keys", status));
      return end_;
    }
    lanes_[key.connection].keys.push_back(key);
    key_offset_bytes_ += key.bytes;
    if (key_offset_bytes_ < request_.targets[key_target_].memory.size()) continue;
    ++key_target_;
    key_offset_bytes_ = 0;
  }
  for (Lane& lane : lanes_) {
    if (absl::Status status = PostReads(lane); !status.ok()) {
      End(std::move(status));
      return end_;
    }
  }
  return absl::OkStatus();
}

absl::Status Pull::PostReads(Lane& lane) {
  while (lane.credits > 0 && lane.next_key < lane.keys.size()) {
    if (absl::Status status = PostRead(lane); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Pull::PostRead(Lane& lane) {
  const Key& key = lane.keys[lane.next_key];
  const DeviceLimits& limits = lane.connection->device().limits();
  const uint64_t offset = key.offset_bytes + lane.posted_bytes;
  const uint64_t begin = offset / limits.max_region_bytes * limits.max_region_bytes;
  const absl::StatusOr<ibv_mr*> region =
      RegionOf(lane.connection->device(), key.extent_index, begin);
  if (!region.ok()) return region.status();
  const uint64_t bytes =
      std::min({key.bytes - lane.posted_bytes, options_.read_bytes, limits.max_message_bytes,
                limits.max_region_bytes - (offset - begin)});

  std::byte* const to = request_.targets[key.extent_index].memory.data() + offset;
  ibv_sge piece = {.addr = std::bit_cast<uint64_t>(to),
                   .length = static_cast<uint32_t>(bytes),
                   .lkey = (*region)->lkey};
  ibv_send_wr work = {};
  work.wr_id = WorkId(key.extent_index, bytes);
  work.opcode = IBV_WR_RDMA_READ;
  work.sg_list = &piece;
  work.num_sge = 1;
  work.wr.rdma = {.remote_addr = key.address + lane.posted_bytes, .rkey = key.key};
  if (absl::Status status = lane.connection->Post(work); !status.ok()) return status;
  --lane.credits;
  lane.posted_bytes += bytes;
  if (lane.posted_bytes == key.bytes) {
    ++lane.next_key;
    lane.posted_bytes = 0;
  }
  return absl::OkStatus();
}

absl::StatusOr<ibv_mr*> Pull::RegionOf(Device& device, uint32_t target_index, uint64_t begin) {
  Owned<ibv_mr>& region = regions_[{target_index, begin, &device}];
  if (region != nullptr) return region.get();
  const std::span<std::byte> memory = request_.targets[target_index].memory.subspan(begin);
  absl::StatusOr<Owned<ibv_mr>> made = device.Register(
      memory.data(), std::min<uint64_t>(memory.size(), device.limits().max_region_bytes),
      IBV_ACCESS_LOCAL_WRITE);
  if (!made.ok()) return made.status();
  region = *std::move(made);
  return region.get();
}

void Pull::Completed(Lane& lane, const absl::StatusOr<ibv_wc>& completion) {
  if (ended_) return;
  if (!completion.ok()) return End(completion.status());
  if (completion->status != IBV_WC_SUCCESS) return End(CompletionFailed(*completion));
  ++lane.credits;
  const uint32_t target_index = TargetOf(completion->wr_id);
  missing_bytes_[target_index] -= BytesOf(completion->wr_id);
  absl::Status status = PostReads(lane);  // before the checksum, so that the device has work
  if (status.ok() && missing_bytes_[target_index] == 0) status = FinishTarget(target_index);
  if (!status.ok()) End(std::move(status));
}

absl::Status Pull::FinishTarget(uint32_t target_index) {
  const PullTarget& target = request_.targets[target_index];
  regions_.erase(regions_.lower_bound({target_index, 0, nullptr}),
                 regions_.lower_bound({target_index + 1, 0, nullptr}));
  if (kernels::Crc32c({}, target.memory) != target.crc32c) {
    return DataLoss(absl::StrCat("extent ", target_index, " has arrived with another checksum"));
  }
  ++finished_targets_;
  if (--missing_targets_[target.part_index] == 0) request_.arrived(target.part_index);
  if (!ended_ && finished_targets_ == request_.targets.size()) End(absl::OkStatus());
  return absl::OkStatus();
}

// Ends the pull. What a handler on the stack may still use is destroyed later.
void Pull::End(absl::Status status) {
  if (std::exchange(ended_, true)) return;
  end_ = std::move(status);
  boost::asio::post(io_, [self = shared_from_this()] {
    if (self->torn_down_) return;
    self->TearDown();
    self->request_.ended(self->end_);
  });
}

void Pull::TearDown() {
  if (std::exchange(torn_down_, true)) return;
  ended_ = true;
  boost::system::error_code ignored;
  timer_.cancel(ignored);
  watch_.reset();
  for (const Lane& lane : lanes_) {
    if (lane.connection != nullptr) lane.connection->Disconnect();
  }
  // A device writes nothing for a queue pair that is gone, so the memory is free after this line.
  lanes_.clear();
  regions_.clear();
  devices_.clear();
  channel_.reset();
  request_.memory.reset();
}

}  // namespace pqcached::service::rdma
