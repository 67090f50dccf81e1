#include <algorithm>
#include <string>

#include "kvstore/read/indexes/graph.h"

namespace pqcached::kvstore {
namespace {

// Bytes before the samples of a kv head, which begin with their count.
constexpr size_t kCountBytes = kContentAlignment;

size_t SampleBytes(const IndexDescriptor& index, const LayerShape& shape) {
  return size_t{shape.group_size()} * GraphParametersOf(index).sample_count * shape.key_dim *
         sizeof(float);
}

size_t CodebookStride(const IndexDescriptor& index, const LayerShape& shape) {
  return kCountBytes + ContentAligned(SampleBytes(index, shape));
}

kernels::GraphShape ShapeOf(const IndexDescriptor& index, uint32_t slot_count) {
  return {.node_count = slot_count, .max_degree = 2 * GraphParametersOf(index).degree};
}

// Returns the distance of the graphs of two query heads.
size_t GraphStride(const IndexDescriptor& index, uint32_t slot_capacity) {
  return ContentAligned(kernels::GraphBytes(ShapeOf(index, slot_capacity)));
}

constexpr size_t kDataOffset = ContentAligned(sizeof(IndexDataHeader));
constexpr size_t kCodebookOffset = ContentAligned(sizeof(CodebookHeader));

}  // namespace

GraphSamples GraphSamplesOf(const CodebookHeader& codebook, uint32_t kv_head) {
  const auto* const begin = reinterpret_cast<const std::byte*>(&codebook) +
                            codebook.centroid_offset_bytes + kv_head * codebook.head_stride_bytes;
  const uint32_t capacity = GraphParametersOf(codebook.index).sample_count;
  return {.floats = reinterpret_cast<const float*>(begin + kCountBytes),
          .count = std::min(*reinterpret_cast<const uint32_t*>(begin), capacity),
          .capacity = capacity,
          .key_dim = codebook.key_dim};
}

size_t GraphIndex::CodebookBytes(const IndexDescriptor& index, const LayerShape& shape) const {
  return kCodebookOffset + CodebookStride(index, shape) * shape.kv_heads;
}

void GraphIndex::FormatCodebook(const LayerShape& shape, CodebookHeader* header) const {
  header->centroid_offset_bytes = kCodebookOffset;
  header->head_stride_bytes = CodebookStride(header->index, shape);
}

bool GraphIndex::ReadsCodebook(const CodebookHeader& header, const LayerShape& shape) const {
  return header.centroid_offset_bytes == kCodebookOffset &&
         header.head_stride_bytes == CodebookStride(header.index, shape);
}

size_t GraphIndex::CodebookContentBytes(const CodebookHeader& header) const {
  return header.kv_head_count * header.head_stride_bytes;
}

size_t GraphIndex::DataBytes(const IndexDescriptor& index, const LayerShape& shape,
                             uint32_t slot_capacity) const {
  return kDataOffset + GraphStride(index, slot_capacity) * shape.query_heads;
}

void GraphIndex::FormatData(const LayerShape& shape, IndexDataHeader* header) const {
  header->plane_offset_bytes = kDataOffset;
  header->plane_stride_bytes = GraphStride(header->index, header->slot_capacity);
  header->head_stride_bytes = header->plane_stride_bytes * shape.group_size();
}

// Graphs are written later, as a whole.
size_t GraphIndex::ZeroedDataBytes(const IndexDescriptor&, const LayerShape&, uint32_t) const {
  return kDataOffset;
}

size_t GraphIndex::DataContentBytes(const IndexDescriptor& index, const LayerShape& shape, uint32_t,
                                    uint32_t slot_count) const {
  return shape.query_heads * kernels::GraphBytes(ShapeOf(index, slot_count));
}

std::string GraphIndex::CheckCodebook(const CodebookHeader& header, size_t extent_bytes,
                                      const IndexDescriptor& index, const LayerShape& shape) const {
  if (header.centroid_offset_bytes != kCodebookOffset ||
      header.head_stride_bytes != CodebookStride(index, shape) ||
      CodebookBytes(index, shape) > extent_bytes) {
    return "samples";
  }
  return {};
}

std::string GraphIndex::CheckData(const IndexDataHeader& header, size_t extent_bytes,
                                  const IndexDescriptor& index, const LayerShape& shape,
                                  uint32_t slot_capacity) const {
  const size_t stride = GraphStride(index, slot_capacity);
  if (header.plane_offset_bytes != kDataOffset || header.plane_stride_bytes != stride ||
      header.head_stride_bytes != stride * shape.group_size() || header.cell_count != 0 ||
      DataBytes(index, shape, slot_capacity) > extent_bytes) {
    return "graphs";
  }
  return {};
}

}  // namespace pqcached::kvstore
