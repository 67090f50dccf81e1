// RunSelfTest checks that kernels and store agree with their references on this machine.
//
// For each instruction set that the machine has, a small separate store receives rows, returns
// them, selects tokens, attends and builds an index. The results are compared with plain loops, or
// with those of the reference instruction set. The daemon's own store is not touched.
#ifndef PQCACHED_SERVICE_HANDLERS_SELF_TEST_H_
#define PQCACHED_SERVICE_HANDLERS_SELF_TEST_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace pqcached::service {

struct SelfTestCheck {
  std::string name;     // "<instruction set>.<what>"
  absl::Status status;  // kDataLoss: results differ; others: the check did not run
  std::string detail;   // what was compared
  double seconds = 0;
};

// Runs all checks. `keep_going` is called before each check; when it returns false, the remaining
// ones are not run (kCancelled).
std::vector<SelfTestCheck> RunSelfTest(const std::function<bool()>& keep_going);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_SELF_TEST_H_
