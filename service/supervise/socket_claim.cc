#include "service/supervise/socket_claim.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

constexpr int kClaimAttempts = 16;
constexpr absl::Duration kClaimPause = absl::Milliseconds(20);

std::string LockPath(const std::string& path) { return path + ".lock"; }

absl::Status Failed(const std::string& path, absl::string_view what, int error) {
  return FailedPrecondition("listen", absl::StrCat(path, ": ", what, ": ", std::strerror(error)));
}

absl::Status AlreadyServed(const std::string& path) {
  return AlreadyExists("listen", absl::StrCat("another process serves on ", path));
}

absl::Status MakeDirectory(const std::string& path) {
  const std::filesystem::path directory = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (std::filesystem::is_directory(directory, error)) return absl::OkStatus();
  const std::filesystem::path above = directory.parent_path();
  std::filesystem::create_directories(above, error);
  if (error) return Failed(above, "cannot make the directory", error.value());
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return Failed(directory, "cannot make the directory", errno);
  }
  return absl::OkStatus();
}

// Returns whether the open file is still the one at `path`: its last holder removes it.
bool IsSameFile(int descriptor, const std::string& path) {
  struct stat opened = {};
  struct stat named = {};
  return fstat(descriptor, &opened) == 0 && stat(path.c_str(), &named) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

absl::StatusOr<int> Lock(const std::string& path) {
  const std::string lock_path = LockPath(path);
  for (int attempt = 0; attempt < kClaimAttempts; ++attempt) {
    const int descriptor = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor < 0) return Failed(lock_path, "cannot open", errno);
    if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
      close(descriptor);
      return AlreadyServed(path);
    }
    if (IsSameFile(descriptor, lock_path)) return descriptor;
    close(descriptor);
  }
  return AlreadyServed(path);
}

// Returns whether a process that uses no claims accepts connections there.
bool IsServed(const std::string& path) {
  const int descriptor = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return false;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const bool served =
      connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(descriptor);
  return served;
}

absl::Status ClearPath(const std::string& path) {
  struct stat status = {};
  if (lstat(path.c_str(), &status) != 0) {
    return errno == ENOENT ? absl::OkStatus() : Failed(path, "cannot read its status", errno);
  }
  if (!S_ISSOCK(status.st_mode)) {
    return FailedPrecondition("listen", absl::StrCat(path, " exists but is not a socket"));
  }
  if (IsServed(path)) return AlreadyServed(path);
  if (unlink(path.c_str()) != 0) return Failed(path, "cannot remove the stale socket", errno);
  return absl::OkStatus();
}

// Removes the lock file while it is still locked: see IsSameFile.
void Unlock(const std::string& path, int descriptor) {
  unlink(LockPath(path).c_str());
  close(descriptor);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SocketClaim>> SocketClaim::Acquire(const std::string& path,
                                                                  absl::Duration timeout) {
  RETURN_IF_ERROR(MakeDirectory(path));
  ASSIGN_OR_RETURN(const int descriptor, Lock(path));
  absl::Status status = ClearPath(path);
  const kvstore::SteadyTime until = kvstore::SteadyTime::Now() + timeout;
  while (absl::IsAlreadyExists(status) && kvstore::SteadyTime::Now() < until) {
    absl::SleepFor(kClaimPause);
    status = ClearPath(path);
  }
  if (!status.ok()) {
    Unlock(path, descriptor);
    return status;
  }
  return std::unique_ptr<SocketClaim>(new SocketClaim(path, descriptor));
}

SocketClaim::SocketClaim(std::string path, int lock_descriptor)
    : path_(std::move(path)), lock_descriptor_(lock_descriptor) {}

void SocketClaim::Clear() const {
  struct stat status = {};
  if (lstat(path_.c_str(), &status) == 0 && S_ISSOCK(status.st_mode)) unlink(path_.c_str());
}

SocketClaim::~SocketClaim() {
  Clear();
  Unlock(path_, lock_descriptor_);
}

}  // namespace pqcached::service
