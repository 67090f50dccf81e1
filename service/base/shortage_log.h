// ShortageLog names a shortage of the environment (kvstore/refusal.h) that has refused a call in
// the log: the first refusal at once, then at most one line of each kind in an interval, with the
// number of calls that were refused since the last line.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_BASE_SHORTAGE_LOG_H_
#define PQCACHED_SERVICE_BASE_SHORTAGE_LOG_H_

#include <array>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"
#include "service/base/log.h"

namespace pqcached::service {

class ShortageLog {
 public:
  explicit ShortageLog(const Log& log, absl::Duration interval = absl::Seconds(10))
      : log_(log), interval_(interval) {}

  // Writes a line if a shortage has refused the call. Other statuses have no effect.
  void Note(absl::string_view call, const absl::Status& status);

 private:
  struct Kind {
    const char* event;
    kvstore::SteadyTime next_line;  // the earliest time of the next line
    uint64_t refused = 0;           // calls since the last line
  };

  const Log& log_;
  const absl::Duration interval_;
  kvstore::Mutex mutex_;
  std::array<Kind, 2> kinds_ ABSL_GUARDED_BY(mutex_) = {
      {{"short_of_memory", {}, 0}, {"short_of_descriptors", {}, 0}}};
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_SHORTAGE_LOG_H_
