// LimitedLog writes refusals to the log without being filled by a peer that repeats: the first one
// of each reason at once, then at most one line of each in an interval, with the number of refusals
// since the last line.
//
// Reasons are words of the caller, of which there are few. Thread-safe.
#ifndef PQCACHED_SERVICE_BASE_LIMITED_LOG_H_
#define PQCACHED_SERVICE_BASE_LIMITED_LOG_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"
#include "service/base/log.h"

namespace pqcached::service {

class LimitedLog {
 public:
  // `log` outlives the object.
  LimitedLog(const Log& log, std::string event, absl::Duration interval = absl::Seconds(10))
      : log_(log), event_(std::move(event)), interval_(interval) {}

  // Counts a refusal, and writes a line unless the last one of this reason is too recent.
  void Note(absl::string_view reason, absl::string_view peer, absl::string_view message);

 private:
  struct Reason {
    kvstore::SteadyTime next_line;  // the earliest time of the next line
    uint64_t refused = 0;           // since the last line
  };

  const Log& log_;
  const std::string event_;
  const absl::Duration interval_;
  kvstore::Mutex mutex_;
  std::map<std::string, Reason, std::less<>> reasons_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_LIMITED_LOG_H_
