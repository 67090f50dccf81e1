// ImageFolder: an exported sequence, which is a folder with a manifest and the segment images that
// it lists (format.h).
//
// Thread-compatible.
#ifndef PQCACHED_KVSTORE_READ_IMAGE_FOLDER_H_
#define PQCACHED_KVSTORE_READ_IMAGE_FOLDER_H_

#include <cstdint>
#include <string>

#include "kernels/base/exec.h"
#include "kvstore/read/image/parse.h"
#include "kvstore/read/image/reader.h"

namespace pqcached::kvstore {

class ImageFolder {
 public:
  ImageFolder() = default;
  ImageFolder(ImageFolder&& other) noexcept;
  ImageFolder& operator=(ImageFolder&&) = delete;
  ~ImageFolder();

  // Opens a folder of `parent` (AT_FDCWD: a path) and reads its manifest. No symbolic link is
  // followed at the end of the path.
  //
  // Errors: kNotFound  the folder, or its manifest; and those of ParseManifest behind "manifest"
  static Refusal Open(const kernels::Exec& exec, int parent, const char* name, ImageFolder* folder);

  const ParsedManifest& manifest() const { return manifest_; }
  uint32_t image_count() const { return manifest_.header.image_count; }

  // Opens an image, and checks that it is the one that the manifest lists.
  //
  // Errors: those of SegmentImageReader, behind the image's name; kDataLoss  the image belongs to
  // another export (names the field that differs)
  Refusal OpenImage(uint32_t number, SegmentImageReader* reader) const;

 private:
  kernels::Exec exec_;
  int descriptor_ = -1;
  ParsedManifest manifest_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_IMAGE_FOLDER_H_
