// The findings in a record of calls.
#ifndef PQCACHED_CLIENT_CONFORM_REPORT_H_
#define PQCACHED_CLIENT_CONFORM_REPORT_H_

#include <cstddef>
#include <string>
#include <vector>

namespace pqcached::conform {

// A broken clause of the contract, or, with an empty clause, a warning.
struct Finding {
  size_t line = 0;
  std::string clause;  // "client.h 1", "step.h"
  std::string text;

  bool operator==(const Finding&) const = default;
};

// A line that is no recorded call.
struct BadLine {
  size_t line = 0;
  std::string reason;

  bool operator==(const BadLine&) const = default;
};

struct Report {
  std::vector<Finding> findings;  // ascending by line
  std::vector<BadLine> bad_lines;
  size_t call_count = 0;
  size_t unknown_call_count = 0;  // calls of a later library, which are left out
  size_t process_count = 0;
};

}  // namespace pqcached::conform

#endif  // PQCACHED_CLIENT_CONFORM_REPORT_H_
