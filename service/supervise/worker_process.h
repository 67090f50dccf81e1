// Starts the worker's process and passes it what it inherits from its supervisor.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_SUPERVISE_WORKER_PROCESS_H_
#define PQCACHED_SERVICE_SUPERVISE_WORKER_PROCESS_H_

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "service/supervise/notify.h"

namespace pqcached::service {

// Function that a worker runs when it is a fork of this process and not a program of its own.
// `mappings` are the mappings of this process. Returns the exit status.
using ForkedWork = std::function<int(KeptMappings mappings)>;

struct WorkerProcess {
  const std::vector<std::string>& command;  // the first element is the path to execute
  const std::string& notify_socket;
  const KeptDescriptors& kept;
  size_t max_kept = 0;
  absl::Duration watchdog_timeout = absl::ZeroDuration();  // zero = none
  const ForkedWork& work;                                  // empty: `command` is executed
  KeptMappings& mappings;  // passed to `work` in the child; this process keeps them
};

// Starts a worker and returns its pid; -1 and errno when the fork fails. The worker is killed when
// this process ends. A command that cannot be executed ends with status 127 and a line on standard
// error.
//
// REQUIRES: no other thread runs.
pid_t StartWorkerProcess(const WorkerProcess& worker);

// Returns an absolute path with which to start a program again that was started as `argument`, even
// after another file has replaced it. Symbolic links in `argument` are not resolved, so that each
// start follows them again.
std::string ProgramPath(const char* argument);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SUPERVISE_WORKER_PROCESS_H_
