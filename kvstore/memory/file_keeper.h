// FileKeeper: memory that outlives its process as files in a directory on tmpfs or hugetlbfs, such
// as a volume of a container.
//
// Only memory from CreateMemory of the same keeper can be kept: Keep gives its file a name,
// atomically. One process at a time uses a directory; its lock is released when the process ends.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_MEMORY_FILE_KEEPER_H_
#define PQCACHED_KVSTORE_MEMORY_FILE_KEEPER_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/memory/keeper.h"

namespace pqcached::kvstore {

class FileKeeper final : public DescriptorKeeper {
 public:
  // Errors: kNotFound            no such directory
  //         kFailedPrecondition  others may write to it, or it belongs to another user
  //         kAlreadyExists       another process uses it
  static absl::StatusOr<std::unique_ptr<FileKeeper>> Open(const std::string& directory);

  // Additional errors: kResourceExhausted when the file system has less space, or when on hugetlbfs
  // a control group leaves fewer of its pages. The bytes are not reserved: GrantedMemory allocates
  // them, and is refused when other users of the file system have taken them.
  absl::StatusOr<FileDescriptor> CreateMemory(const char* name, size_t size_bytes) override;
  // Additional errors: kFailedPrecondition when the descriptor is no file of this directory.
  absl::Status Keep(std::string_view name, int descriptor) override;
  absl::Status Release(std::string_view name) override;
  FileDescriptor Take(std::string_view name) const override;
  std::vector<std::string> Names() const override;

  // Moves all named files into a new folder of the directory, "set-aside@" and a number. They stay
  // there, and keep their memory, until an operator removes them. Returns the folder's path; empty
  // when there is no file. After an error no file has moved.
  //
  // Errors: kUnavailable
  absl::StatusOr<std::string> SetAside();
  std::vector<SetAsideFolder> SetAsideFolders() const override;

 private:
  FileKeeper(std::string path, FileDescriptor directory, size_t block_bytes, bool is_hugetlb)
      : path_(std::move(path)),
        directory_(std::move(directory)),
        block_bytes_(block_bytes),
        is_hugetlb_(is_hugetlb) {}

  const std::string path_;
  const FileDescriptor directory_;
  const size_t block_bytes_;  // file sizes are multiples of it
  const bool is_hugetlb_;     // on hugetlbfs, where a block is a page
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_FILE_KEEPER_H_
