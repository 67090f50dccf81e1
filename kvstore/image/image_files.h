// NewImageFolder: the folder that an export writes. It has a hidden name until it is complete, and
// is removed when it is not. It is locked (flock) until then, so that another sidecar with the same
// directory does not remove it.
//
// No name leads out of the directory: names are checked, and no symbolic link is followed.
//
// Single-thread.
#ifndef PQCACHED_KVSTORE_IMAGE_IMAGE_FILES_H_
#define PQCACHED_KVSTORE_IMAGE_IMAGE_FILES_H_

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvstore/local_session.h"
#include "kvstore/segment_images.h"

namespace pqcached::kvstore {

// Opens the directory and checks the name. Errors: kFailedPrecondition (image_directory),
// kInvalidArgument (name)
absl::StatusOr<FileDescriptor> OpenImageDirectory(const ImagePlace& place);

// Returns kResourceExhausted when a file system is full, and kUnavailable otherwise, for `file` of
// the image_directory.
absl::Status ImageFileError(absl::string_view file, int error);

// Writes consecutive bytes, the pieces, from `offset` on; at most IOV_MAX pieces. Returns 0, or an
// errno.
int WriteAllAt(int descriptor, uint64_t offset, std::span<const std::span<const std::byte>> pieces);

class NewImageFolder {
 public:
  // Errors: those of OpenImageDirectory and ImageFileError; kAlreadyExists (name)
  static absl::StatusOr<NewImageFolder> Create(const ImagePlace& place);
  NewImageFolder(NewImageFolder&&) = default;
  NewImageFolder& operator=(NewImageFolder&&) = delete;
  ~NewImageFolder();

  // Creates a file for writing. Errors: those of ImageFileError
  absl::StatusOr<FileDescriptor> CreateFile(const char* name) const;
  // Gives the folder its name, when all files are on the disk. Errors: kAlreadyExists (name), those
  // of ImageFileError
  absl::Status Publish();

 private:
  NewImageFolder(FileDescriptor directory, std::string name, std::string partial_name,
                 FileDescriptor folder)
      : directory_(std::move(directory)),
        name_(std::move(name)),
        partial_name_(std::move(partial_name)),
        folder_(std::move(folder)) {}

  FileDescriptor directory_;
  std::string name_;
  std::string partial_name_;  // empty: published
  FileDescriptor folder_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_IMAGE_IMAGE_FILES_H_
