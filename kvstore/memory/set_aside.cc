#include "kvstore/memory/set_aside.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvstore/memory/directory.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {

std::vector<SetAsideFolder> SetAsideFolder::In(const FileDescriptor& directory) {
  std::vector<SetAsideFolder> folders;
  for (std::string& name : NamesIn(directory.get())) {
    if (!name.starts_with(kPrefix)) continue;
    FileDescriptor folder = OpenFolder(directory.get(), name.c_str());
    if (folder.valid()) {
      folders.push_back(SetAsideFolder(directory.get(), std::move(name), std::move(folder)));
    }
  }
  return folders;
}

std::vector<std::string> SetAsideFolder::Names() const {
  std::vector<std::string> names = NamesIn(folder_.get());
  std::erase_if(names, [this](const std::string& name) {
    struct stat info = {};
    return fstatat(folder_.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 ||
           !S_ISREG(info.st_mode);
  });
  return names;
}

FileDescriptor SetAsideFolder::Open(const std::string& file) const {
  return FileDescriptor(
      openat(folder_.get(), file.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
}

size_t SetAsideFolder::BytesOf(const std::string& file) const {
  struct stat info = {};
  const bool found = fstatat(folder_.get(), file.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0;
  return found && S_ISREG(info.st_mode) ? static_cast<size_t>(info.st_blocks) * 512 : 0;
}

size_t SetAsideFolder::bytes() const {
  size_t bytes = 0;
  for (const std::string& name : Names()) bytes += BytesOf(name);
  return bytes;
}

absl::Status SetAsideFolder::Remove(const std::string& file) const {
  if (unlinkat(folder_.get(), file.c_str(), 0) != 0) {
    return Unavailable("", absl::StrCat(name_, "/", file, ": ", std::strerror(errno)), kNoRetry);
  }
  if (NamesIn(folder_.get()).empty()) unlinkat(directory_, name_.c_str(), AT_REMOVEDIR);
  return absl::OkStatus();
}

}  // namespace pqcached::kvstore
