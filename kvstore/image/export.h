// Writes a snapshot of a sequence as segment images and a manifest (read/image/format.h).
//
// Bytes go from the pool to the files by writev; each MiB is summed just before it is written, so
// that it is in the processor's cache. Segments that a writer may still change have no index data
// in their image.
#ifndef PQCACHED_KVSTORE_IMAGE_EXPORT_H_
#define PQCACHED_KVSTORE_IMAGE_EXPORT_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kvstore/segment_images.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/prefix.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

struct ExportSource {
  const Cache& cache;
  // All entries are closed, as Sequence::Share returns them.
  std::shared_ptr<const Snapshot> snapshot;
  NameWords names;
  PrefixKey root = {};
  bool has_active_segment = false;  // the last entry is the sequence's active segment
};

// Errors: those of SegmentImages::ExportSequence.
absl::StatusOr<ExportedSequence> WriteImages(const ExportSource& source, const ImagePlace& place);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_IMAGE_EXPORT_H_
