// What the fault tests share: a daemon whose worker can be killed, what it says is left, and how many
// faults a run has seen.
#ifndef PQCACHED_TESTS_FAULT_FAULTS_H_
#define PQCACHED_TESTS_FAULT_FAULTS_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "pqcached/client.hpp"
#include "tests/client/daemon.h"

namespace pqcached::testing {

// Child processes of a process, as the kernel lists them.
std::vector<pid_t> ChildrenOf(pid_t process);

// The worker behind a daemon's supervisor; waits for one other than `last`. 0: none within a minute.
pid_t AwaitWorker(pid_t supervisor, pid_t last = 0);

// Stops a process for as long as it lives.
class Stopped {
 public:
  explicit Stopped(pid_t process);
  ~Stopped();
  Stopped(const Stopped&) = delete;
  Stopped& operator=(const Stopped&) = delete;

 private:
  const pid_t process_;
};

// What sessions have left in a sidecar.
struct Left {
  uint64_t sessions = 0, sequences = 0, leases = 0, staging_bytes = 0, used_bytes = 0;
  bool nothing_but(uint64_t session_count) const {
    return sessions == session_count && sequences == 0 && leases == 0 && staging_bytes == 0 &&
           used_bytes == 0;
  }
  std::string ToString() const;
  Left& operator+=(const Left& other);
};
Left LeftIn(Client& admin);
// Waits until only `sessions` sessions are left, which hold nothing, at most a minute.
Left AwaitNothingLeft(Client& admin, uint64_t sessions);

// Faults of a run: `few`, or `many` with PQCACHED_FULL_TESTS.
int FaultCount(int few, int many);

// What the present test has seen, as properties in GoogleTest's report: figures are made of them.
// `name` counts what went well, and is 0 when the test has failed.
void Record(const std::string& name, uint64_t done, const Engine::Counts& counts, const Left& left);

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_FAULTS_H_
