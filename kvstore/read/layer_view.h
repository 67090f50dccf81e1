// LayerView: pointers to one layer of a sequence in mapped memory, the input of selection and
// attention.
//
// A view consists of plain values. Its maker (the store from a snapshot, a client from descriptors)
// keeps the memory that it points to valid and the visible slots unchanged while the view is used.
#ifndef PQCACHED_KVSTORE_READ_LAYER_VIEW_H_
#define PQCACHED_KVSTORE_READ_LAYER_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/attend/attend.h"
#include "kernels/base/dtype.h"
#include "kernels/select/pq.h"
#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

// Numbered as in the proto.
enum class LayerKind : uint8_t {
  kSelected = 1,  // rows are selected by an index, or exactly
  kFull = 2,      // a query takes all candidates; no index
  kWindow = 3,    // a query takes none: the last tokens are attended by the engine; no index
  kNone = 4,      // not stored
  // Rows are values: the engine has the keys, and passes logits. key_dim is 0; no index.
  kValues = 5,
};

struct LayerShape {
  kernels::DType dtype = kernels::DType::kF16;
  LayerKind kind = LayerKind::kSelected;
  // Dims of a key that are rotated in pairs (i, i + half of them). 0: others, or unknown, as it is
  // where codebooks are only read. Two bytes, which leave the size of the struct as it was.
  uint16_t half_rotary_dim = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  uint32_t kv_heads = 0;
  uint32_t query_heads = 0;  // query head h belongs to kv head h / group_size()
  uint32_t row_bytes = 0;
  float scale = 1.0f;
  float softcap = 0.0f;  // 0 = none

  // Returns whether rows have keys. Without them, attention needs logits.
  bool has_keys() const { return key_dim > 0; }
  // Returns whether the layer is a part of the sequence's indexes.
  bool has_index() const { return kind == LayerKind::kSelected; }
  // Returns the number of query heads per kv head: 32 query heads over 8 kv heads have groups of 4.
  uint32_t group_size() const { return query_heads / kv_heads; }
};

// Readable slots of one segment.
struct SegmentView {
  uint32_t first_position = 0;
  uint32_t token_count = 0;
  std::span<const std::byte* const> rows;  // [kv_heads]: first row of each head
  // Start of the index extent; null when only rows are needed.
  const IndexDataHeader* index_data = nullptr;
  // Start of the codebook extent; null when only rows are needed.
  const CodebookHeader* codebook = nullptr;
};

// Segments of one layer; they ascend without a gap from position 0.
struct LayerView {
  LayerShape shape;
  std::span<const SegmentView> segments;
  // Heads of `shape` that have the rows and codes of one kv head: more than 1 in a view whose query
  // heads are kv heads of their own.
  uint32_t sharing_heads = 1;

  uint32_t stored_head(uint32_t kv_head) const { return kv_head / sharing_heads; }

  uint32_t token_count() const {
    return segments.empty() ? 0 : segments.back().first_position + segments.back().token_count;
  }
};

// Runs body(task, worker) for every task < task_count on some worker < worker_count, and returns
// when all tasks are done. One worker runs one task at a time.
struct ParallelFor {
  using Body = std::function<void(uint32_t task, uint32_t worker)>;
  uint32_t worker_count = 1;
  std::function<void(uint32_t task_count, const Body& body)> run;
};

// Returns a ParallelFor that runs all tasks on the caller's thread, in order.
ParallelFor SerialFor();

// Returns the geometry of codes and tables, which does not depend on how sub-spaces are cut.
inline kernels::PqGeometry GeometryOf(const IndexDescriptor& index, uint32_t key_dim) {
  return {.key_dim = key_dim, .subspace_count = index.subspace_count, .bits = index.bits};
}

// Returns the geometry of a codebook, by which keys are coded and queries multiplied with it.
inline kernels::PqGeometry GeometryOf(const CodebookHeader& codebook) {
  kernels::PqGeometry geometry = GeometryOf(codebook.index, codebook.key_dim);
  geometry.paired_dims = codebook.paired_dims;
  return geometry;
}

