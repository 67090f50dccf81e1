// Values that the two ends of a transfer exchange.
//
// The *source* has the bytes, the *puller* reads them. An Offer and Keys travel over a connection
// that is authenticated and encrypted (the caller's); a Hello and a Rejection travel in the private
// data of the RDMA connections, which are neither: the token in a Hello is valid for one pull.
//
// Plain values. The structs that are sent by RDMA have a fixed layout, little-endian.
#ifndef PQCACHED_SERVICE_RDMA_OFFER_H_
#define PQCACHED_SERVICE_RDMA_OFFER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pqcached::service::rdma {

inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr uint32_t kHelloMagic = 0x52435150;  // "PQCR"
inline constexpr uint32_t kMaxRails = 16;
inline constexpr uint32_t kMaxConnections = 64;  // of one pull
// No key is for less, except at the end of an extent, so that a source cannot make a puller keep
// millions of keys.
inline constexpr uint64_t kMinKeyBytes = 4096;

using Token = std::array<std::byte, 16>;  // random; names one pull

// A *rail* is a path over one device of each end.
struct Rail {
  std::string address;  // IPv4 or IPv6, without a port
  uint16_t port = 0;
};

struct Offer {
  Token token = {};
  uint32_t connection_count = 0;  // connection i uses rail i % rails.size()
  std::vector<Rail> rails = {};
};

// Permission to read a piece of an extent over one connection.
struct Key {
  uint32_t extent_index = 0;
  uint32_t connection = 0;
  uint64_t offset_bytes = 0;  // in the extent
  uint64_t bytes = 0;
  uint64_t address = 0;  // in the memory of the source
  uint32_t key = 0;
};

// Sent with the request of a connection. At most 56 bytes.
struct Hello {
  uint32_t magic = kHelloMagic;
  uint32_t version = kProtocolVersion;
  Token token = {};
  uint32_t connection = 0;
  uint32_t mtu_bytes = 0;  // of the puller's port: the MTU of the connection
};
static_assert(sizeof(Hello) == 32);

enum class RejectionReason : uint32_t {
  kNone = 0,
  kVersion = 1,    // value: the version of the source
  kUnknown = 2,    // the source has no such pull, or it has ended
  kDuplicate = 3,  // the connection exists already, or was not offered
  kMtu = 4,        // value: the MTU of the source's port, which is smaller
  kResources = 5,  // the source could not make a queue pair
};

// Sent when the source refuses a connection. At most 148 bytes.
struct Rejection {
  uint32_t magic = kHelloMagic;
  RejectionReason reason = RejectionReason::kNone;
  uint32_t value = 0;
};
static_assert(sizeof(Rejection) == 12);

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_SERVICE_RDMA_OFFER_H_
