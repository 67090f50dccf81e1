// Query samples of an ingest: checks, and the copy into the pool.
#ifndef PQCACHED_KVSTORE_ROWS_SAMPLES_H_
#define PQCACHED_KVSTORE_ROWS_SAMPLES_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/rows/writer.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/query_samples.h"

namespace pqcached::kvstore {

// Returns the layer slot of a layer whose queries may be sampled. Errors: kInvalidArgument (layer).
absl::StatusOr<uint32_t> CheckSampledLayer(const Cache& cache, uint32_t layer);

// Copies at most kMaxSamplePositions of the samples, converted to the cache's dtype. Errors:
// kInvalidArgument naming positions or queries; kResourceExhausted.
absl::StatusOr<std::shared_ptr<const QuerySamples>> CopySamples(const Cache& cache,
                                                                uint32_t layer_slot,
                                                                const LayerSamples& samples);

// Checks that the tokens of all samples are stored, or written. Errors: kInvalidArgument
// (query_samples.positions).
absl::Status CheckStored(const SegmentWriter& writer);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_ROWS_SAMPLES_H_
