// SegmentImages: the store's calls that write a sequence to files, and read it back.
//
// A sequence that was exported is a folder of segment images with a manifest
// (read/image/format.h). Rows, codebooks and index data go from the pool to the files, and back,
// without a copy in memory. Indexes that are not ready in all segments, and those of plug-ins, are
// left out; so are query samples. Codes of segments that are still written are made again when the
// folder is imported.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_SEGMENT_IMAGES_H_
#define PQCACHED_KVSTORE_SEGMENT_IMAGES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace pqcached::kvstore {

inline constexpr size_t kMaxImageNameBytes = 64;

// A folder of the directory for images.
struct ImagePlace {
  std::string directory;  // an absolute path; empty: exports and imports are refused
  std::string name;       // 1..64 bytes of [A-Za-z0-9_.-], not beginning with "."
  // Called between parts of the work, by several threads; false ends the call (kCancelled).
  std::function<bool()> keep_going = {};
};

struct ExportedSequence {
  uint64_t token_count = 0;
  uint32_t image_count = 0;
  uint64_t bytes = 0;  // of all files
};

struct ImportedSequence {
  uint64_t sequence_id = 0;
  uint64_t token_count = 0;
  uint64_t shared_tokens = 0;  // whose memory was there already
  uint32_t image_count = 0;    // images that were read
  uint64_t bytes = 0;          // of these images
};

class SegmentImages {
 public:
  virtual ~SegmentImages() = default;

  // Writes the tokens that the sequence has now to a new folder, which appears when it is complete.
  // After an error no file remains. `tenant` may be kAllTenants.
  //
  // Errors: kInvalidArgument     name
  //         kFailedPrecondition  image_directory: there is none; token_count: the sequence is empty
  //         kAlreadyExists       name
  //         kResourceExhausted   image_directory: the file system is full (names the image)
  //         kUnavailable         image_directory: a file cannot be written
  //         kDataLoss            a segment fails its checksum
  //         kCancelled           keep_going
  virtual absl::StatusOr<ExportedSequence> ExportSequence(std::string_view tenant,
                                                          uint64_t sequence_id,
                                                          const ImagePlace& place) = 0;

  // Reads a folder into a cache, as a cached prefix: a sequence without a session, which later
  // sequences share by its tokens' names, or fork by its id. It begins with the longest stored
  // prefix that ends with an image and has the same indexes. Nothing is visible before everything
  // is read and verified. `tenant` may be kAllTenants.
  //
  // Errors: kInvalidArgument     name; a field of the manifest or of an image, with its limit
  //         kNotFound            cache_id, name, manifest, or an image
  //         kFailedPrecondition  image_directory; model_fingerprint, tenant, layer_groups or
  //                              index: the image belongs to another one than the cache has
  //         kUnimplemented       version, layout_version
  //         kDataLoss            a file is cut off, fails a checksum, or is of another export
  //         kResourceExhausted   the pool, with the shortfall in bytes; max_sequences
  //         kCancelled           keep_going
  virtual absl::StatusOr<ImportedSequence> ImportSequence(std::string_view tenant,
                                                          uint64_t cache_id,
                                                          const ImagePlace& place) = 0;
};

// Removes what exports of an earlier process have left incomplete. Errors: kFailedPrecondition
// image_directory: it cannot be opened
absl::Status RemovePartialImages(const std::string& directory);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEGMENT_IMAGES_H_
