// Verifies bytes that an earlier process wrote, once, before they are first read or leased.
//
// Recovery sets the checksums that the bytes are compared with (checksum_record.h); bytes without
// one count as verified. Bytes that differ yield kDataLoss from then on, and are counted.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_CHECKSUM_VERIFY_H_
#define PQCACHED_KVSTORE_CHECKSUM_VERIFY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// Sets the checksums that `rows`, stored in record `number`, are compared with. For recovery.
// Returns false when the checksum record itself is damaged.
bool LoadRowChecksums(const Cache& cache, uint32_t number, const SegmentRows& rows);
// Does the same for one layer of an index.
bool LoadLayerChecksums(const Cache& cache, uint32_t number, uint64_t segment_id,
                        uint32_t layer_slot, const SegmentIndex::Layer& layer);

// Verifies bytes that were not verified yet. Errors: kDataLoss.
absl::Status VerifyRows(const Cache& cache, const SegmentRows& rows, uint32_t layer_slot);
absl::Status VerifyIndex(const Cache& cache, const SegmentRows& rows, const SegmentIndex& index,
                         uint32_t layer_slot);
// Verifies all segments and indexes of a list.
absl::Status VerifyList(const Cache& cache, const SegmentList& list);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_CHECKSUM_VERIFY_H_
