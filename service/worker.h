// The worker: the process that serves. Wires configuration, log, store and server together, and ends
// cleanly on SIGTERM.
#ifndef PQCACHED_SERVICE_WORKER_H_
#define PQCACHED_SERVICE_WORKER_H_

#include <optional>

#include "absl/time/time.h"
#include "service/config.h"
#include "service/notify.h"

namespace pqcached::service {

// Serves until SIGTERM or SIGINT; returns the exit status. What it holds goes on in the next worker where
// $NOTIFY_SOCKET names somebody who keeps it, or pool_directory is set.
//
// `claimed`: this process's supervisor has the right to serve on the sockets. `mappings`: it keeps
// mappings, too, and this process, a fork of it, has these.
// REQUIRES: called once, on the main thread, before others start.
int RunWorker(const Config& config, bool claimed, std::optional<KeptMappings> mappings = {});

// Within which a worker has ended after SIGTERM, by itself or by force.
absl::Duration StopTimeoutOf(const Config& config);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_WORKER_H_
