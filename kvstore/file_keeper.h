// FileKeeper: memory that outlives its process as files of a directory on tmpfs or hugetlbfs, such as a
// volume of a container.
//
// Kept is what was made by CreateMemory of the same keeper: a file gets its name by Keep, in one step.
// One process at a time uses a directory; the lock ends with it.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_FILE_KEEPER_H_
#define PQCACHED_KVSTORE_FILE_KEEPER_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/keeper.h"

namespace pqcached::kvstore {

class FileKeeper final : public DescriptorKeeper {
 public:
  // Errors: kNotFound            no such directory
  //         kFailedPrecondition  others may write to it, or it belongs to another user
  //         kAlreadyExists       another process uses it
  static absl::StatusOr<std::unique_ptr<FileKeeper>> Open(const std::string& directory);

  // Errors besides: kResourceExhausted when the file system has less left, or on hugetlbfs a control group
  // leaves less of its pages, which would end the process when they are touched. (Bytes that others take of it
  // afterwards are missed when pages are touched: give the directory a file system of its own.)
  absl::StatusOr<FileDescriptor> CreateMemory(const char* name, size_t size_bytes) override;
  // Errors besides: kFailedPrecondition for what is no file of this directory.
  absl::Status Keep(std::string_view name, int descriptor) override;
  absl::Status Release(std::string_view name) override;
  FileDescriptor Take(std::string_view name) const override;
  std::vector<std::string> Names() const override;

 private:
  FileKeeper(FileDescriptor directory, size_t block_bytes, bool is_hugetlb)
      : directory_(std::move(directory)), block_bytes_(block_bytes), is_hugetlb_(is_hugetlb) {}

  const FileDescriptor directory_;
  const size_t block_bytes_;  // that file sizes are multiples of
  const bool is_hugetlb_;     // hugetlbfs: a block is a page
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_FILE_KEEPER_H_
