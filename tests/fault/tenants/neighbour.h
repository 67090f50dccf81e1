// Neighbour: a process beside the quiet tenant, hostile or only busy, for as long as the object lives.
#ifndef PQCACHED_TESTS_FAULT_TENANTS_NEIGHBOUR_H_
#define PQCACHED_TESTS_FAULT_TENANTS_NEIGHBOUR_H_

#include <cstdint>
#include <string>

#include "hostile.h"
#include "tests/client/process.h"

namespace pqcached::testing {

class Neighbour {
 public:
  // What became of its calls.
  struct Calls {
    uint64_t taken = 0, refused = 0, failed = 0;
    Calls& operator+=(const Calls& other);
    std::string ToString() const;
  };

  // Starts a hostile tenant of the sidecar at `endpoint`, and returns when its calls are answered as
  // those of its kind are, or after a minute. Throws when it ends before.
  Neighbour(const HostilityRow& hostility, const std::string& endpoint);
  // Starts a program that computes on so many threads and calls no sidecar.
  explicit Neighbour(uint32_t threads);

  // Ends it. Throws when it has ended by itself.
  Calls End();

 private:
  void AwaitWorking();

  Process process_;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_TENANTS_NEIGHBOUR_H_
