// StartLimits: what the machine can hold, compared with what a configuration promises. A sidecar
// that starts with less serves until the first call that meets the limit.
#ifndef PQCACHED_SERVICE_CONFIG_START_LIMITS_H_
#define PQCACHED_SERVICE_CONFIG_START_LIMITS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kvstore/limits/memory_limits.h"
#include "service/base/log.h"
#include "service/config/config.h"

namespace pqcached::service {

struct StartLimits {
  size_t descriptors = kvstore::kUnlimitedBytes;   // RLIMIT_NOFILE, as far as it can be raised
  size_t memory_bytes = kvstore::kUnlimitedBytes;  // of the machine, or of a control group
  std::string memory_source;                       // the file that says so
  size_t volume_bytes = kvstore::kUnlimitedBytes;  // the whole file system of pool_directory
};

// Reads the limits of this process. Memory on hugetlbfs is limited by the volume only.
StartLimits ReadStartLimits(const Config& config);

// Returns the descriptors that one process needs at most, with max_sessions clients.
size_t DescriptorsNeeded(const Config& config);

// Returns a text for each limit that is too low: the key, its value, and the limit.
std::vector<std::string> TooLow(const Config& config, const StartLimits& limits);

// Logs a warning for each limit of this process that is too low.
//
// Errors: kFailedPrecondition  there is one, and strict_start is set
absl::Status CheckStartLimits(const Config& config, const Log& log);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_CONFIG_START_LIMITS_H_
