// Starting the worker's process: what it inherits of its supervisor.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_WORKER_PROCESS_H_
#define PQCACHED_SERVICE_WORKER_PROCESS_H_

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "service/notify.h"

namespace pqcached::service {

// What a worker runs that is no program of its own but a fork of this process, with what that has
// mapped. Returns its exit status.
using ForkedWork = std::function<int(KeptMappings mappings)>;

struct WorkerProcess {
  const std::vector<std::string>& command;  // the first is the path that is executed
  const std::string& notify_socket;
  const KeptDescriptors& kept;
  size_t max_kept = 0;
  absl::Duration watchdog_timeout = absl::ZeroDuration();  // zero = none
  const ForkedWork& work;                                  // empty: `command` is executed
  KeptMappings& mappings;  // for `work`; they stay with this process
};

// The worker's pid; -1 and errno when there is none. It is killed when this process ends. What cannot
// be executed ends with status 127 and a line on standard error.
//
// REQUIRES: no other thread runs.
pid_t StartWorkerProcess(const WorkerProcess& worker);

// The path to execute a program that was started as `argument` again, also after another file has
// taken its place: made absolute; links are followed anew each time.
std::string ProgramPath(const char* argument);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_WORKER_PROCESS_H_
