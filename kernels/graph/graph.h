// A graph over the keys of one segment, for one query head: its layout in memory, and checks.
//
// A *node* is the slot of a key, counted from the first slot of the segment. A graph has a header
// with the *entries*, the nodes at which a search starts, and one row per node: its degree and its
// neighbours, the most useful ones first. Keys are not stored: a search reads them in the segment.
//
// Other processes may write the memory at any time. CheckGraph names what is wrong with a graph;
// readers (search.h) stay inside the memory and end whatever it contains, because they take the
// counts from a GraphView and compare every degree and neighbour with them.
//
// Stateless; thread-safe.
#ifndef PQCACHED_KERNELS_GRAPH_GRAPH_H_
#define PQCACHED_KERNELS_GRAPH_GRAPH_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace pqcached::kernels {

inline constexpr uint32_t kMaxGraphEntries = 64;
inline constexpr uint32_t kMaxGraphDegree = 255;
inline constexpr uint32_t kMaxGraphNodes = uint32_t{1} << 24u;
inline constexpr size_t kGraphAlignment = 64;

struct GraphHeader {
  uint32_t format = 0;      // kGraphFormat
  uint32_t node_count = 0;  // 0..kMaxGraphNodes
  uint32_t max_degree = 0;  // 1..kMaxGraphDegree
  uint32_t entry_count = 0;
  uint32_t entries[kMaxGraphEntries] = {};
  uint32_t reserved[12] = {};
};
static_assert(sizeof(GraphHeader) % kGraphAlignment == 0);

inline constexpr uint32_t kGraphFormat = 0x31485247;  // "GRH1"

struct GraphShape {
  uint32_t node_count = 0;  // 0..kMaxGraphNodes
  uint32_t max_degree = 0;  // 1..kMaxGraphDegree
};

// Returns the distance of two rows: the degree and max_degree neighbours, in whole cache lines.
constexpr size_t GraphRowBytes(uint32_t max_degree) {
  const size_t bytes = (size_t{1} + max_degree) * sizeof(uint32_t);
  return (bytes + kGraphAlignment - 1) / kGraphAlignment * kGraphAlignment;
}

// Returns the bytes of a graph. REQUIRES: a shape within its limits.
constexpr size_t GraphBytes(const GraphShape& shape) {
  return sizeof(GraphHeader) + shape.node_count * GraphRowBytes(shape.max_degree);
}

// A graph as its readers see it, with counts that the memory cannot change.
struct GraphView {
  const std::byte* bytes = nullptr;
  GraphShape shape;
  uint32_t entry_count = 0;  // at most kMaxGraphEntries

  // All read each word once. A node, degree or count may be out of range: readers compare it.
  uint32_t EntryCount() const {
    return Load(&reinterpret_cast<const GraphHeader*>(bytes)->entry_count);
  }
  uint32_t Entry(uint32_t index) const {
    return Load(reinterpret_cast<const GraphHeader*>(bytes)->entries + index);
  }
  uint32_t Degree(uint32_t node) const {
    const uint32_t degree = Load(Row(node));
    return degree < shape.max_degree ? degree : shape.max_degree;
  }
  uint32_t Neighbour(uint32_t node, uint32_t index) const { return Load(Row(node) + 1 + index); }
  const uint32_t* Row(uint32_t node) const {
    return reinterpret_cast<const uint32_t*>(bytes + sizeof(GraphHeader) +
                                             node * GraphRowBytes(shape.max_degree));
  }

 private:
  static uint32_t Load(const uint32_t* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
};

// Writes the header of a graph without edges and entries. REQUIRES: `graph` has GraphBytes(shape)
// and is aligned to kGraphAlignment; the shape is within its limits.
void FormatGraph(const GraphShape& shape, std::span<std::byte> graph);

// Checks a graph in memory that another process has written: format and counts as expected, and
// all entries, degrees and neighbours in range. Returns the name of the wrong field, or null and
// sets `view`. The shape comes from the caller, not from the memory; it must be within its limits,
// or "shape" is returned.
const char* CheckGraph(std::span<const std::byte> graph, const GraphShape& shape, GraphView* view);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_GRAPH_GRAPH_H_
