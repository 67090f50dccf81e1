// Compares an index with brute force over the bytes that a client maps.
#ifndef PQCACHED_TESTS_FAULT_CRASH_INDEX_CHECK_H_
#define PQCACHED_TESTS_FAULT_CRASH_INDEX_CHECK_H_

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "kvstore/read/attachment.h"
#include "tests/kvstore/brute_force.h"

namespace pqcached::kvstore::testing {

// Checks the codes of one layer: every row has the codes of its nearest centroids, in a layer that is ready. Fills
// `decoded` with the keys as the codes represent them. Returns "" or what is wrong.
std::string CheckCodes(const Attachment& attachment, std::span<const std::byte> pool,
                       uint32_t layer_slot, const IndexDescriptor& index, const LayerModel& model,
                       DecodedKeys* decoded);

// Compares TopK of one random query with a scan over the decoded keys. Returns "" or what is wrong.
std::string CheckTopK(Store& store, uint64_t sequence_id, const IndexDescriptor& index,
                      const LayerModel& model, const DecodedKeys& decoded, std::mt19937_64& random);

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_FAULT_CRASH_INDEX_CHECK_H_
