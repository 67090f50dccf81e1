// Records of checksums, and the bytes that they cover: rows of a closed segment, or the codes and
// the codebook of a ready layer. checksums.h writes the records, verify.h reads them.
#ifndef PQCACHED_KVSTORE_CHECKSUM_CHECKSUM_RECORD_H_
#define PQCACHED_KVSTORE_CHECKSUM_CHECKSUM_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/segment.h"

namespace pqcached::kvstore {

struct RowChecksumsRecord {  // followed by uint32_t per head: CRC32C of its first `slot_count` rows
  uint64_t segment_id = 0;
  uint32_t slot_count = 0;
  uint32_t reserved = 0;
};
struct LayerChecksumsRecord {  // CRC32C of the whole content
  uint64_t segment_id = 0;
  uint32_t data = 0;
  uint32_t codebook = 0;
};

// Returns the first `slot_count` rows of a head.
std::span<const std::byte> RowBytes(const Cache& cache, const SegmentRows& rows, uint32_t head,
                                    uint32_t slot_count);
// Returns the codes and counts of a layer.
std::span<const std::byte> DataBytes(const Cache& cache, const SegmentIndex::Layer& layer,
                                     uint32_t layer_slot);
// Returns the codebook of a layer.
std::span<const std::byte> CodebookBytes(const Cache& cache, const SegmentIndex::Layer& layer,
                                         uint32_t layer_slot);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_CHECKSUM_CHECKSUM_RECORD_H_
