// FlatIndex: exact scores over the rows. It has no parameters and no memory, and is never built.
#ifndef PQCACHED_KVSTORE_READ_INDEXES_FLAT_H_
#define PQCACHED_KVSTORE_READ_INDEXES_FLAT_H_

#include <string>

#include "kvstore/read/indexes/index_type.h"

namespace pqcached::kvstore {

class FlatIndex final : public IndexType {
 public:
  const IndexTypeInfo& info() const override;
  uint32_t ValueOf(const IndexDescriptor&, size_t) const override { return 0; }
  void SetValue(IndexDescriptor*, size_t, uint32_t) const override {}
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
};

// Writes the scaled logits of the rows of a piece, as IndexType::Score. `search.work`:
// ExactScoreScratchBytes.
void ScoreRowsOf(const HeadSearch& search, const SearchPiece& piece, float* logits, size_t stride);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_INDEXES_FLAT_H_
