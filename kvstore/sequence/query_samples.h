// QuerySamples: queries of some tokens of one layer, for indexes that are trained on them.
//
// A sequence keeps those of the newest kSampleWindow sampled positions, and of earlier ones as many
// as fit, with equal gaps. They take memory of the pool, belong to the list of segments
// (sequence.h), and are shared with it. They are lost when the worker ends, and not retained.
//
// Immutable.
#ifndef PQCACHED_KVSTORE_SEQUENCE_QUERY_SAMPLES_H_
#define PQCACHED_KVSTORE_SEQUENCE_QUERY_SAMPLES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/memory/pool.h"
#include "kvstore/read/indexes/index_type.h"
#include "kvstore/read/layer_view.h"

namespace pqcached::kvstore {

inline constexpr uint32_t kSampleWindow = 64;
inline constexpr uint32_t kMaxSamplePositions = 1024;  // of one layer of a sequence

class QuerySamples {
 public:
  // Queries of one position, [query_heads, key_dim] in the layer's dtype.
  static size_t PositionBytes(const LayerShape& shape);

  // `positions` ascend; the extent has room for their queries.
  QuerySamples(Extent extent, std::vector<uint32_t> positions)
      : extent_(std::make_shared<const Extent>(std::move(extent))),
        positions_(std::move(positions)) {}

  // Returns the samples of both, of which `newer` has the queries of positions that both have, or
  // as many of them as are kept. Errors: kResourceExhausted.
  static absl::StatusOr<std::shared_ptr<const QuerySamples>> Merge(Pool& pool,
                                                                   const LayerShape& shape,
                                                                   const QuerySamples& older,
                                                                   const QuerySamples& newer);

  // Returns `samples` without those of positions from `token_count` on; null when none are left.
  static std::shared_ptr<const QuerySamples> Below(std::shared_ptr<const QuerySamples> samples,
                                                   uint32_t token_count);

  const std::vector<uint32_t>& positions() const { return positions_; }
  std::byte* data() const { return extent_->data(); }
  size_t used_bytes() const { return extent_->size_bytes(); }
  // Returns the memory, which samples of several lists may share.
  const std::shared_ptr<const Extent>& extent() const { return extent_; }
  // Returns the queries of the query heads of one kv head.
  SampledQueries OfHead(const LayerShape& shape, uint32_t kv_head) const;

 private:
  QuerySamples(std::shared_ptr<const Extent> extent, std::vector<uint32_t> positions)
      : extent_(std::move(extent)), positions_(std::move(positions)) {}

  std::shared_ptr<const Extent> extent_;
  std::vector<uint32_t> positions_;  // of its first queries
};

// Returns which of these ascending positions are kept, ascending: all, or the last kSampleWindow
// and earlier ones at least a power of two apart, at most `most` in total.
// REQUIRES: most > kSampleWindow.
std::vector<size_t> KeptSamples(std::span<const uint32_t> positions, size_t most);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_QUERY_SAMPLES_H_
