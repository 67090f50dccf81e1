// Grant: the source's side of one pull. It registers the extents of one request, gives the puller
// keys for them, and makes the keys invalid when the pull ends.
//
// Keys are valid on the connections of this pull only. Where the device has memory windows of type
// 2, each key is a window that is bound to one connection; concurrent pulls of an extent share its
// registration. Elsewhere the pull has a protection domain and regions of its own.
//
// Regions are made at extents, and where the device limits their size; keys are made in the order
// of the extents, in steps between which other pulls have their turn.
//
// Single-threaded: used on the thread of the io_context.
#ifndef PQCACHED_SERVICE_RDMA_GRANT_H_
#define PQCACHED_SERVICE_RDMA_GRANT_H_

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/clock.h"
#include "service/rdma/connection.h"
#include "service/rdma/device.h"
#include "service/rdma/offer.h"

namespace pqcached::service::rdma {

// A pull that the source permits.
struct GrantRequest {
  std::string peer;  // its identity, as the caller has authenticated it; not empty
  std::vector<std::span<const std::byte>> extents;  // in the order in which they are to be read
  uint32_t connection_count = 4;
  std::shared_ptr<const void> lease =
      {};  // keeps the extents in place; released when the pull ends
  kvstore::SteadyTime deadline = kvstore::SteadyTime::InfiniteFuture();
  // Receives the keys, once all connections exist, in several calls.
  std::function<void(std::span<const Key> keys)> granted = {};
  // Called once, after the keys are invalid and the lease is released. OK: the puller had all keys
  // and has closed the connection.
  std::function<void(const absl::Status& status)> ended = {};
};

class Grant : public std::enable_shared_from_this<Grant> {
 public:
  struct Options {
    uint64_t key_bytes = 0;      // of one key, at most; a multiple of kMinKeyBytes
    uint64_t step_bytes = 0;     // registered in one step
    std::function<void()> gone;  // called before `ended`
  };

  // REQUIRES: the request is valid (Source::Open).
  Grant(Verbs& verbs, boost::asio::io_context& io, GrantRequest request, Options options);
  ~Grant() { TearDown(); }

  // Starts the deadline.
  void Start();
  // Accepts a connection. `shared`: the source's device of the connection.
  //
  // Errors: kAlreadyExists  the connection exists
  //         kOutOfRange     there is no such connection
  //         those of CallFailed; the pull then ends
  absl::Status Accept(Owned<rdma_cm_id>& id, const Hello& hello, const ConnectionEvent& event,
                      const std::shared_ptr<Device>& shared);
  // Handles an event of a connection that has been accepted.
  void Handle(const ConnectionEvent& event);

  // Makes all keys invalid and ends the pull. READs in flight fail.
  void Revoke(absl::Status why);
  // Ends the pull at once, without a call of `ended`.
  void TearDown();

 private:
  enum class Phase : uint8_t { kConnecting, kGranting, kGranted, kRevoking, kEnded };
  struct Window {
    Owned<ibv_mw> window;
    uint32_t connection = 0;
    uint32_t key = 0;
  };

  absl::StatusOr<std::shared_ptr<Device>> DeviceOf(const rdma_cm_id& id,
                                                   const std::shared_ptr<Device>& shared);
  void Completed(const absl::StatusOr<ibv_wc>& completion);
  void Continue();
  void ContinueLater();
  absl::Status GrantStep();
  // Grants the next piece; returns the bytes that were registered for it.
  absl::StatusOr<uint64_t> GrantPiece();
  absl::StatusOr<ibv_mr*> RegionOf(Device& device, std::span<const std::byte> part);
  absl::StatusOr<uint32_t> BindWindow(ibv_mr* region, const Key& key);
  absl::Status RevokeStep();
  void End(absl::Status status);
  uint32_t RoomInQueue(uint32_t connection) const;

  Verbs& verbs_;
  boost::asio::io_context& io_;
  GrantRequest request_;
  Options options_;
  boost::asio::steady_timer timer_;
  Phase phase_ = Phase::kConnecting;
  absl::Status end_;
  bool torn_down_ = false;

  // Destroyed from the end. Only windows end before the connections that they are bound to.
  std::map<ibv_context*, std::shared_ptr<Device>> devices_;
  std::vector<std::shared_ptr<ibv_mr>> regions_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<Window> windows_;
  uint32_t established_count_ = 0;

  // Progress of granting.
  uint32_t extent_index_ = 0;
  uint64_t offset_bytes_ = 0;
  uint32_t next_connection_ = 0;
  uint64_t region_bytes_ = 0;                // the smallest max_region_bytes of the devices
  std::map<Device*, ibv_mr*> part_regions_;  // of the part of the extent that is being granted
  std::vector<Key> keys_;                    // of this step
  std::vector<uint32_t> posted_;             // work requests in flight, by connection
  uint32_t posted_count_ = 0;
  size_t revoked_count_ = 0;  // windows
};

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_SERVICE_RDMA_GRANT_H_
