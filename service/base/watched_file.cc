#include "service/base/watched_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

// More than a tick of the clock of any file system of Linux.
constexpr absl::Duration kSettleTime = absl::Milliseconds(50);

}  // namespace

WatchedFile::Stamp WatchedFile::StampOf() const {
  struct stat status = {};
  if (stat(path_.c_str(), &status) != 0) return {};
  return {static_cast<int64_t>(status.st_dev),
          static_cast<int64_t>(status.st_ino),
          status.st_size,
          status.st_mtim.tv_sec,
          status.st_mtim.tv_nsec,
          status.st_ctim.tv_sec,
          status.st_ctim.tv_nsec};
}

bool WatchedFile::MayHaveChanged() {
  const kvstore::SteadyTime now = kvstore::SteadyTime::Now();
  const Stamp stamp = StampOf();
  if (stamp == stamp_) {
    if (read_settled_) return false;
    read_settled_ = now >= settled_;
    return true;
  }
  stamp_ = stamp;
  read_settled_ = false;
  settled_ = now + kSettleTime;
  return true;
}

absl::StatusOr<std::string> WatchedFile::Read() const {
  const int descriptor = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    return FailedPrecondition("", absl::StrCat("cannot read ", path_, ": ", std::strerror(errno)));
  }
  std::string text(kMaxBytes + 1, '\0');
  size_t size = 0;
  ssize_t got = 0;
  while (size < text.size() && (got = read(descriptor, &text[size], text.size() - size)) != 0) {
    if (got > 0) size += static_cast<size_t>(got);
    if (got < 0 && errno != EINTR) break;
  }
  const int error = got < 0 ? errno : 0;
  close(descriptor);
  if (error != 0) {
    return FailedPrecondition("", absl::StrCat("cannot read ", path_, ": ", std::strerror(error)));
  }
  if (size > kMaxBytes) {
    return FailedPrecondition("", absl::StrCat(path_, " is larger than ", kMaxBytes, " bytes"));
  }
  text.resize(size);
  return text;
}

}  // namespace pqcached::service
