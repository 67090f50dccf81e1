#include "service/supervise/oom_score.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"

namespace pqcached::service {

absl::Status AdjustOomScore(int32_t score) {
  const int file = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  const std::string text = absl::StrCat(score);
  const bool written =
      file >= 0 && write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  const int error = errno;
  if (file >= 0) close(file);
  if (written) return absl::OkStatus();
  return PermissionDenied("oom_score_adjust", absl::StrCat(score, ": ", std::strerror(error)));
}

}  // namespace pqcached::service
