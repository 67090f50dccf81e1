#include "kvstore/read/indexes/flat.h"

#include "kernels/select/exact/exact_score.h"

namespace pqcached::kvstore {

const IndexTypeInfo& FlatIndex::info() const {
  static constexpr IndexTypeInfo kInfo = {
      .kind = IndexKind::kFlat,
      .name = "flat",
      .text = "Exact scores over all keys; needs no build.",
  };
  return kInfo;
}

Refusal FlatIndex::CheckFit(const IndexDescriptor& index, uint32_t, const char* field) const {
  if (index == IndexDescriptor{}) return {};
  return {StatusCode::kInvalidArgument, field, "flat has no parameters"};
}

std::string FlatIndex::NameOf(const IndexDescriptor&) const { return "flat"; }

SearchScratch FlatIndex::ScoreScratch(const LayerShape& shape, const IndexDescriptor&,
                                      const SearchPlanSize&) const {
  return {.work_bytes = kernels::ExactScoreScratchBytes(shape.group_size(), shape.key_dim)};
}

void FlatIndex::Score(const HeadSearch& search, const SearchPiece& piece, float* logits,
                      size_t stride) const {
  ScoreRowsOf(search, piece, logits, stride);
}

void ScoreRowsOf(const HeadSearch& search, const SearchPiece& piece, float* logits, size_t stride) {
  const LayerShape& shape = search.shape;
  const uint32_t group = shape.group_size();
  kernels::ExactScores(search.exec, {.dtype = shape.dtype,
                                     .key_dim = shape.key_dim,
                                     .row_stride_bytes = shape.row_bytes,
                                     .group_size = group,
                                     .token_count = piece.token_count(),
                                     .scale = shape.scale,
                                     .queries = search.queries,
                                     .rows = piece.segment->rows[search.kv_head] +
                                             size_t{piece.slot_begin} * shape.row_bytes,
                                     .score_stride = stride,
                                     .scores = {logits, (group - 1) * stride + piece.token_count()},
                                     .scratch = search.work});
}

}  // namespace pqcached::kvstore
