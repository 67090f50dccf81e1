#include "tests/fault/crash/index_check.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/exec.h"
#include "kernels/select/pq.h"
#include "kernels/select/pq_select.h"

namespace pqcached::kvstore::testing {
namespace {

// Kernels round: a centroid at almost the same distance is as good.
constexpr double kTie = 1e-4;

struct CodedHead {
  const kernels::PqGeometry& geometry;
  const uint8_t* planes;
  size_t plane_stride;
  const float* centroids;  // [subspaces, 2^bits, dim]
};

double Distance(const float* a, const float* b, uint32_t dim) {
  double sum = 0;
  for (uint32_t i = 0; i < dim; ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return sum;
}

// Decodes one row into `decoded`; returns whether its codes are those of the nearest centroids.
bool DecodeRow(const CodedHead& head, uint32_t slot, const float* key, float* decoded) {
  const uint32_t dim = kernels::SubspaceDim(head.geometry);
  const uint32_t centroid_count = kernels::CentroidCount(head.geometry);
  bool nearest = true;
  for (uint32_t subspace = 0; subspace < head.geometry.subspace_count; ++subspace) {
    const float* centroids = head.centroids + size_t{subspace} * centroid_count * dim;
    const uint32_t code =
        kernels::GetCode(head.geometry, head.planes, head.plane_stride, subspace, slot);
    const float* chosen = centroids + size_t{code} * dim;
    const float* part = key + subspace * dim;
    const double distance = Distance(part, chosen, dim);
    for (uint32_t other = 0; other < centroid_count; ++other) {
      nearest = nearest && distance <= Distance(part, centroids + size_t{other} * dim, dim) + kTie;
    }
    std::copy_n(chosen, dim, decoded + subspace * dim);
  }
  return nearest;
}

// Returns whether the counts of cells of a segment, where it has any, are those of its codes.
bool CountsAreRight(const IndexDataHeader& header, uint32_t kv_head,
                    const kernels::PqGeometry& geometry) {
  const uint32_t counted_end = header.counted_end.load();
  if (counted_end == 0 || header.cell_count == 0) return true;
  std::vector<uint32_t> counts(header.cell_count);
  kernels::PqCountCells({kernels::Level::kReference}, {.geometry = geometry,
                                                       .planes = Planes(header, kv_head),
                                                       .plane_stride = header.plane_stride_bytes,
                                                       .slot_begin = header.counted_begin,
                                                       .slot_end = counted_end,
                                                       .cell_counts = counts});
  return std::equal(counts.begin(), counts.end(), CellCounts(header, kv_head));
}

}  // namespace

std::string CheckCodes(const Attachment& attachment, std::span<const std::byte> pool,
                       uint32_t layer_slot, const IndexDescriptor& index, const LayerModel& model,
                       DecodedKeys* decoded) {
  const LayerGroup& group = model.group;
  const auto indexes = std::span(attachment.header.indexes).first(attachment.header.index_count);
  const auto found = std::find(indexes.begin(), indexes.end(), index);
  if (found == indexes.end()) return "the sequence has lost an index";
  const auto index_slot = static_cast<size_t>(found - indexes.begin());
  *decoded = {model.tokens, group.kv_heads, group.key_dim, {}};
  decoded->data.resize(size_t{model.tokens} * group.kv_heads * group.key_dim);
  const kernels::PqGeometry geometry{
      .key_dim = group.key_dim, .subspace_count = index.subspace_count, .bits = index.bits};
  for (size_t i = 0; i < attachment.segments.size(); ++i) {
    const SegmentDescriptor& segment = attachment.segments[i];
    const LayerDescriptor& layer =
        attachment.layers[i * attachment.header.layer_count + layer_slot];
    const uint32_t end =
        segment.token_end == 0 ? model.tokens : std::min(segment.token_end, model.tokens);
    if (segment.first_position >= end) continue;
    if (layer.state[index_slot] != LayerState::kReady) return "a layer is not indexed";
    const auto& header = *reinterpret_cast<const IndexDataHeader*>(
        &pool[layer.index_data[index_slot].offset_bytes()]);
    const auto& codebook =
        *reinterpret_cast<const CodebookHeader*>(&pool[layer.codebook[index_slot].offset_bytes()]);
    if (header.magic != IndexDataHeader::kMagic || codebook.magic != CodebookHeader::kMagic) {
      return "an index has no header";
    }
    for (uint32_t kv_head = 0; kv_head < group.kv_heads; ++kv_head) {
      const CodedHead head{.geometry = geometry,
                           .planes = Planes(header, kv_head),
                           .plane_stride = header.plane_stride_bytes,
                           .centroids = Centroids(codebook, kv_head).data()};
      if (!CountsAreRight(header, kv_head, geometry)) {
        return absl::StrCat("segment ", i, " has not the counts of its codes");
      }
      for (uint32_t token = segment.first_position; token < end; ++token) {
        float* out = &decoded->data[(size_t{token} * group.kv_heads + kv_head) * group.key_dim];
        if (!DecodeRow(head, token - segment.first_position, model.key(token, kv_head), out)) {
          return absl::StrCat("token ", token, " has not the codes of its nearest centroids");
        }
      }
    }
  }
  return "";
}

std::string CheckTopK(Store& store, uint64_t sequence_id, const IndexDescriptor& index,
                      const LayerModel& model, const DecodedKeys& decoded,
                      std::mt19937_64& random) {
  const LayerGroup& group = model.group;
  const Selection selection{.index = index,
                            .group_rule = GroupRule::kMeanLogit,
                            .sink_tokens = 4,
                            .window_tokens = 4,
                            .budget_ratio = 0.2};
  const Floats query = RandomFloats(random, {1, group.query_heads, group.key_dim});
  const auto selected = store.TopK(
      kTenant, sequence_id,
      {.layer = group.layers.front(), .query_position = model.tokens - 1, .queries = query.view()},
      selection);
  if (!selected.ok()) return absl::StrCat("TopK: ", selected.status().ToString());
  std::vector<uint32_t> candidates;
  for (uint32_t token = selection.sink_tokens; token + selection.window_tokens < model.tokens;
       ++token) {
    candidates.push_back(token);
  }
  for (uint32_t kv_head = 0; kv_head < group.kv_heads && selected->count > 0; ++kv_head) {
    const auto values =
        RuleValues(model, decoded, query, kv_head, selection.group_rule, candidates);
    const auto positions =
        std::span(selected->positions).subspan(kv_head * selected->count, selected->count);
    double least_selected = 1e300;
    double most_left = -1e300;
    for (size_t i = 0; i < candidates.size(); ++i) {
      const bool chosen = std::binary_search(positions.begin(), positions.end(), candidates[i]);
      (chosen ? least_selected : most_left) =
          chosen ? std::min(least_selected, values[i]) : std::max(most_left, values[i]);
    }
    if (most_left > least_selected + 1e-4 * std::abs(least_selected) + 1e-6) {
      return "TopK selects other tokens than a scan";
    }
  }
  return "";
}

}  // namespace pqcached::kvstore::testing
