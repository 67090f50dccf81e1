// Reads an exported sequence (read/image/folder.h) into the memory of a cache.
//
// Bytes go from the files to extents by readv, and are verified there. Nothing refers to the
// extents before all of them are; they are free again after an error. Index data that searches do
// not check are made again of the rows and codebooks, because a checksum proves no more than that
// the file is as it was written.
#ifndef PQCACHED_KVSTORE_IMAGE_IMPORT_H_
#define PQCACHED_KVSTORE_IMAGE_IMPORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/read/image/folder.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/prefix.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// Returns a Refusal of the folder's readers as a status.
absl::Status ImageStatus(const Refusal& refusal);

// Checks that the manifest and the first image belong to the cache's tenant, model, layers and
// indexes. Errors: kFailedPrecondition naming model_fingerprint, tenant, layer_groups or index;
// those of ImageFolder.
absl::Status CheckFolder(const Cache& cache, const ImageFolder& folder);

struct ReadImages {
  std::shared_ptr<const Snapshot> snapshot;
  uint32_t image_count = 0;
  uint64_t bytes = 0;
};

// Reads the images behind the first `shared_tokens`, where an image begins or the last one ends.
// `shared`: their snapshot, with the indexes of the manifest among its ready ones; null: none.
//
// Errors: those of SegmentImages::ImportSequence
absl::StatusOr<ReadImages> ReadImagesOf(const Cache& cache, const ImageFolder& folder,
                                        const std::vector<PrefixKey>& chain, uint32_t shared_tokens,
                                        std::shared_ptr<const Snapshot> shared,
                                        const std::function<bool()>& keep_going);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_IMAGE_IMPORT_H_
