#include "kvstore/image/image_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/memory/directory.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

constexpr char kDirectoryField[] = "image_directory";
constexpr char kPartialPrefix[] = ".partial-";

absl::Status CheckImageFolderName(absl::string_view name) {
  const bool plain = std::all_of(name.begin(), name.end(), [](char each) {
    return (each >= 'a' && each <= 'z') || (each >= 'A' && each <= 'Z') ||
           (each >= '0' && each <= '9') || each == '_' || each == '.' || each == '-';
  });
  if (plain && !name.empty() && name.size() <= kMaxImageNameBytes && name.front() != '.') {
    return absl::OkStatus();
  }
  return InvalidArgument("name",
                         absl::StrCat("must be 1..", kMaxImageNameBytes,
                                      " bytes of [A-Za-z0-9_.-], and not begin with \".\""));
}

// Removes a folder with its files. `folder`: it, or none.
void RemoveFolder(int directory, const std::string& name, const FileDescriptor& folder) {
  if (folder.valid()) {
    for (const std::string& file : NamesIn(folder.get())) unlinkat(folder.get(), file.c_str(), 0);
  }
  unlinkat(directory, name.c_str(), AT_REMOVEDIR);
}

// Locks the folder of a running export for as long as the descriptor is open. Returns false when
// another descriptor has locked it. File systems without locks lock nothing.
bool LockFolder(const FileDescriptor& folder) {
  return flock(folder.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

// Returns whether the name is that of the open folder.
bool IsFolderAt(int directory, const std::string& name, const FileDescriptor& folder) {
  struct stat named {
  }, opened{};
  return fstatat(directory, name.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 &&
         fstat(folder.get(), &opened) == 0 && named.st_dev == opened.st_dev &&
         named.st_ino == opened.st_ino;
}

// Renames a folder, unless the new name is taken. Returns 0, or an errno.
int RenameFolder(int directory, const char* from, const char* to) {
  if (renameat2(directory, from, directory, to, RENAME_NOREPLACE) == 0) return 0;
  if (errno != EINVAL) return errno;
  // The file system has no such call. A plain one replaces nothing but an empty folder.
  return renameat(directory, from, directory, to) == 0 ? 0 : errno;
}

absl::StatusOr<FileDescriptor> OpenDirectoryOf(const std::string& path) {
  if (path.empty()) {
    return FailedPrecondition(kDirectoryField, "is not set in the sidecar's configuration");
  }
  FileDescriptor directory(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.valid()) return directory;
  return FailedPrecondition(kDirectoryField, absl::StrCat(path, ": ", std::strerror(errno)));
}

absl::Status TakenName(absl::string_view name) {
  return AlreadyExists("name", absl::StrCat(name, " is there already"));
}

}  // namespace

absl::StatusOr<FileDescriptor> OpenImageDirectory(const ImagePlace& place) {
  RETURN_IF_ERROR(CheckImageFolderName(place.name));
  return OpenDirectoryOf(place.directory);
}

absl::Status ImageFileError(absl::string_view file, int error) {
  const std::string text = absl::StrCat(file, ": ", std::strerror(error));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    return ResourceExhausted(kDirectoryField, text, kNoRetry);
  }
  return Unavailable(kDirectoryField, text, kNoRetry);
}

int WriteAllAt(int descriptor, uint64_t offset,
               std::span<const std::span<const std::byte>> pieces) {
  std::vector<iovec> parts;
  parts.reserve(pieces.size());
  for (const std::span<const std::byte> piece : pieces) {
    parts.push_back({.iov_base = const_cast<std::byte*>(piece.data()), .iov_len = piece.size()});
  }
  std::span<iovec> left = parts;
  while (!left.empty()) {
    const auto count = static_cast<int>(std::min<size_t>(left.size(), IOV_MAX));
    const ssize_t done = pwritev(descriptor, left.data(), count, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return done < 0 ? errno : EIO;
    offset += static_cast<uint64_t>(done);
    auto bytes = static_cast<size_t>(done);
    while (!left.empty() && bytes >= left.front().iov_len) {
      bytes -= left.front().iov_len;
      left = left.subspan(1);
    }
    if (left.empty()) break;
    left.front().iov_base = static_cast<std::byte*>(left.front().iov_base) + bytes;
    left.front().iov_len -= bytes;
  }
  return 0;
}

absl::StatusOr<NewImageFolder> NewImageFolder::Create(const ImagePlace& place) {
  ASSIGN_OR_RETURN(FileDescriptor directory, OpenImageDirectory(place));
  struct stat found {};
  if (fstatat(directory.get(), place.name.c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0) {
    return TakenName(place.name);
  }
  static std::atomic<uint64_t> exports = 0;  // of this process: their hidden names differ
  while (true) {
    // Sidecars in other containers may have the same process id, and take the same name.
    std::string partial = absl::StrCat(kPartialPrefix, getpid(), "-", ++exports, "-", place.name);
    if (mkdirat(directory.get(), partial.c_str(), 0700) != 0) {
      if (errno == EEXIST) continue;
      return ImageFileError(place.name, errno);
    }
    FileDescriptor folder = OpenFolder(directory.get(), partial.c_str());
    if (!folder.valid()) {
      const int error = errno;
      if (error == ENOENT) continue;  // RemovePartialImages of another sidecar was faster
      RemoveFolder(directory.get(), partial, folder);
      return ImageFileError(place.name, error);
    }
    if (!LockFolder(folder) || !IsFolderAt(directory.get(), partial, folder)) continue;
    return NewImageFolder(std::move(directory), place.name, std::move(partial), std::move(folder));
  }
}

NewImageFolder::~NewImageFolder() {
  if (directory_.valid() && !partial_name_.empty()) {
    RemoveFolder(directory_.get(), partial_name_, folder_);
  }
}

absl::StatusOr<FileDescriptor> NewImageFolder::CreateFile(const char* name) const {
  FileDescriptor file(
      openat(folder_.get(), name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file.valid()) return ImageFileError(name, errno);
  return file;
}

absl::Status NewImageFolder::Publish() {
  if (fsync(folder_.get()) != 0) return ImageFileError(name_, errno);
  const int error = RenameFolder(directory_.get(), partial_name_.c_str(), name_.c_str());
  if (error == EEXIST || error == ENOTEMPTY || error == ENOTDIR) return TakenName(name_);
  if (error != 0) return ImageFileError(name_, error);
  partial_name_.clear();
  fsync(directory_.get());  // the folder is complete, with either of its names
  return absl::OkStatus();
}

absl::Status RemovePartialImages(const std::string& directory) {
  ASSIGN_OR_RETURN(const FileDescriptor opened, OpenDirectoryOf(directory));
  for (const std::string& name : NamesIn(opened.get())) {
    if (!absl::StartsWith(name, kPartialPrefix)) continue;
    const FileDescriptor folder = OpenFolder(opened.get(), name.c_str());
    if (folder.valid() && !LockFolder(folder)) continue;  // another sidecar is writing it
    RemoveFolder(opened.get(), name, folder);
  }
  return absl::OkStatus();
}

}  // namespace pqcached::kvstore
