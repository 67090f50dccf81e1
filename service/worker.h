// The worker is the process that serves. It connects configuration, log, store and server, and ends
// cleanly on SIGTERM.
#ifndef PQCACHED_SERVICE_WORKER_H_
#define PQCACHED_SERVICE_WORKER_H_

#include <optional>

#include "absl/time/time.h"
#include "service/config/config.h"
#include "service/supervise/notify.h"

namespace pqcached::service {

// Serves until SIGTERM or SIGINT; returns the exit status. Its memory and sessions continue in the
// next worker if $NOTIFY_SOCKET names a supervisor that keeps them, or if pool_directory is set.
//
// `claimed`: the supervisor holds the claims on the sockets for this process. `mappings`: the
// supervisor keeps mappings, and this process, a fork of it, has inherited these.
// REQUIRES: called once, on the main thread, before other threads start.
int RunWorker(const Config& config, bool claimed, std::optional<KeptMappings> mappings = {});

// Returns the time within which a worker ends after SIGTERM, by itself or by force.
absl::Duration StopTimeoutOf(const Config& config);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_WORKER_H_
