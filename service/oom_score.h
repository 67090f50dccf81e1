// OomScore: what the kernel adds to this process's badness when it has to kill one.
#ifndef PQCACHED_SERVICE_OOM_SCORE_H_
#define PQCACHED_SERVICE_OOM_SCORE_H_

#include <cstdint>

#include "absl/status/status.h"

namespace pqcached::service {

// For this process and those that it starts later.
//
// Errors: kPermissionDenied  the kernel refuses a lower one
absl::Status AdjustOomScore(int32_t score);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_OOM_SCORE_H_
