// AdjustOomScore sets how likely the kernel is to kill this process when memory runs out.
#ifndef PQCACHED_SERVICE_SUPERVISE_OOM_SCORE_H_
#define PQCACHED_SERVICE_SUPERVISE_OOM_SCORE_H_

#include <cstdint>

#include "absl/status/status.h"

namespace pqcached::service {

// Sets oom_score_adj (-1000..1000; lower protects) of this process and of the processes that it
// starts later.
//
// Errors: kPermissionDenied  the kernel refuses to lower the score
absl::Status AdjustOomScore(int32_t score);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SUPERVISE_OOM_SCORE_H_
