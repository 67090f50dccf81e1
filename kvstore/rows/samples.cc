#include "kvstore/rows/samples.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/rows/ingest.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

absl::StatusOr<std::vector<uint32_t>> CheckPositions(const std::vector<uint64_t>& positions) {
  std::vector<uint32_t> checked;
  for (size_t i = 0; i < positions.size(); ++i) {
    const auto field = [i] { return absl::StrCat("positions[", i, "]"); };
    if (positions[i] >= kMaxSequenceTokens) {
      return InvalidArgument(field(),
                             absl::StrCat(positions[i], ", must be below ", kMaxSequenceTokens));
    }
    if (i > 0 && positions[i] <= positions[i - 1]) {
      return InvalidArgument(field(), absl::StrCat(positions[i], ", must be above the one before, ",
                                                   positions[i - 1]));
    }
    checked.push_back(static_cast<uint32_t>(positions[i]));
  }
  return checked;
}

}  // namespace

absl::StatusOr<uint32_t> CheckSampledLayer(const Cache& cache, uint32_t layer) {
  ASSIGN_OR_RETURN(const uint32_t layer_slot, cache.LayerSlot(layer));
  if (cache.layers.layers[layer_slot].shape.has_index()) return layer_slot;
  return InvalidArgument("layer", absl::StrCat(layer, ", must be a layer that indexes have"));
}

absl::StatusOr<std::shared_ptr<const QuerySamples>> CopySamples(const Cache& cache,
                                                                uint32_t layer_slot,
                                                                const LayerSamples& samples) {
  const LayerShape& shape = cache.layers.layers[layer_slot].shape;
  ASSIGN_OR_RETURN(const CheckedTensor queries,
                   CheckTensor(samples.queries, shape.query_heads, shape.key_dim, "queries"));
  if (queries.shape[0] != samples.positions.size()) {
    return InvalidArgument("queries.shape",
                           absl::StrCat("queries of ", queries.shape[0], " tokens; there are ",
                                        samples.positions.size(), " positions"));
  }
  ASSIGN_OR_RETURN(const std::vector<uint32_t> positions, CheckPositions(samples.positions));
  const std::vector<size_t> kept = KeptSamples(positions, kMaxSamplePositions);
  const size_t query_bytes = QuerySamples::PositionBytes(shape) / shape.query_heads;
  const std::vector<size_t> sizes_bytes = {kept.size() * QuerySamples::PositionBytes(shape)};
  ASSIGN_OR_RETURN(auto extents, cache.pool->Allocate(sizes_bytes));
  std::vector<uint32_t> kept_positions;
  std::byte* to = extents.front().data();
  for (const size_t i : kept) {
    PQC_CRASH_POINT();
    for (uint32_t head = 0; head < shape.query_heads; ++head) {
      const kernels::IngestResult result =
          kernels::IngestRows(cache.compute.exec, {.token_count = 1,
                                                   .key_dim = shape.key_dim,
                                                   .value_dim = 0,
                                                   .key = queries.Head(i, head),
                                                   .value = {},
                                                   .row_dtype = shape.dtype,
                                                   .row_stride_bytes = query_bytes,
                                                   .rows = {to, query_bytes},
                                                   .with_crc = false});
      if (!result.ok()) {
        return InvalidArgument(
            "queries",
            absl::StrCat("layer ", samples.layer, ": position ", positions[i], ", query head ",
                         head, " has NaN or infinity as ", kernels::DTypeName(shape.dtype)));
      }
      to += query_bytes;
    }
    kept_positions.push_back(positions[i]);
  }
  return std::make_shared<const QuerySamples>(std::move(extents.front()),
                                              std::move(kept_positions));
}

absl::Status CheckStored(const SegmentWriter& writer) {
  for (uint32_t slot = 0; slot < writer.cache().layers.size(); ++slot) {
    const auto samples = writer.samples(slot);
    if (samples == nullptr || samples->positions().back() < writer.layer_tokens(slot)) continue;
    return InvalidArgument(
        "query_samples.positions",
        absl::StrCat(samples->positions().back(), ", must be below the ", writer.layer_tokens(slot),
                     " tokens that layer ", writer.cache().layers.layers[slot].layer, " has"));
  }
  return absl::OkStatus();
}

}  // namespace pqcached::kvstore
