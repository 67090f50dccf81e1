// SetAsideFolder: files of a FileKeeper that could not be recovered. They stay, and keep their
// memory, until an operator removes them.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_MEMORY_SET_ASIDE_H_
#define PQCACHED_KVSTORE_MEMORY_SET_ASIDE_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/memory/memfd.h"

namespace pqcached::kvstore {

class SetAsideFolder {
 public:
  // Begin of the folders' names; '@' is in no keeper's name.
  static constexpr char kPrefix[] = "set-aside@";

  // Returns the folders of this kind in a directory, in the order of their names.
  static std::vector<SetAsideFolder> In(const FileDescriptor& directory);

  const std::string& name() const { return name_; }
  // Returns the names of the files, sorted.
  std::vector<std::string> Names() const;
  // Returns a read-only descriptor of a file; invalid when there is none.
  FileDescriptor Open(const std::string& file) const;
  // Returns the bytes of memory behind a file; 0 when there is none.
  size_t BytesOf(const std::string& file) const;
  size_t bytes() const;  // of all files

  // Removes a file, and with the last file the folder. Errors: kUnavailable
  absl::Status Remove(const std::string& file) const;

 private:
  SetAsideFolder(int directory, std::string name, FileDescriptor folder)
      : directory_(directory), name_(std::move(name)), folder_(std::move(folder)) {}

  int directory_;  // the keeper's
  std::string name_;
  FileDescriptor folder_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_SET_ASIDE_H_
