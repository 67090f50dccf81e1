// Checks a record of calls against the contract of the public headers.
//
// It sees what the lines hold: handles, positions, counts, times and statuses. It does not see
//   - by which of status, field, retry time and message an engine decides (clause 3);
//   - rows, queries and outputs, so neither wrong numbers nor results that an engine uses although
//     pqc_step_end has failed;
//   - whether memory of the engine stays as long as a call needs it;
//   - which clauses a process breaks that ends before it writes a line (a call on a closed handle
//     is written before it begins), and calls of callbacks;
//   - a sequence that two processes, or two handles of it, write at once (attach.h);
//   - a use of a handle whose address a later handle has received.
#ifndef PQCACHED_CLIENT_CONFORM_CHECKER_H_
#define PQCACHED_CLIENT_CONFORM_CHECKER_H_

#include <istream>

#include "client/conform/report.h"

namespace pqcached::conform {

// Reads all lines, and replays the calls of each process in the order in which they began and
// ended. Needs about 1 KiB of memory per line.
Report Check(std::istream& lines);

}  // namespace pqcached::conform

#endif  // PQCACHED_CLIENT_CONFORM_CHECKER_H_
