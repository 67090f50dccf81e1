#include "kernels/graph/graph.h"

#include <cstring>

#include "kernels/base/check.h"

namespace pqcached::kernels {
namespace {

bool IsWithinLimits(const GraphShape& shape) {
  return shape.node_count <= kMaxGraphNodes && shape.max_degree >= 1 &&
         shape.max_degree <= kMaxGraphDegree;
}

bool IsAligned(const std::byte* bytes) {
  return reinterpret_cast<uintptr_t>(bytes) % kGraphAlignment == 0;
}

// Returns whether all rows have degrees and neighbours in range; `wrong` gets the name of the
// other field.
bool RowsAreInRange(const GraphView& view, const char** wrong) {
  for (uint32_t node = 0; node < view.shape.node_count; ++node) {
    const uint32_t degree = __atomic_load_n(view.Row(node), __ATOMIC_RELAXED);
    if (degree > view.shape.max_degree) {
      *wrong = "degree";
      return false;
    }
    for (uint32_t i = 0; i < degree; ++i) {
      if (view.Neighbour(node, i) >= view.shape.node_count) {
        *wrong = "neighbour";
        return false;
      }
    }
  }
  return true;
}

}  // namespace

void FormatGraph(const GraphShape& shape, std::span<std::byte> graph) {
  PQC_CHECK(IsWithinLimits(shape));
  PQC_CHECK(graph.size() >= GraphBytes(shape) && IsAligned(graph.data()));
  const GraphHeader header{
      .format = kGraphFormat, .node_count = shape.node_count, .max_degree = shape.max_degree};
  std::memcpy(graph.data(), &header, sizeof(header));
  for (uint32_t node = 0; node < shape.node_count; ++node) {
    std::byte* row = graph.data() + sizeof(header) + node * GraphRowBytes(shape.max_degree);
    std::memset(row, 0, GraphRowBytes(shape.max_degree));
  }
}

const char* CheckGraph(std::span<const std::byte> graph, const GraphShape& shape, GraphView* view) {
  if (!IsWithinLimits(shape)) return "shape";
  if (graph.size() < GraphBytes(shape)) return "size";
  if (!IsAligned(graph.data())) return "alignment";
  GraphHeader header;
  std::memcpy(&header, graph.data(), sizeof(header));
  if (header.format != kGraphFormat) return "format";
  if (header.node_count != shape.node_count) return "node_count";
  if (header.max_degree != shape.max_degree) return "max_degree";
  if (header.entry_count > kMaxGraphEntries) return "entry_count";
  if (shape.node_count > 0 && header.entry_count == 0) return "entry_count";
  for (uint32_t i = 0; i < header.entry_count; ++i) {
    if (header.entries[i] >= shape.node_count) return "entries";
  }
  const GraphView checked{.bytes = graph.data(), .shape = shape, .entry_count = header.entry_count};
  const char* wrong = nullptr;
  if (!RowsAreInRange(checked, &wrong)) return wrong;
  *view = checked;
  return nullptr;
}

}  // namespace pqcached::kernels
