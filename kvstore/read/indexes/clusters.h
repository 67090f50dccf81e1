// ClustersIndex: the keys of each segment in clusters, from which attention estimates what it has
// not selected (RetroInfer, arXiv 2505.02922, section 4: the estimation zone; tail.h).
//
// Index data are the clusters of closed segments. Builds, merges, and live sequences of any index
// type make them; writers do not. A *part* is kMaxPartClusters x tokens consecutive slots, whose
// keys are clustered by themselves (k-means). Each kv head has for every cluster the number of its
// tokens and a row, [mean key, mean value] in the layer's dtype, and for every slot the cluster
// within its part.
// Codebooks are empty.
//
// A selection by this index scores all keys exactly.
#ifndef PQCACHED_KVSTORE_READ_INDEXES_CLUSTERS_H_
#define PQCACHED_KVSTORE_READ_INDEXES_CLUSTERS_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kvstore/read/indexes/closed_index_type.h"

namespace pqcached::kvstore {

inline constexpr uint32_t kMaxPartClusters = 256;  // a slot's cluster is one byte

// Sizes of clusters of `tokens` tokens on average.
struct ClusterSizes {
  uint32_t part_slots() const { return kMaxPartClusters * tokens; }
  uint32_t PartCount(uint32_t slot_count) const {
    return (slot_count + part_slots() - 1) / part_slots();
  }
  // Returns the clusters of a part of up to part_slots() slots: a power of two.
  uint32_t PartClusters(uint32_t slot_count) const {
    return std::bit_ceil(std::max(1u, slot_count / tokens));
  }
  // Returns the most clusters of `slot_count` slots and of fewer.
  uint32_t MostClusters(uint32_t slot_count) const {
    const uint32_t rest = slot_count % part_slots();
    return slot_count / part_slots() * kMaxPartClusters + (rest > 0 ? PartClusters(rest) : 0);
  }

  uint32_t tokens = 1;  // at least 1
};
inline ClusterSizes ClusterSizesOf(const IndexDescriptor& index) {
  return {.tokens = index.subspace_count};
}

// Clusters of one kv head in index data, without the check of their contents: any process may have
// written them.
struct ClusterView {
  // REQUIRES: CheckData has accepted the header for this index and layer.
  ClusterView(const IndexDataHeader& header, const IndexDescriptor& index, size_t row_bytes,
              uint32_t kv_head);

  // Returns the cluster of a slot, which may be `count` or more where the memory is not what
  // CloseHead has written.
  uint32_t ClusterOf(uint32_t slot) const {
    const uint32_t i = slot - slots.begin;
    return i / sizes.part_slots() * kMaxPartClusters + codes[i];
  }

  ClusterSizes sizes;
  PositionRange slots;               // that have clusters; empty before the segment is closed
  uint32_t count = 0;                // of clusters: those of part p begin at p x kMaxPartClusters
  const uint32_t* tokens = nullptr;  // [count]
  const std::byte* rows = nullptr;   // [count, row_bytes]
  const uint8_t* codes = nullptr;    // [slots]: the cluster within the part
};

class ClustersIndex final : public ClosedIndexType {
 public:
  const IndexTypeInfo& info() const override;
  uint32_t ValueOf(const IndexDescriptor& index, size_t parameter) const override;
  void SetValue(IndexDescriptor* index, size_t parameter, uint32_t value) const override;
  Refusal CheckFit(const IndexDescriptor& index, uint32_t key_dim,
                   const char* field) const override;
  std::string NameOf(const IndexDescriptor& index) const override;

  SearchScratch ScoreScratch(const LayerShape& shape, const IndexDescriptor& index,
                             const SearchPlanSize& plan) const override;
  void Prepare(const HeadSearch&) const override {}
  void Score(const HeadSearch& search, const SearchPiece& piece, float* logits,
             size_t stride) const override;
  bool Selects(const LayerShape&, const IndexDescriptor&) const override { return false; }
  SearchScratch SelectScratch(const kernels::Exec&, const LayerShape&, const IndexDescriptor&,
                              const SearchPlanSize&) const override {
    return {};
  }
  void Select(const HeadSearch&, GroupRule, std::span<uint32_t>) const override {}

  size_t CodebookBytes(const IndexDescriptor& index, const LayerShape& shape) const override;
  void FormatCodebook(const LayerShape& shape, CodebookHeader* header) const override;
  bool ReadsCodebook(const CodebookHeader& header, const LayerShape& shape) const override;
  size_t CodebookContentBytes(const CodebookHeader&) const override { return 0; }
  size_t DataBytes(const IndexDescriptor& index, const LayerShape& shape,
                   uint32_t slot_capacity) const override;
  void FormatData(const LayerShape& shape, IndexDataHeader* header) const override;
  size_t ZeroedDataBytes(const IndexDescriptor& index, const LayerShape& shape,
                         uint32_t slot_capacity) const override;
  size_t DataContentBytes(const IndexDescriptor& index, const LayerShape& shape,
                          uint32_t slot_capacity, uint32_t slot_count) const override;
  std::string CheckCodebook(const CodebookHeader& header, size_t extent_bytes,
                            const IndexDescriptor& index, const LayerShape& shape) const override;
  std::string CheckData(const IndexDataHeader& header, size_t extent_bytes,
                        const IndexDescriptor& index, const LayerShape& shape,
                        uint32_t slot_capacity) const override;

  // Builds (clusters_build.cc).
  size_t CloseScratchBytes(const CloseArgs& args) const override;
  bool CloseHead(const kernels::Exec& exec, const CloseArgs& args,
                 std::span<std::byte> scratch) const override;
  bool CopyCodes(const IndexDataHeader& from, uint32_t kv_head, uint32_t slot_count,
                 uint32_t first_slot, IndexDataHeader* to) const override;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_INDEXES_CLUSTERS_H_
