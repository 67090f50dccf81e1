#include "service/base/limited_log.h"

#include <utility>

namespace pqcached::service {

void LimitedLog::Note(absl::string_view reason, absl::string_view peer, absl::string_view message) {
  uint64_t refused = 0;
  {
    const kvstore::MutexLock lock(&mutex_);
    Reason& known = reasons_[std::string(reason)];
    ++known.refused;
    const kvstore::SteadyTime now = kvstore::SteadyTime::Now();
    if (now < known.next_line) return;
    known.next_line = now + interval_;
    refused = std::exchange(known.refused, 0);
  }
  log_.Warning(event_,
               {{"reason", reason}, {"peer", peer}, {"refused", refused}, {"message", message}});
}

}  // namespace pqcached::service
