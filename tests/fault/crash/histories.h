// Short histories of one engine, of which every crash point is tried.
#ifndef PQCACHED_TESTS_FAULT_CRASH_HISTORIES_H_
#define PQCACHED_TESTS_FAULT_CRASH_HISTORIES_H_

#include <vector>

#include "tests/fault/crash/engine.h"

namespace pqcached::kvstore::testing {

enum class Keeping { kDescriptors, kDirectory, kStrict };

struct History {
  const char* name;
  WorldSpec spec;
  Keeping keeping = Keeping::kDescriptors;
  std::vector<Step> steps;
  bool fills = false;  // active segments are filled after each kill
};

std::vector<History> Histories();

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_FAULT_CRASH_HISTORIES_H_
