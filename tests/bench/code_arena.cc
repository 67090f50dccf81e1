#include "tests/bench/code_arena.h"

#include <cmath>
#include <random>

#include "kernels/select/cells/pq_postings.h"
#include "kernels/select/pq_table.h"

namespace pqcached::bench {

using kernels::PqGeometry;

std::vector<float> NormalFloats(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

CodeArena::CodeArena(const PqGeometry& geometry, uint32_t head_count, uint32_t token_count,
                     uint64_t seed)
    : geometry_(geometry),
      head_count_(head_count),
      token_count_(token_count),
      head_bytes_(kernels::CodePlanesBytes(geometry, token_count)),
      memory_(head_bytes_ * head_count),
      counts_(HasCells(geometry) ? CellCount(geometry) * sizeof(uint32_t) * head_count : 0),
      list_begins_(HasCells(geometry)
                       ? PostingBeginCount(geometry, token_count) * sizeof(uint16_t) * head_count
                       : 0),
      list_slots_(HasCells(geometry) ? size_t{token_count} * sizeof(uint16_t) * head_count : 0) {
  const uint8_t mask =
      kernels::HasNibblePlanes(geometry) ? 0xff : static_cast<uint8_t>((1u << geometry.bits) - 1);
  std::vector<std::byte> pool(size_t{4} << 20);
  std::mt19937_64 random(seed);
  for (std::byte& code : pool) code = static_cast<std::byte>(random() & mask);
  FillFromPool(memory_.bytes(), pool, seed + 1);
  if (!kernels::HasCells(geometry)) return;
  for (uint32_t head = 0; head < head_count; ++head) BuildCellIndex(head);
}

void CodeArena::BuildCellIndex(uint32_t head) {
  const kernels::PqSpan span = Span(head);
  const size_t begin_count = kernels::PostingBeginCount(geometry_, token_count_);
  kernels::PqCountCells({}, {geometry_,
                             span.planes,
                             span.plane_stride,
                             0,
                             token_count_,
                             {counts_.As<uint32_t>() + size_t{head} * CellCount(geometry_),
                              kernels::CellCount(geometry_)}});
  kernels::PqBuildPostings(
      {}, {geometry_,
           span.planes,
           span.plane_stride,
           0,
           token_count_,
           {list_begins_.As<uint16_t>() + size_t{head} * begin_count, begin_count},
           {list_slots_.As<uint16_t>() + size_t{head} * token_count_, token_count_}});
}

kernels::PqSpan CodeArena::Span(uint32_t head) const {
  kernels::PqSpan span;
  span.planes = Planes(head);
  span.plane_stride = plane_stride();
  span.slot_end = token_count_;
  if (!kernels::HasCells(geometry_)) return span;
  span.cell_counts = counts_.As<uint32_t>() + size_t{head} * kernels::CellCount(geometry_);
  span.counted_end = token_count_;
  span.posting_begins = list_begins_.As<uint16_t>() +
                        size_t{head} * kernels::PostingBeginCount(geometry_, token_count_);
  span.posting_slots = list_slots_.As<uint16_t>() + size_t{head} * token_count_;
  return span;
}

QueryPool::QueryPool(const PqGeometry& geometry, uint32_t group_size, uint64_t seed)
    : geometry_(geometry),
      group_size_(group_size),
      scale_(2.0f / std::sqrt(static_cast<float>(geometry.key_dim))),
      centroids_(NormalFloats(kernels::CentroidFloats(geometry), seed)),
      queries_(NormalFloats(size_t{kQueries} * group_size * geometry.key_dim, seed + 1)),
      tables_(kQueries * group_size * kernels::TableFloats(geometry)) {
  const size_t floats = group_size * kernels::TableFloats(geometry);
  for (uint32_t i = 0; i < kQueries; ++i) {
    kernels::BuildTables({}, {geometry, group_size, Queries(i), scale_, centroids_,
                              std::span(tables_).subspan(i * floats, floats)});
  }
}

std::span<const float> QueryPool::Queries(uint32_t index) const {
  const size_t floats = size_t{group_size_} * geometry_.key_dim;
  return std::span(queries_).subspan(index % kQueries * floats, floats);
}

std::span<const float> QueryPool::Tables(uint32_t index) const {
  const size_t floats = group_size_ * kernels::TableFloats(geometry_);
  return std::span(tables_).subspan(index % kQueries * floats, floats);
}

Selector::Selector(const PqGeometry& geometry, uint32_t group_size, uint32_t token_count,
                   kernels::Exec exec)
    : exec_(exec),
      tables_(group_size * kernels::TableFloats(geometry)),
      positions_(token_count),
      scratch_(kernels::PqSelectScratchBytes(exec, {geometry, group_size, 1, token_count})) {}

std::span<const uint32_t> Selector::Select(const CodeArena& arena, uint32_t head,
                                           uint32_t group_size, std::span<const float> tables,
                                           uint32_t k) {
  const kernels::PqSpan span = arena.Span(head);
  const std::span<uint32_t> positions = std::span(positions_).first(k);
  kernels::PqSelect(
      exec_, {arena.geometry(), group_size, kernels::GroupRule::kSumSoftmax, std::span(&span, 1),
              tables.first(group_size * kernels::TableFloats(arena.geometry())), positions,
              scratch_.bytes()});
  return positions;
}

std::span<const uint32_t> Selector::BuildAndSelect(const CodeArena& arena, uint32_t head,
                                                   const QueryPool& pool, uint32_t query,
                                                   uint32_t group_size, uint32_t k) {
  const std::span<float> tables =
      std::span(tables_).first(group_size * kernels::TableFloats(arena.geometry()));
  kernels::BuildTables(exec_,
                       {arena.geometry(), group_size,
                        pool.Queries(query).first(size_t{group_size} * arena.geometry().key_dim),
                        pool.scale(), pool.centroids(), tables});
  return Select(arena, head, group_size, tables, k);
}

}  // namespace pqcached::bench
