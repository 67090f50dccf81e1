#include <algorithm>
#include <cstring>

#include "kernels/select/cells/pq_postings.h"
#include "kernels/select/pq_select.h"
#include "kvstore/read/indexes/pq.h"

namespace pqcached::kvstore {
namespace {

constexpr size_t AlignUp(size_t bytes) { return ContentAligned(bytes); }

// Returns the number of cells that a segment counts and lists: 0 if the counts would be more bytes
// to read than the codes.
uint32_t CountedCells(const kernels::PqGeometry& geometry, uint32_t slot_capacity) {
  if (!kernels::HasCells(geometry)) return 0;
  const uint32_t cells = kernels::CellCount(geometry);
  return 2 * slot_capacity >= cells ? cells : 0;
}

// Offsets of the parts of an index extent.
struct DataPlaces {
  size_t plane_offset = AlignUp(sizeof(IndexDataHeader));
  size_t head_stride = 0;
  size_t counts_offset = 0;
  size_t counts_stride = 0;
  uint32_t cell_count = 0;
  size_t begins_offset = 0;
  size_t begins_stride = 0;
  size_t slots_offset = 0;
  size_t slots_stride = 0;
  size_t size_bytes = 0;

  DataPlaces(const IndexDescriptor& index, const LayerShape& shape, uint32_t slot_capacity) {
    const kernels::PqGeometry geometry = GeometryOf(index, shape.key_dim);
    head_stride = kernels::CodePlanesBytes(geometry, slot_capacity);
    counts_offset = plane_offset + AlignUp(head_stride * shape.kv_heads);
    cell_count = CountedCells(geometry, slot_capacity);
    counts_stride = AlignUp(size_t{cell_count} * sizeof(uint32_t));
    begins_offset = counts_offset + counts_stride * shape.kv_heads;
    if (cell_count > 0) {
      begins_stride =
          AlignUp(kernels::PostingBeginCount(geometry, slot_capacity) * sizeof(uint16_t));
      slots_stride = AlignUp(size_t{slot_capacity} * sizeof(uint16_t));
    }
    slots_offset = begins_offset + begins_stride * shape.kv_heads;
    size_bytes = slots_offset + slots_stride * shape.kv_heads;
  }
};

size_t CentroidBytes(const IndexDescriptor& index, const LayerShape& shape) {
  return kernels::CentroidFloats(GeometryOf(index, shape.key_dim)) * sizeof(float);
}

// Returns the bytes of the maps of one kv head behind its centroids.
size_t MapBytes(const IndexDescriptor& index, uint32_t key_dim) {
  return IsWeighted(index) ? 2 * AlignUp(size_t{key_dim} * key_dim * sizeof(float)) : 0;
}

// Returns the bytes of centroids and maps of one kv head.
size_t CodebookStride(const IndexDescriptor& index, const LayerShape& shape) {
  return AlignUp(CentroidBytes(index, shape)) + MapBytes(index, shape.key_dim);
}

// Returns true when `count` areas of `stride` bytes, each with `content` bytes in use, lie in the
// extent behind its header.
bool AreasFit(uint64_t offset, uint64_t stride, uint64_t content, uint32_t count,
              size_t header_bytes, size_t extent_bytes) {
  return offset % kContentAlignment == 0 && stride % kContentAlignment == 0 &&
         offset >= header_bytes && offset <= extent_bytes && stride <= extent_bytes &&
         content <= stride && stride * count <= extent_bytes - offset;
}

uint8_t* WritablePlanes(const IndexDataHeader& header, uint32_t kv_head) {
  return const_cast<uint8_t*>(Planes(header, kv_head));
}

}  // namespace

size_t PqIndex::CodebookBytes(const IndexDescriptor& index, const LayerShape& shape) const {
  return AlignUp(sizeof(CodebookHeader)) + CodebookStride(index, shape) * shape.kv_heads;
}

void PqIndex::FormatCodebook(const LayerShape& shape, CodebookHeader* header) const {
  header->centroid_offset_bytes = AlignUp(sizeof(CodebookHeader));
  header->head_stride_bytes = CodebookStride(header->index, shape);
  header->paired_dims = NewGeometry(header->index, shape).paired_dims;
}

bool PqIndex::ReadsCodebook(const CodebookHeader& header, const LayerShape& shape) const {
  // An earlier version cut all sub-spaces contiguously.
  const bool cut =
      header.paired_dims == 0 || header.paired_dims == NewGeometry(header.index, shape).paired_dims;
  return cut && header.centroid_offset_bytes == AlignUp(sizeof(CodebookHeader)) &&
         header.head_stride_bytes == CodebookStride(header.index, shape);
}

size_t PqIndex::CodebookContentBytes(const CodebookHeader& header) const {
  return header.kv_head_count * (kernels::CentroidFloats(GeometryOf(header)) * sizeof(float) +
                                 MapBytes(header.index, header.key_dim));
}

size_t PqIndex::DataBytes(const IndexDescriptor& index, const LayerShape& shape,
                          uint32_t slot_capacity) const {
  return DataPlaces(index, shape, slot_capacity).size_bytes;
}

void PqIndex::FormatData(const LayerShape& shape, IndexDataHeader* header) const {
  const DataPlaces places(header->index, shape, header->slot_capacity);
  header->plane_offset_bytes = places.plane_offset;
  header->head_stride_bytes = places.head_stride;
  header->plane_stride_bytes = kernels::PlaneStride(header->slot_capacity);
  header->counts_offset_bytes = places.counts_offset;
  header->counts_stride_bytes = places.counts_stride;
  header->cell_count = places.cell_count;
  header->posting_begins_offset_bytes = places.begins_offset;
  header->posting_begins_stride_bytes = places.begins_stride;
  header->posting_slots_offset_bytes = places.slots_offset;
  header->posting_slots_stride_bytes = places.slots_stride;
}

// Counts and lists are written later, as a whole.
size_t PqIndex::ZeroedDataBytes(const IndexDescriptor& index, const LayerShape& shape,
                                uint32_t slot_capacity) const {
  return DataPlaces(index, shape, slot_capacity).counts_offset;
}

size_t PqIndex::DataContentBytes(const IndexDescriptor& index, const LayerShape& shape,
                                 uint32_t slot_capacity, uint32_t slot_count) const {
  const kernels::PqGeometry geometry = GeometryOf(index, shape.key_dim);
  size_t bytes = size_t{kernels::PlaneCount(geometry)} * slot_count;
  if (const uint32_t cells = CountedCells(geometry, slot_capacity); cells > 0) {
    bytes += cells * sizeof(uint32_t) +
             (kernels::PostingBeginCount(geometry, slot_count) + slot_count) * sizeof(uint16_t);
  }
  return shape.kv_heads * bytes;
}

std::string PqIndex::CheckCodebook(const CodebookHeader& header, size_t extent_bytes,
                                   const IndexDescriptor& index, const LayerShape& shape) const {
  if (!kernels::IsValid(GeometryOf(header)) ||
      (header.paired_dims != 0 && index.layout != SubspaceLayout::kPairs)) {
    return "paired_dims";
  }
  const uint64_t content =
      IsWeighted(index) ? CodebookStride(index, shape) : CentroidBytes(index, shape);
  if (!AreasFit(header.centroid_offset_bytes, header.head_stride_bytes, content, shape.kv_heads,
                sizeof(header), extent_bytes)) {
    return "centroids";
  }
  return {};
}

std::string PqIndex::CheckData(const IndexDataHeader& header, size_t extent_bytes,
                               const IndexDescriptor& index, const LayerShape& shape,
                               uint32_t slot_capacity) const {
  const kernels::PqGeometry geometry = GeometryOf(index, shape.key_dim);
  const uint64_t plane_stride = header.plane_stride_bytes;
  if (plane_stride > extent_bytes || plane_stride < kernels::PlaneStride(slot_capacity) ||
      plane_stride % kernels::kPlaneAlignment != 0) {
    return "plane_stride_bytes";
  }
  if (!AreasFit(header.plane_offset_bytes, header.head_stride_bytes,
                plane_stride * kernels::PlaneCount(geometry), shape.kv_heads, sizeof(header),
                extent_bytes)) {
    return "planes";
  }
  const bool with_lists =
      header.posting_begins_stride_bytes > 0 || header.posting_slots_stride_bytes > 0;
  if (header.cell_count == 0) return with_lists ? "postings" : "";
  if (!kernels::HasCells(geometry) || header.cell_count != kernels::CellCount(geometry)) {
    return "cell_count";
  }
  if (!AreasFit(header.counts_offset_bytes, header.counts_stride_bytes,
                uint64_t{header.cell_count} * sizeof(uint32_t), shape.kv_heads, sizeof(header),
                extent_bytes)) {
    return "counts";
  }
  if (with_lists &&
      !(AreasFit(header.posting_begins_offset_bytes, header.posting_begins_stride_bytes,
                 kernels::PostingBeginCount(geometry, slot_capacity) * sizeof(uint16_t),
                 shape.kv_heads, sizeof(header), extent_bytes) &&
        AreasFit(header.posting_slots_offset_bytes, header.posting_slots_stride_bytes,
                 uint64_t{slot_capacity} * sizeof(uint16_t), shape.kv_heads, sizeof(header),
                 extent_bytes))) {
    return "postings";
  }
  return {};
}

bool PqIndex::HasClosing(const IndexDataHeader& header) const { return header.cell_count > 0; }

bool PqIndex::CloseHead(const kernels::Exec& exec, const CloseArgs& args,
                        std::span<std::byte>) const {
  const IndexDataHeader& header = *args.data;
  const uint32_t kv_head = args.kv_head, slot_end = args.slot_end;
  const uint32_t slot_count = slot_end - header.counted_begin;
  // The geometry of cells does not depend on the key dimension.
  const kernels::PqGeometry geometry =
      GeometryOf(header.index, /*key_dim=*/2 * header.index.subspace_count);
  const std::span<uint32_t> counts(const_cast<uint32_t*>(CellCounts(header, kv_head)),
                                   header.cell_count);
  std::fill(counts.begin(), counts.end(), 0u);
  kernels::PqCountCells(exec, {.geometry = geometry,
                               .planes = Planes(header, kv_head),
                               .plane_stride = header.plane_stride_bytes,
                               .slot_begin = header.counted_begin,
                               .slot_end = slot_end,
                               .cell_counts = counts});
  kernels::PqBuildPostings(
      exec, {.geometry = geometry,
             .planes = Planes(header, kv_head),
             .plane_stride = header.plane_stride_bytes,
             .slot_begin = header.counted_begin,
             .slot_end = slot_end,
             .begins = {const_cast<uint16_t*>(PostingBegins(header, kv_head)),
                        kernels::PostingBeginCount(geometry, slot_count)},
             .slots = {const_cast<uint16_t*>(PostingSlots(header, kv_head)), slot_count}});
  return true;
}

bool PqIndex::CopyCodes(const IndexDataHeader& from, uint32_t kv_head, uint32_t slot_count,
                        uint32_t first_slot, IndexDataHeader* to) const {
  const uint32_t planes =
      kernels::PlaneCount(GeometryOf(from.index, /*key_dim=*/from.index.subspace_count));
  for (uint32_t plane = 0; plane < planes; ++plane) {
    std::memcpy(WritablePlanes(*to, kv_head) + plane * to->plane_stride_bytes + first_slot,
                Planes(from, kv_head) + plane * from.plane_stride_bytes, slot_count);
  }
  return false;
}

}  // namespace pqcached::kvstore
