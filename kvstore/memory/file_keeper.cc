#include "kvstore/memory/file_keeper.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kvstore/limits/memory_limits.h"
#include "kvstore/memory/directory.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

absl::string_view Text(std::string_view text) { return {text.data(), text.size()}; }

std::string ErrorText(int error) { return std::strerror(error); }

// Returns true when the descriptor is a regular file of this user that no other user can open.
bool IsOurFile(int descriptor) {
  struct stat info = {};
  return fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == geteuid() &&
         (info.st_mode & 0077) == 0;
}

// Moves files from one folder to the other, and back those that have moved before an error.
absl::Status MoveAll(int from, int to, const std::vector<std::string>& names) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (renameat(from, names[i].c_str(), to, names[i].c_str()) == 0) continue;
    const std::string error = absl::StrCat(names[i], ": ", ErrorText(errno));
    while (i-- > 0) renameat(to, names[i].c_str(), from, names[i].c_str());
    return Unavailable("", error, kNoRetry);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileKeeper>> FileKeeper::Open(const std::string& directory) {
  FileDescriptor opened(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened.valid()) {
    return NotFound("", absl::StrCat(directory, ": ", ErrorText(errno)));
  }
  struct stat info = {};
  struct statfs system = {};
  if (fstat(opened.get(), &info) != 0 || fstatfs(opened.get(), &system) != 0) {
    return NotFound("", absl::StrCat(directory, ": ", ErrorText(errno)));
  }
  if (info.st_uid != geteuid() || (info.st_mode & 0022) != 0) {
    return FailedPrecondition("", absl::StrCat(directory, ": must belong to uid ", geteuid(),
                                               " and be writable by it alone"));
  }
  if (flock(opened.get(), LOCK_EX | LOCK_NB) != 0) {
    return AlreadyExists("", absl::StrCat(directory, ": another process uses it"));
  }
  return std::unique_ptr<FileKeeper>(
      new FileKeeper(directory, std::move(opened), static_cast<size_t>(system.f_bsize),
                     static_cast<uint64_t>(system.f_type) == HUGETLBFS_MAGIC));
}

absl::StatusOr<FileDescriptor> FileKeeper::CreateMemory(const char* name, size_t size_bytes) {
  const size_t rounded_bytes = (size_bytes + block_bytes_ - 1) / block_bytes_ * block_bytes_;
  struct statfs system = {};
  if (fstatfs(directory_.get(), &system) == 0 &&
      rounded_bytes / block_bytes_ > static_cast<size_t>(system.f_bavail)) {
    return ShortOf(Shortage::kMemory, "",
                   absl::StrCat(name, ": ", rounded_bytes, " bytes wanted; the file system has ",
                                static_cast<size_t>(system.f_bavail) * block_bytes_),
                   kRetryMemory);
  }
  if (is_hugetlb_) {
    const size_t left_bytes = ReadMemoryLimits().HugetlbAvailableBytes(block_bytes_);
    if (rounded_bytes > left_bytes) {
      return ShortOf(
          Shortage::kMemory, "",
          absl::StrCat(name, ": ", rounded_bytes, " bytes wanted; the control group leaves ",
                       left_bytes, " of huge pages, ", rounded_bytes - left_bytes, " bytes short"),
          kRetryMemory);
    }
  }
  FileDescriptor file(openat(directory_.get(), ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!file.valid() || ftruncate(file.get(), static_cast<off_t>(rounded_bytes)) != 0) {
    const bool descriptors = errno == EMFILE || errno == ENFILE;
    return ShortOf(descriptors ? Shortage::kDescriptors : Shortage::kMemory, "",
                   absl::StrCat(name, ": a file of ", rounded_bytes, " bytes: ", ErrorText(errno)),
                   kRetryMemory);
  }
  return file;
}

absl::Status FileKeeper::Keep(std::string_view name, int descriptor) {
  if (!IsKeeperName(name)) return InvalidArgument("name", Text(name));
  const std::string from = absl::StrCat("/proc/self/fd/", descriptor);
  PQC_CRASH_POINT();
  if (linkat(AT_FDCWD, from.c_str(), directory_.get(), std::string(name).c_str(),
             AT_SYMLINK_FOLLOW) == 0) {
    return absl::OkStatus();
  }
  const std::string error = absl::StrCat(Text(name), ": ", ErrorText(errno));
  switch (errno) {
    case EEXIST:
      return AlreadyExists("", error);
    case EXDEV:
    case EPERM:
    case ENOENT:
      return FailedPrecondition("", error);
    case ENOSPC:
    case EDQUOT:
      return ShortOf(Shortage::kMemory, "", error, kRetryMemory);
    default:
      return Unavailable("", error, kNoRetry);
  }
}

absl::Status FileKeeper::Release(std::string_view name) {
  if (!IsKeeperName(name)) return InvalidArgument("name", Text(name));
  PQC_CRASH_POINT();
  if (unlinkat(directory_.get(), std::string(name).c_str(), 0) == 0 || errno == ENOENT) {
    return absl::OkStatus();
  }
  return Unavailable("", absl::StrCat(Text(name), ": ", ErrorText(errno)), kNoRetry);
}

FileDescriptor FileKeeper::Take(std::string_view name) const {
  if (!IsKeeperName(name)) return {};
  FileDescriptor file(openat(directory_.get(), std::string(name).c_str(),
                             O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file.valid() || !IsOurFile(file.get())) return {};
  return file;
}

std::vector<std::string> FileKeeper::Names() const {
  std::vector<std::string> names = NamesIn(directory_.get());
  std::erase_if(names, [](const std::string& name) { return !IsKeeperName(name); });
  return names;
}

absl::StatusOr<std::string> FileKeeper::SetAside() {
  const std::vector<std::string> names = Names();
  if (names.empty()) return std::string();
  std::string folder;
  for (int number = 1; folder.empty(); ++number) {
    folder = absl::StrCat(SetAsideFolder::kPrefix, number);
    if (mkdirat(directory_.get(), folder.c_str(), 0700) == 0) break;
    if (errno != EEXIST) {
      return Unavailable("", absl::StrCat(folder, ": ", ErrorText(errno)), kNoRetry);
    }
    folder.clear();
  }
  const FileDescriptor opened = OpenFolder(directory_.get(), folder.c_str());
  if (absl::Status status = MoveAll(directory_.get(), opened.get(), names); !status.ok()) {
    unlinkat(directory_.get(), folder.c_str(), AT_REMOVEDIR);
    return status;
  }
  return absl::StrCat(path_, "/", folder);
}

std::vector<SetAsideFolder> FileKeeper::SetAsideFolders() const {
  return SetAsideFolder::In(directory_);
}

}  // namespace pqcached::kvstore