// Returns the geometry of a new codebook of a layer. REQUIRES: the index fits the layer.
inline kernels::PqGeometry NewGeometry(const IndexDescriptor& index, const LayerShape& shape) {
  kernels::PqGeometry geometry = GeometryOf(index, shape.key_dim);
  if (index.layout == SubspaceLayout::kPairs) {
    geometry.paired_dims = kernels::PairedDims(geometry, shape.half_rotary_dim);
  }
  return geometry;
}

inline const uint8_t* Planes(const IndexDataHeader& header, uint32_t kv_head) {
  return reinterpret_cast<const uint8_t*>(&header) + header.plane_offset_bytes +
         kv_head * header.head_stride_bytes;
}

// REQUIRES: header.cell_count > 0.
inline const uint32_t* CellCounts(const IndexDataHeader& header, uint32_t kv_head) {
  return reinterpret_cast<const uint32_t*>(reinterpret_cast<const std::byte*>(&header) +
                                           header.counts_offset_bytes +
                                           kv_head * header.counts_stride_bytes);
}

// Returns the list begins of the counted slots, [PostingPageCount, CellCount + 1]. REQUIRES:
// header.cell_count > 0.
inline const uint16_t* PostingBegins(const IndexDataHeader& header, uint32_t kv_head) {
  return reinterpret_cast<const uint16_t*>(reinterpret_cast<const std::byte*>(&header) +
                                           header.posting_begins_offset_bytes +
                                           kv_head * header.posting_begins_stride_bytes);
}

// Returns the slots of all posting lists, [counted slots]. REQUIRES: header.cell_count > 0.
inline const uint16_t* PostingSlots(const IndexDataHeader& header, uint32_t kv_head) {
  return reinterpret_cast<const uint16_t*>(reinterpret_cast<const std::byte*>(&header) +
                                           header.posting_slots_offset_bytes +
                                           kv_head * header.posting_slots_stride_bytes);
}

inline std::span<const float> Centroids(const CodebookHeader& header, uint32_t kv_head) {
  const auto* begin = reinterpret_cast<const std::byte*>(&header) + header.centroid_offset_bytes +
                      kv_head * header.head_stride_bytes;
  return {reinterpret_cast<const float*>(begin), kernels::CentroidFloats(GeometryOf(header))};
}

// Returns whether an index codes keys that a map has rotated.
inline bool IsWeighted(const IndexDescriptor& index) {
  return index.kind == IndexKind::kPq && index.layout == SubspaceLayout::kWeighted;
}

constexpr size_t ContentAligned(size_t bytes) {
  return (bytes + kContentAlignment - 1) / kContentAlignment * kContentAlignment;
}

// Maps [key_dim, key_dim] of one kv head (kernels/train/key_map.h). REQUIRES: IsWeighted.
struct KeyMaps {
  std::span<const float> keys, queries;
};
inline KeyMaps KeyMapsOf(const CodebookHeader& header, uint32_t kv_head) {
  const std::span<const float> centroids = Centroids(header, kv_head);
  const auto* const begin =
      reinterpret_cast<const std::byte*>(centroids.data()) + ContentAligned(centroids.size_bytes());
  const size_t floats = size_t{header.key_dim} * header.key_dim;
  return {{reinterpret_cast<const float*>(begin), floats},
          {reinterpret_cast<const float*>(begin + ContentAligned(floats * sizeof(float))), floats}};
}

// Returns the row spans of one kv head, the input of kernels that read rows.
std::vector<kernels::RowSpan> RowSpans(const LayerView& view, uint32_t kv_head);
// Writes them into `memory`: aligned for a RowSpan, and as large as one of each segment.
std::span<const kernels::RowSpan> FillRowSpans(const LayerView& view, uint32_t kv_head,
                                               std::span<std::byte> memory);

// Applies the layer's softcap, if it has one.
void CapLogits(const LayerShape& shape, std::span<float> logits);

// Returns the bytes that a part of a work area takes, so that the next part is 64-byte aligned.
constexpr size_t PaddedBytes(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_LAYER_VIEW_H_
