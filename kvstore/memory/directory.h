// Listing of directories by descriptor, which a rename of the directory does not mislead.
#ifndef PQCACHED_KVSTORE_MEMORY_DIRECTORY_H_
#define PQCACHED_KVSTORE_MEMORY_DIRECTORY_H_

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvstore/memory/memfd.h"

namespace pqcached::kvstore {

// Opens a folder of `parent`; invalid when that fails.
inline FileDescriptor OpenFolder(int parent, const char* name) {
  return FileDescriptor(openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

// Returns the names in a directory, sorted, without "." and ".."; none when it cannot be read.
inline std::vector<std::string> NamesIn(int directory) {
  struct Close {
    void operator()(DIR* listing) const { closedir(listing); }
  };
  std::vector<std::string> names;
  const int opened = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (opened < 0) return names;
  const std::unique_ptr<DIR, Close> listing(fdopendir(opened));
  if (listing == nullptr) {
    close(opened);
    return names;
  }
  while (const dirent* entry = readdir(listing.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_DIRECTORY_H_
