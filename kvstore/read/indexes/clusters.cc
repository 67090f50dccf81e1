#include "kvstore/read/indexes/clusters.h"

#include <algorithm>

#include "kernels/select/exact/exact_score.h"
#include "kvstore/read/indexes/flat.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kLeastClusterTokens = 8;
constexpr uint32_t kMostClusterTokens = 1024;
constexpr uint32_t kDefaultClusterTokens = 32;

constexpr size_t kClusterDataOffset = ContentAligned(sizeof(IndexDataHeader));
constexpr size_t kClusterCodebookOffset = ContentAligned(sizeof(CodebookHeader));

// Parts of the index data of one kv head, in memory order.
struct HeadParts {
  HeadParts(const IndexDescriptor& index, size_t row_bytes, uint32_t slot_capacity) {
    const size_t clusters = ClusterSizesOf(index).MostClusters(slot_capacity);
    rows_begin = ContentAligned(clusters * sizeof(uint32_t));
    codes_begin = rows_begin + ContentAligned(clusters * row_bytes);
    total_bytes = codes_begin + ContentAligned(slot_capacity);
  }

  size_t rows_begin = 0;  // behind the numbers of tokens
  size_t codes_begin = 0;
  size_t total_bytes = 0;
};

}  // namespace

ClusterView::ClusterView(const IndexDataHeader& header, const IndexDescriptor& index,
                         size_t row_bytes, uint32_t kv_head)
    : sizes(ClusterSizesOf(index)) {
  const uint32_t capacity = header.slot_capacity;
  const uint32_t end = std::min(header.counted_end.load(std::memory_order_acquire), capacity);
  slots = {std::min(header.counted_begin, end), end};
  count = sizes.MostClusters(slots.end - slots.begin);
  const HeadParts parts(index, row_bytes, capacity);
  const std::byte* const begin = reinterpret_cast<const std::byte*>(&header) + kClusterDataOffset +
                                 kv_head * parts.total_bytes;
  tokens = reinterpret_cast<const uint32_t*>(begin);
  rows = begin + parts.rows_begin;
  codes = reinterpret_cast<const uint8_t*>(begin + parts.codes_begin);
}

const IndexTypeInfo& ClustersIndex::info() const {
  static constexpr IndexParameter kParameters[] = {
      {.name = "tokens",
       .text = "tokens of a cluster on average, at most; at least half as many",
       .least = kLeastClusterTokens,
       .most = kMostClusterTokens,
       .default_value = kDefaultClusterTokens}};
  static constexpr IndexTypeInfo kInfo = {
      .kind = IndexKind::kClusters,
      .name = "clusters",
      .text = "RetroInfer: clusters of keys, of which a tail estimate is made.",
      .parameters = kParameters,
  };
  return kInfo;
}

uint32_t ClustersIndex::ValueOf(const IndexDescriptor& index, size_t) const {
  return index.subspace_count;
}

void ClustersIndex::SetValue(IndexDescriptor* index, size_t, uint32_t value) const {
  index->subspace_count = value;
}

Refusal ClustersIndex::CheckFit(const IndexDescriptor&, uint32_t, const char*) const { return {}; }

std::string ClustersIndex::NameOf(const IndexDescriptor& index) const {
  return "clusters tokens=" + std::to_string(index.subspace_count);
}

SearchScratch ClustersIndex::ScoreScratch(const LayerShape& shape, const IndexDescriptor&,
                                          const SearchPlanSize&) const {
  return {.work_bytes = kernels::ExactScoreScratchBytes(shape.group_size(), shape.key_dim)};
}

void ClustersIndex::Score(const HeadSearch& search, const SearchPiece& piece, float* logits,
                          size_t stride) const {
  ScoreRowsOf(search, piece, logits, stride);
}

size_t ClustersIndex::CodebookBytes(const IndexDescriptor&, const LayerShape&) const {
  return kClusterCodebookOffset;
}

void ClustersIndex::FormatCodebook(const LayerShape&, CodebookHeader* header) const {
  header->centroid_offset_bytes = kClusterCodebookOffset;
  header->head_stride_bytes = 0;
}

bool ClustersIndex::ReadsCodebook(const CodebookHeader& header, const LayerShape&) const {
  return header.centroid_offset_bytes == kClusterCodebookOffset && header.head_stride_bytes == 0;
}

size_t ClustersIndex::DataBytes(const IndexDescriptor& index, const LayerShape& shape,
                                uint32_t slot_capacity) const {
  return kClusterDataOffset +
         HeadParts(index, shape.row_bytes, slot_capacity).total_bytes * shape.kv_heads;
}

void ClustersIndex::FormatData(const LayerShape& shape, IndexDataHeader* header) const {
  const HeadParts parts(header->index, shape.row_bytes, header->slot_capacity);
  header->plane_offset_bytes = kClusterDataOffset;
  header->plane_stride_bytes = shape.row_bytes;
  header->head_stride_bytes = parts.total_bytes;
}

// Clusters are written later, as a whole.
size_t ClustersIndex::ZeroedDataBytes(const IndexDescriptor&, const LayerShape&, uint32_t) const {
  return kClusterDataOffset;
}

size_t ClustersIndex::DataContentBytes(const IndexDescriptor& index, const LayerShape& shape,
                                       uint32_t, uint32_t slot_count) const {
  const size_t clusters = ClusterSizesOf(index).MostClusters(slot_count);
  return shape.kv_heads * (clusters * (sizeof(uint32_t) + shape.row_bytes) + slot_count);
}

std::string ClustersIndex::CheckCodebook(const CodebookHeader& header, size_t extent_bytes,
                                         const IndexDescriptor&, const LayerShape& shape) const {
  return ReadsCodebook(header, shape) && kClusterCodebookOffset <= extent_bytes ? "" : "codebook";
}

std::string ClustersIndex::CheckData(const IndexDataHeader& header, size_t extent_bytes,
                                     const IndexDescriptor& index, const LayerShape& shape,
                                     uint32_t slot_capacity) const {
  const HeadParts parts(index, shape.row_bytes, slot_capacity);
  if (header.plane_offset_bytes != kClusterDataOffset ||
      header.plane_stride_bytes != shape.row_bytes ||
      header.head_stride_bytes != parts.total_bytes || header.cell_count != 0 ||
      DataBytes(index, shape, slot_capacity) > extent_bytes) {
    return "clusters";
  }
  return {};
}

}  // namespace pqcached::kvstore
