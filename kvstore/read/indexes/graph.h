// GraphIndex: a graph over the keys of a segment for each query head (RetrievalAttention,
// arXiv 2409.10516, section 3; kernels/graph/build.h).
//
// A codebook holds query samples, from which the graphs of all later segments are built. Index data
// are the graphs of closed segments: of those that a build, a live sequence's coding or a merge has
// coded, not of those that a writer has. Rows of other segments, and candidates that are few for
// the tokens wanted, are scored exactly: a walk over a graph reads a small part of the keys only
// where few tokens are wanted.
#ifndef PQCACHED_KVSTORE_READ_INDEXES_GRAPH_H_
#define PQCACHED_KVSTORE_READ_INDEXES_GRAPH_H_

#include <string>

#include "kernels/graph/build.h"
#include "kvstore/read/indexes/closed_index_type.h"

namespace pqcached::kvstore {

class GraphIndex final : public ClosedIndexType {
 public:
  const IndexTypeInfo& info() const override;
  uint32_t ValueOf(const IndexDescriptor& index, size_t parameter) const override;
  void SetValue(IndexDescriptor* index, size_t parameter, uint32_t value) const override;
  Refusal CheckFit(const IndexDescriptor& index, uint32_t key_dim,
                   const char* field) const override;
  std::string NameOf(const IndexDescriptor& index) const override;

  // Search (graph_search.cc).
  SearchScratch ScoreScratch(const LayerShape& shape, const IndexDescriptor& index,
                             const SearchPlanSize& plan) const override;
  void Prepare(const HeadSearch&) const override {}
  void Score(const HeadSearch& search, const SearchPiece& piece, float* logits,
             size_t stride) const override;
  bool Selects(const LayerShape&, const IndexDescriptor&) const override { return true; }
  SearchScratch SelectScratch(const kernels::Exec& exec, const LayerShape& shape,
                              const IndexDescriptor& index,
                              const SearchPlanSize& plan) const override;
  void Select(const HeadSearch& search, GroupRule rule,
              std::span<uint32_t> positions) const override;

  // Storage (graph_data.cc).
  size_t CodebookBytes(const IndexDescriptor& index, const LayerShape& shape) const override;
  void FormatCodebook(const LayerShape& shape, CodebookHeader* header) const override;
  bool ReadsCodebook(const CodebookHeader& header, const LayerShape& shape) const override;
  size_t CodebookContentBytes(const CodebookHeader& header) const override;
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

  // Builds (graph_build.cc).
  bool NeedsSamples(const IndexDescriptor&, uint32_t) const override { return true; }
  size_t PrepareScratchBytes(const TrainingArgs&) const override { return kContentAlignment; }
  void PrepareTraining(const TrainingArgs& args, std::span<std::byte> scratch) const override;
  size_t CloseScratchBytes(const CloseArgs& args) const override;
  bool CloseHead(const kernels::Exec& exec, const CloseArgs& args,
                 std::span<std::byte> scratch) const override;
  bool CopyCodes(const IndexDataHeader& from, uint32_t kv_head, uint32_t slot_count,
                 uint32_t first_slot, IndexDataHeader* to) const override;
};

// Parameters of a graph index.
struct GraphParameters {
  uint32_t degree = 0;        // neighbours of a key by projection; twice as many in all
  uint32_t list_size = 0;     // nearest keys of a query sample
  uint32_t sample_count = 0;  // query samples of a query head, at most
};
GraphParameters GraphParametersOf(const IndexDescriptor& index);

// Query samples of one kv head in a codebook: [query_heads of the kv head, capacity, key_dim], of
// which the first `count` of each query head are used.
struct GraphSamples {
  std::span<const float> OfHead(uint32_t head) const {
    return {floats + size_t{head} * capacity * key_dim, size_t{count} * key_dim};
  }

  const float* floats = nullptr;
  uint32_t count = 0, capacity = 0, key_dim = 0;
};
GraphSamples GraphSamplesOf(const CodebookHeader& codebook, uint32_t kv_head);

// Returns the memory of the graph of one query head, counted within its kv head.
inline std::byte* GraphBegin(const IndexDataHeader& header, uint32_t kv_head, uint32_t head) {
  return const_cast<std::byte*>(reinterpret_cast<const std::byte*>(&header)) +
         header.plane_offset_bytes + kv_head * header.head_stride_bytes +
         head * header.plane_stride_bytes;
}

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_INDEXES_GRAPH_H_
