// PqIndex: product quantization (PQCache, section 3.3). A codebook holds the centroids of every
// sub-space; index data hold one code per key and sub-space, and of closed segments, where m * b is
// small, the number and list of the slots in each cell.
#ifndef PQCACHED_KVSTORE_READ_INDEXES_PQ_H_
#define PQCACHED_KVSTORE_READ_INDEXES_PQ_H_

#include <string>

#include "kvstore/read/indexes/index_type.h"

namespace pqcached::kvstore {

class PqIndex final : public BuiltIndexType {
 public:
  const IndexTypeInfo& info() const override;
  uint32_t ValueOf(const IndexDescriptor& index, size_t parameter) const override;
  void SetValue(IndexDescriptor* index, size_t parameter, uint32_t value) const override;
  Refusal CheckFit(const IndexDescriptor& index, uint32_t key_dim,
                   const char* field) const override;
  std::string NameOf(const IndexDescriptor& index) const override;

  // Search (pq_search.cc).
  SearchScratch ScoreScratch(const LayerShape& shape, const IndexDescriptor& index,
                             const SearchPlanSize& plan) const override;
  void Prepare(const HeadSearch& search) const override;
  void Score(const HeadSearch& search, const SearchPiece& piece, float* logits,
             size_t stride) const override;
  bool Selects(const LayerShape& shape, const IndexDescriptor& index) const override;
  SearchScratch SelectScratch(const kernels::Exec& exec, const LayerShape& shape,
                              const IndexDescriptor& index,
                              const SearchPlanSize& plan) const override;
  void Select(const HeadSearch& search, GroupRule rule,
              std::span<uint32_t> positions) const override;

  // Storage (pq_data.cc).
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
  bool HasClosing(const IndexDataHeader& header) const override;
  bool CloseHead(const kernels::Exec& exec, const CloseArgs& args,
                 std::span<std::byte> scratch) const override;
  bool CopyCodes(const IndexDataHeader& from, uint32_t kv_head, uint32_t slot_count,
                 uint32_t first_slot, IndexDataHeader* to) const override;

  // Training and coding (pq_training.cc, pq_weighting.cc).
  bool NeedsSamples(const IndexDescriptor& index, uint32_t) const override {
    return IsWeighted(index);
  }
  size_t PrepareScratchBytes(const TrainingArgs& args) const override;
  void PrepareTraining(const TrainingArgs& args, std::span<std::byte> scratch) const override;
  uint32_t TrainingTasks(const IndexDescriptor& index) const override;
  size_t TrainScratchBytes(const kernels::Exec& exec, const TrainingArgs& args) const override;
  TrainingResult Train(const kernels::Exec& exec, const TrainingArgs& args,
                       std::span<std::byte> scratch) const override;
  double MeasureInertia(const kernels::Exec& exec, const TrainingArgs& args,
                        std::span<std::byte> scratch) const override;
  size_t EncodeScratchBytes(const IndexDescriptor& index, const LayerShape& shape) const override;
  void Encode(const kernels::Exec& exec, const EncodeArgs& args,
              std::span<std::byte> scratch) const override;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_INDEXES_PQ_H_
