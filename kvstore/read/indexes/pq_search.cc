#include <algorithm>
#include <new>

#include "kernels/select/pq_select.h"
#include "kernels/select/pq_table.h"
#include "kernels/train/rotate.h"
#include "kvstore/read/indexes/pq.h"

namespace pqcached::kvstore {
namespace {

kernels::PqSpan SpanOf(const SearchPiece& piece, uint32_t kv_head) {
  const IndexDataHeader& header = *piece.segment->index_data;
  kernels::PqSpan span{.planes = Planes(header, kv_head),
                       .plane_stride = header.plane_stride_bytes,
                       .slot_begin = piece.slot_begin,
                       .slot_end = piece.slot_end,
                       .first_position = piece.segment->first_position,
                       .codebook = piece.codebook};
  if (header.cell_count == 0) return span;
  const uint32_t counted_end = header.counted_end.load(std::memory_order_acquire);
  const uint32_t overlap_begin = std::max(header.counted_begin, piece.slot_begin);
  const uint32_t overlap_end = std::min(counted_end, piece.slot_end);
  if (overlap_begin >= overlap_end) return span;
  span.counted_begin = header.counted_begin;
  span.counted_end = counted_end;
  if (header.posting_slots_stride_bytes > 0) {
    span.posting_begins = PostingBegins(header, kv_head);
    span.posting_slots = PostingSlots(header, kv_head);
  }
  // Stored counts save a pass over the slots, but each slot that lies in only one of the two ranges
  // needs a correction.
  const uint32_t overlap = overlap_end - overlap_begin;
  const uint32_t differing =
      piece.token_count() - overlap + (counted_end - header.counted_begin) - overlap;
  if (differing <= piece.token_count() / 2) span.cell_counts = CellCounts(header, kv_head);
  return span;
}

// Returns the bytes of the tables of one codebook, [G, m, 2^b].
size_t TableBytes(const LayerShape& shape, const IndexDescriptor& index) {
  return shape.group_size() * sizeof(float) *
         kernels::TableFloats(GeometryOf(index, shape.key_dim));
}

// Returns the tables of all codebooks, [codebooks, G, m, 2^b].
std::span<float> Tables(const HeadSearch& search) {
  return {reinterpret_cast<float*>(search.prepared.data()),
          search.plan.codebooks.size() * TableBytes(search.shape, search.index) / sizeof(float)};
}

// Returns the bytes behind the tables that rotated queries and their rotation take.
size_t RotationBytes(const LayerShape& shape, const IndexDescriptor& index) {
  if (!IsWeighted(index)) return 0;
  return PaddedBytes(shape.group_size() * shape.key_dim * sizeof(float)) +
         kernels::RotateScratchBytes(shape.key_dim);
}

// Returns the queries that a codebook's centroids are multiplied with.
std::span<const float> QueriesOf(const HeadSearch& search, const CodebookHeader& codebook) {
  if (!IsWeighted(search.index)) return search.queries;
  const LayerShape& shape = search.shape;
  const std::span<std::byte> work = search.prepared.last(RotationBytes(search.shape, search.index));
  const size_t bytes = PaddedBytes(search.queries.size_bytes());
  const std::span<float> rotated(reinterpret_cast<float*>(work.data()), search.queries.size());
  kernels::RotateRows(search.exec,
                      {.dtype = kernels::DType::kF32,
                       .rows = reinterpret_cast<const std::byte*>(search.queries.data()),
                       .row_stride = shape.key_dim * sizeof(float),
                       .row_count = shape.group_size(),
                       .dim = shape.key_dim,
                       .map = KeyMapsOf(codebook, search.kv_head).queries,
                       .first_output = 0,
                       .output_count = shape.key_dim,
                       .outputs = rotated.data(),
                       .scratch = work.subspan(bytes)});
  return rotated;
}

size_t SpanBytes(const SearchPlanSize& plan) {
  return PaddedBytes(plan.piece_count * sizeof(kernels::PqSpan));
}

}  // namespace

SearchScratch PqIndex::ScoreScratch(const LayerShape& shape, const IndexDescriptor& index,
                                    const SearchPlanSize& plan) const {
  const size_t tables = plan.codebook_count * TableBytes(shape, index);
  const size_t rotation = RotationBytes(shape, index);
  return {.prepared_bytes = rotation == 0 ? tables : PaddedBytes(tables) + rotation};
}

void PqIndex::Prepare(const HeadSearch& search) const {
  const uint32_t group = search.shape.group_size();
  const size_t floats =
      group * kernels::TableFloats(GeometryOf(search.index, search.shape.key_dim));
  for (size_t i = 0; i < search.plan.codebooks.size(); ++i) {
    const CodebookHeader& codebook = *search.plan.codebooks[i];
    kernels::BuildTables(search.exec, {.geometry = GeometryOf(codebook),
                                       .group_size = group,
                                       .queries = QueriesOf(search, codebook),
                                       .scale = search.shape.scale,
                                       .centroids = Centroids(codebook, search.kv_head),
                                       .tables = Tables(search).subspan(i * floats, floats)});
  }
}

void PqIndex::Score(const HeadSearch& search, const SearchPiece& piece, float* logits,
                    size_t stride) const {
  const uint32_t group = search.shape.group_size();
  const kernels::PqGeometry geometry = GeometryOf(search.index, search.shape.key_dim);
  const size_t floats = kernels::TableFloats(geometry);
  // Heads are scored one at a time, because rows of `logits` are `stride` apart.
  for (uint32_t head = 0; head < group; ++head) {
    kernels::PqScore(search.exec, {.geometry = geometry,
                                   .group_size = 1,
                                   .span = SpanOf(piece, search.kv_head),
                                   .tables = Tables(search).subspan(
                                       (size_t{piece.codebook} * group + head) * floats, floats),
                                   .logits = {logits + head * stride, piece.token_count()}});
  }
}

// The kernel adds plain table entries and cannot apply a softcap.
bool PqIndex::Selects(const LayerShape& shape, const IndexDescriptor& index) const {
  return shape.softcap <= 0 && kernels::HasSelect(GeometryOf(index, shape.key_dim));
}

SearchScratch PqIndex::SelectScratch(const kernels::Exec& exec, const LayerShape& shape,
                                     const IndexDescriptor& index,
                                     const SearchPlanSize& plan) const {
  SearchScratch scratch = ScoreScratch(shape, index, plan);
  scratch.work_bytes =
      SpanBytes(plan) + kernels::PqSelectScratchBytes(
                            exec, {.geometry = GeometryOf(index, shape.key_dim),
                                   .group_size = shape.group_size(),
                                   .codebook_count = static_cast<uint32_t>(plan.codebook_count),
                                   .candidate_count = plan.token_count});
  return scratch;
}

void PqIndex::Select(const HeadSearch& search, GroupRule rule,
                     std::span<uint32_t> positions) const {
  auto* const spans = reinterpret_cast<kernels::PqSpan*>(search.work.data());
  size_t count = 0;
  for (const SearchPiece& piece : search.plan.pieces) {
    new (spans + count++) kernels::PqSpan(SpanOf(piece, search.kv_head));
  }
  const size_t span_bytes = SpanBytes({.piece_count = count});
  kernels::PqSelect(search.exec, {.geometry = GeometryOf(search.index, search.shape.key_dim),
                                  .group_size = search.shape.group_size(),
                                  .rule = rule,
                                  .spans = {spans, count},
                                  .tables = Tables(search),
                                  .positions = positions,
                                  .scratch = search.work.subspan(span_bytes)});
}

}  // namespace pqcached::kvstore
