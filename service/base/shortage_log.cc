#include "service/base/shortage_log.h"

#include <utility>

#include "service/base/refusal.h"

namespace pqcached::service {

void ShortageLog::Note(absl::string_view call, const absl::Status& status) {
  if (status.ok()) return;
  const Shortage shortage = ShortageOf(status);
  if (shortage == Shortage::kNone) return;
  const char* event = nullptr;
  uint64_t refused = 0;
  {
    const kvstore::MutexLock lock(&mutex_);
    Kind& kind = kinds_[shortage == Shortage::kMemory ? 0 : 1];
    ++kind.refused;
    const kvstore::SteadyTime now = kvstore::SteadyTime::Now();
    if (now < kind.next_line) return;
    kind.next_line = now + interval_;
    event = kind.event;
    refused = std::exchange(kind.refused, 0);
  }
  log_.Warning(event, {{"call", call}, {"refused", refused}, {"message", status.message()}});
}

}  // namespace pqcached::service
