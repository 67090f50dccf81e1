// Keys of the configuration for TCP, TLS and the identities of clients (config.h).
#ifndef PQCACHED_SERVICE_CONFIG_CONFIG_TLS_H_
#define PQCACHED_SERVICE_CONFIG_CONFIG_TLS_H_

#include <vector>

#include "absl/status/status.h"
#include "service/config/config.h"

namespace pqcached::service {

void AddTlsKeys(std::vector<ConfigKey>& keys);

// Checks the keys against each other: beyond the loopback there is no TCP without TLS, and no TLS
// without a way to identify clients.
//
// Errors: kInvalidArgument  names the key
absl::Status CheckTls(const Config& config);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_CONFIG_CONFIG_TLS_H_
