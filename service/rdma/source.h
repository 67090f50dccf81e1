// Source: the side of RDMA transfers that has the bytes. It listens on its rails, and grants pulls
// (grant.h).
//
//   absl::StatusOr<Offer> offer = source->Open({.peer = "host-b", .extents = ..., .lease = ...,
//                                               .granted = send the keys, .ended = ...});
//
// The caller sends the offer and the keys to the puller (pull.h) over a connection of its own that
// is authenticated and encrypted. The bytes themselves travel in the clear.
//
// Single-threaded: every call, and the io_context, run on one thread.
#ifndef PQCACHED_SERVICE_RDMA_SOURCE_H_
#define PQCACHED_SERVICE_RDMA_SOURCE_H_

#include <boost/asio/io_context.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/rdma/device.h"
#include "service/rdma/grant.h"
#include "service/rdma/objects.h"
#include "service/rdma/offer.h"
#include "service/rdma/watch.h"

namespace pqcached::service::rdma {

class Source {
 public:
  struct Options {
    std::vector<std::string> addresses = {};  // of the rails' devices; 1 to kMaxRails
    uint32_t max_pulls = 64;                  // at a time
    uint32_t max_extents = 1u << 18;          // of a pull
    uint64_t key_bytes = 1u << 20;            // of a key; a multiple of kMinKeyBytes
    uint64_t step_bytes = 64u << 20;          // registered before other pulls have their turn
    bool use_windows = true;                  // where the device has them
  };

  // Listens on a free port of each address.
  //
  // Errors: kInvalidArgument  an option is out of range
  //         kUnavailable      an address belongs to no RDMA device
  //         those of Device::Open and CallFailed
  static absl::StatusOr<std::unique_ptr<Source>> Create(Verbs& verbs, boost::asio::io_context& io,
                                                        Options options);
  // Ends all pulls, without their `ended`.
  ~Source();
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  // Permits a pull. Nothing is registered before all connections exist.
  //
  // Errors: kUnauthenticated    `peer` is empty
  //         kInvalidArgument    a field is out of range
  //         kResourceExhausted  max_pulls
  absl::StatusOr<Offer> Open(GrantRequest request);

  // Makes the keys of a pull invalid and ends it with `why`. Does nothing when it has ended.
  void Revoke(const Token& token, absl::Status why);

  size_t pull_count() const { return grants_.size(); }

 private:
  // Destroyed from the end: the listener before the device that it is bound to.
  struct Listener {
    std::shared_ptr<Device> device;
    Owned<rdma_cm_id> id;
  };

  Source(Verbs& verbs, boost::asio::io_context& io, Options options)
      : verbs_(verbs), io_(io), options_(std::move(options)) {}

  absl::Status Start();
  absl::Status Listen(const std::string& field, const std::string& address);
  void TakeEvents();
  void Admit(const ConnectionEvent& event);
  // Returns a reason to reject the connection; kNone: it has been accepted.
  Rejection TryAccept(Owned<rdma_cm_id>& id, const ConnectionEvent& event);

  Verbs& verbs_;
  boost::asio::io_context& io_;
  const Options options_;
  Owned<rdma_event_channel> channel_;
  std::vector<Listener> listeners_;
  std::vector<Rail> rails_;
  std::map<Token, std::shared_ptr<Grant>> grants_;
  std::optional<Watch> watch_;
};

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_SERVICE_RDMA_SOURCE_H_
