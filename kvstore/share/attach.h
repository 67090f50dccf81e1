// Converts a snapshot into the attachment that a client on the same host receives
// (read/attachment.h).
//
// Pure; thread-safe.
#ifndef PQCACHED_KVSTORE_SHARE_ATTACH_H_
#define PQCACHED_KVSTORE_SHARE_ATTACH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvstore/read/attachment.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// Returns the attachment of `list`. Everything that it names belongs to `list` and stays in place
// as long as the caller holds `list`.
Attachment MakeAttachment(const Cache& cache, uint64_t sequence_id, uint64_t version,
                          const SegmentList& list, const std::vector<uint32_t>& layer_tokens);

// Returns the bytes of all extents that these lists hold; each extent counts once.
size_t HeldBytes(std::span<const std::shared_ptr<const SegmentList>> lists);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SHARE_ATTACH_H_
