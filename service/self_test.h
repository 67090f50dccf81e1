// SelfTest: whether kernels and store do on this machine what their references do.
//
// For each instruction set that the machine has, a small store of its own takes rows, gives them back,
// ranks, attends and indexes; results are compared with plain loops, or with those of the reference
// level. Nothing of the daemon's own store is touched.
#ifndef PQCACHED_SERVICE_SELF_TEST_H_
#define PQCACHED_SERVICE_SELF_TEST_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace pqcached::service {

struct SelfTestCheck {
  std::string name;     // "<instruction set>.<what>"
  absl::Status status;  // kDataLoss: results differ; others: the check could not be made
  std::string detail;   // what was compared
  double seconds = 0;
};

// `go_on`: asked between checks; false ends the test early.
std::vector<SelfTestCheck> RunSelfTest(const std::function<bool()>& go_on);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SELF_TEST_H_
