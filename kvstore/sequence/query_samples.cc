#include "kvstore/sequence/query_samples.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kvstore/memory/durable_store.h"

namespace pqcached::kvstore {
namespace {

// Queries of one position, in whichever samples they are.
struct SampledPosition {
  uint32_t position = 0;
  const std::byte* queries = nullptr;
};

std::vector<SampledPosition> UnionOf(const QuerySamples& older, const QuerySamples& newer,
                                     size_t position_bytes) {
  std::vector<SampledPosition> all;
  const auto at = [position_bytes](const QuerySamples& from, size_t i) {
    return SampledPosition{from.positions()[i], from.data() + i * position_bytes};
  };
  size_t next = 0;
  const size_t old_count = older.positions().size();
  for (size_t i = 0; i < newer.positions().size(); ++i) {
    const uint32_t position = newer.positions()[i];
    while (next < old_count && older.positions()[next] < position) {
      all.push_back(at(older, next++));
    }
    if (next < old_count && older.positions()[next] == position) ++next;
    all.push_back(at(newer, i));
  }
  while (next < old_count) all.push_back(at(older, next++));
  return all;
}

}  // namespace

std::vector<size_t> KeptSamples(std::span<const uint32_t> positions, size_t most) {
  std::vector<size_t> kept(positions.size());
  std::iota(kept.begin(), kept.end(), size_t{0});
  if (positions.size() <= most) return kept;
  const size_t window = positions.size() - kSampleWindow;
  for (uint64_t gap = 2; kept.size() > most; gap *= 2) {
    kept.clear();
    uint64_t next = 0;
    for (size_t i = 0; i < positions.size(); ++i) {
      if (i < window && positions[i] < next) continue;
      kept.push_back(i);
      next = positions[i] + gap;
    }
  }
  return kept;
}

size_t QuerySamples::PositionBytes(const LayerShape& shape) {
  return size_t{shape.query_heads} * shape.key_dim * kernels::DTypeBytes(shape.dtype);
}

absl::StatusOr<std::shared_ptr<const QuerySamples>> QuerySamples::Merge(Pool& pool,
                                                                        const LayerShape& shape,
                                                                        const QuerySamples& older,
                                                                        const QuerySamples& newer) {
  const size_t position_bytes = PositionBytes(shape);
  const std::vector<SampledPosition> all = UnionOf(older, newer, position_bytes);
  std::vector<uint32_t> positions;
  positions.reserve(all.size());
  for (const SampledPosition& each : all) positions.push_back(each.position);
  const std::vector<size_t> kept = KeptSamples(positions, kMaxSamplePositions);
  const std::vector<size_t> sizes_bytes = {kept.size() * position_bytes};
  ASSIGN_OR_RETURN(auto extents, pool.Allocate(sizes_bytes));
  std::vector<uint32_t> kept_positions;
  for (const size_t i : kept) {
    PQC_CRASH_POINT();
    std::memcpy(extents.front().data() + kept_positions.size() * position_bytes, all[i].queries,
                position_bytes);
    kept_positions.push_back(all[i].position);
  }
  return std::make_shared<const QuerySamples>(std::move(extents.front()),
                                              std::move(kept_positions));
}

std::shared_ptr<const QuerySamples> QuerySamples::Below(std::shared_ptr<const QuerySamples> samples,
                                                        uint32_t token_count) {
  if (samples == nullptr || samples->positions_.back() < token_count) return samples;
  const auto begin = samples->positions_.begin();
  const auto end = std::lower_bound(begin, samples->positions_.end(), token_count);
  if (begin == end) return nullptr;
  return std::shared_ptr<const QuerySamples>(
      new QuerySamples(samples->extent_, std::vector<uint32_t>(begin, end)));
}

SampledQueries QuerySamples::OfHead(const LayerShape& shape, uint32_t kv_head) const {
  const size_t query_bytes = shape.key_dim * kernels::DTypeBytes(shape.dtype);
  return {.rows = data() + size_t{kv_head} * shape.group_size() * query_bytes,
          .row_stride = PositionBytes(shape),
          .position_count = static_cast<uint32_t>(positions_.size()),
          .queries_per_position = shape.group_size()};
}

}  // namespace pqcached::kvstore
