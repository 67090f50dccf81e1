// Pull: the side of an RDMA transfer that reads. It connects to a source (source.h), reads extents
// by RDMA READ in the order of the request, and compares their checksums.
//
//   connections   lane i is a reliable connection over rail i % rails; keys name their lane, so
//                 that rails are used by turns
//   pieces        a READ lies in one key, in one local region (at most the device's limit), and is
//                 at most a message of the port
//   credits       READs in flight of a lane: what both devices allow
//   memory        a target is registered before its first READ, and deregistered when it is
//                 complete
//
// A *part* is a number of targets whose arrival the caller wants to know: the codes of a layer, or
// its rows. The caller orders the targets: layer 0 first, and codes before rows. Lanes keep that
// order, so parts arrive in order but for READs in flight.
//
// Single-threaded: every call, and the io_context, run on one thread. Callbacks may call the pull.
#ifndef PQCACHED_SERVICE_RDMA_PULL_H_
#define PQCACHED_SERVICE_RDMA_PULL_H_

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/clock.h"
#include "service/rdma/connection.h"
#include "service/rdma/device.h"
#include "service/rdma/objects.h"
#include "service/rdma/offer.h"
#include "service/rdma/watch.h"

namespace pqcached::service::rdma {

// Memory for one extent of the source.
struct PullTarget {
  std::span<std::byte> memory;
  uint32_t crc32c = 0;      // of its bytes
  uint32_t part_index = 0;  // not less than that of the target before
};

struct PullRequest {
  Offer offer;
  std::vector<PullTarget> targets;     // target i is for extent i of the source
  std::shared_ptr<const void> memory;  // keeps the targets; released when no device can write there
  kvstore::SteadyTime deadline = kvstore::SteadyTime::InfiniteFuture();
  // Called when the targets of a part have arrived and match their checksums.
  std::function<void(uint32_t part_index)> arrived = {};
  // Called once, after `memory` is released:
  //   kUnavailable         the source does not answer, has closed the connection, or the deadline
  //   kAborted             the source has revoked the keys
  //   kDataLoss            a checksum does not match
  //   kPermissionDenied    the source has no such pull
  //   kFailedPrecondition  the source is of another version, or its MTU is smaller
  //   kResourceExhausted   no memory can be registered, or a limit of a device is reached
  // After a failure the targets have no meaning, except those of parts that have arrived.
  std::function<void(const absl::Status& status)> ended = {};
};

class Pull : public std::enable_shared_from_this<Pull> {
 public:
  struct Options {
    std::vector<std::string> addresses = {};  // rail i leaves from addresses[i % size]; empty: any
    uint32_t max_reads_in_flight = 16;        // of a lane; 1 to 255
    uint64_t read_bytes = 1u << 20;           // of a READ; at most 2^30
  };

  // Starts to connect. Without a status of Start there is exactly one call of `ended`, unless the
  // pull is destroyed before.
  //
  // Errors: kInvalidArgument  the request or an option is out of range
  //         those of CallFailed
  static absl::StatusOr<std::shared_ptr<Pull>> Start(Verbs& verbs, boost::asio::io_context& io,
                                                     Options options, PullRequest request);
  ~Pull() { TearDown(); }

  // Adds keys in the order of the source. They must cover the targets without gaps.
  //
  // Errors: kInvalidArgument  a key does not fit; the pull then ends
  absl::Status AddKeys(std::span<const Key> keys);
  // Ends the pull with `why`. Does nothing when it has ended.
  void Cancel(absl::Status why) { End(std::move(why)); }

 private:
  struct Lane {
    Owned<rdma_cm_id> id;  // until there is a connection
    std::unique_ptr<Connection> connection;
    uint32_t credits = 0;
    std::vector<Key> keys;
    size_t next_key = 0;
    uint64_t posted_bytes = 0;  // of the next key
  };
  // A region covers a part of a target for one device: target, begin in it, device.
  using RegionName = std::tuple<uint32_t, uint64_t, const Device*>;

  Pull(Verbs& verbs, boost::asio::io_context& io, Options options, PullRequest request);
  absl::Status Connect();
  absl::Status ConnectLane(uint32_t index);
  void TakeEvents();
  absl::Status Handle(const ConnectionEvent& event);
  absl::Status RequestConnection(uint32_t index);
  absl::StatusOr<std::shared_ptr<Device>> DeviceOf(const rdma_cm_id& id);
  absl::Status CheckKey(const Key& key) const;
  absl::Status PostReads(Lane& lane);
  absl::Status PostRead(Lane& lane);
  absl::StatusOr<ibv_mr*> RegionOf(Device& device, uint32_t target_index, uint64_t begin);
  void Completed(Lane& lane, const absl::StatusOr<ibv_wc>& completion);
  absl::Status FinishTarget(uint32_t target_index);
  void End(absl::Status status);
  void TearDown();

  Verbs& verbs_;
  boost::asio::io_context& io_;
  const Options options_;
  PullRequest request_;
  boost::asio::steady_timer timer_;
  bool ended_ = false;
  bool torn_down_ = false;
  absl::Status end_;

  // Destroyed from the end.
  Owned<rdma_event_channel> channel_;
  std::map<ibv_context*, std::shared_ptr<Device>> devices_;
  std::map<RegionName, Owned<ibv_mr>> regions_;
  std::vector<Lane> lanes_;
  std::optional<Watch> watch_;

  // The place that the next key must be for.
  uint32_t key_target_ = 0;
  uint64_t key_offset_bytes_ = 0;
  std::vector<uint64_t> missing_bytes_;    // by target
  std::vector<uint32_t> missing_targets_;  // by part
  size_t finished_targets_ = 0;
};

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_SERVICE_RDMA_PULL_H_
