#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/target.h"

namespace pqcached::fuzz {

void Found(const std::string& what) {
  std::fprintf(stderr, "fuzz finding: %s\n", what.c_str());
  std::abort();
}

}  // namespace pqcached::fuzz
