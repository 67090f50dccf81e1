// Calls that failed, and are repeated by the same thread with the same arguments.
#ifndef PQCACHED_CLIENT_CONFORM_REPEATS_H_
#define PQCACHED_CLIENT_CONFORM_REPEATS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "client/conform/call.h"
#include "client/conform/contract.h"
#include "client/conform/report.h"

namespace pqcached::conform {

// Returns whether a call was refused because an output of the caller's is too small.
bool LacksRoom(const RecordedCall& call);

// Single-threaded.
class Repeats {
 public:
  // Notes what has changed in the process when the call begins.
  void Begin(const RecordedCall& call) { changes_at_begin_[&call] = changes_; }
  // Returns what is wrong with a call that repeats an earlier one; its clause is empty for a
  // warning, and its text is empty when nothing is wrong.
  Finding End(const RecordedCall& call, const Rule& rule);

 private:
  struct Changes {
    uint64_t any = 0;    // calls that changed something
    uint64_t freed = 0;  // calls that may have freed memory in the sidecar
  };
  struct Failure {
    const RecordedCall* call = nullptr;
    Changes changes;
    bool was_reported = false;  // of this call, or of one that it repeats
  };

  Finding Judge(const RecordedCall& call, const Rule& rule, const Failure& failure,
                const Changes& at_begin) const;
  Finding JudgeRoom(const RecordedCall& call, const RecordedCall& earlier) const;
  void Note(const RecordedCall& call, const Rule& rule);
  Finding EndRepeatable(const RecordedCall& call, const Rule& rule, const Changes& at_begin);

  Changes changes_;
  std::map<const RecordedCall*, Changes> changes_at_begin_;
  std::map<std::pair<uint64_t, std::string>, Failure> failures_;  // by thread, and by arguments
  std::map<uint64_t, const RecordedCall*> last_ended_;            // by thread
};

}  // namespace pqcached::conform

#endif  // PQCACHED_CLIENT_CONFORM_REPEATS_H_
