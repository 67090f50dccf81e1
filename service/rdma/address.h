// Addresses of rails as texts and as those of the system.
//
// Pure functions; thread-safe.
#ifndef PQCACHED_SERVICE_RDMA_ADDRESS_H_
#define PQCACHED_SERVICE_RDMA_ADDRESS_H_

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace pqcached::service::rdma {

// Converts "10.0.0.1" or "fe80::1" and a port.
//
// Errors: kInvalidArgument  about `field`: not an address
absl::StatusOr<sockaddr_storage> ParseAddress(absl::string_view field, const std::string& text,
                                              uint16_t port);

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_SERVICE_RDMA_ADDRESS_H_
