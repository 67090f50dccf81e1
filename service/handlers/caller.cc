#include "service/handlers/caller.h"

#include "service/base/refusal.h"

namespace pqcached::service {

absl::Status Caller::Check() const {
  if (kvstore::SteadyTime::Now() >= deadline) {
    return DeadlineExceeded("", "the deadline has passed");
  }
  if (is_cancelled && is_cancelled()) return Cancelled("the caller has cancelled the call");
  return absl::OkStatus();
}

}  // namespace pqcached::service
