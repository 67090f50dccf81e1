// From a snapshot to what a client on this host is told of it (read/attachment.h).
//
// Pure; thread-safe.
#ifndef PQCACHED_KVSTORE_ATTACH_H_
#define PQCACHED_KVSTORE_ATTACH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvstore/cache.h"
#include "kvstore/read/attachment.h"
#include "kvstore/sequence.h"

namespace pqcached::kvstore {

// Everything that the attachment names belongs to `list` and stays in place while it is held.
Attachment MakeAttachment(const Cache& cache, uint64_t sequence_id, uint64_t version,
                          const SegmentList& list, const std::vector<uint32_t>& layer_tokens);

// Bytes of the extents that these lists hold, each counted once.
size_t HeldBytes(std::span<const std::shared_ptr<const SegmentList>> lists);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_ATTACH_H_
