#include "kernels/pq_select.h"

#include <algorithm>

#include "kernels/check.h"
#include "kernels/scratch_cutter.h"
#include "kernels/value_select.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kMaxGroupSize = 64;
uint32_t SlotCount(const PqSpan& span) { return span.slot_end - span.slot_begin; }

// Adds the tables over the group, in the order of heads.
void SumTables(const PqSelectArgs& args, uint32_t codebook_count, std::span<float> sums) {
  const size_t table_floats = TableFloats(args.geometry);
  for (uint32_t codebook = 0; codebook < codebook_count; ++codebook) {
    const float* tables = args.tables.data() + codebook * args.group_size * table_floats;
    float* out = sums.data() + codebook * table_floats;
    for (size_t i = 0; i < table_floats; ++i) {
      float sum = ClampEntry(tables[i]);
      for (uint32_t head = 1; head < args.group_size; ++head) {
        sum += ClampEntry(tables[head * table_floats + i]);
      }
      out[i] = ClampEntry(sum);
    }
  }
}

// The specification.
void PqScoreReference(const PqScoreArgs& args) {
  const PqGeometry& g = args.geometry;
  const uint32_t slot_count = SlotCount(args.span);
  for (uint32_t head = 0; head < args.group_size; ++head) {
    const float* tables = args.tables.data() + head * TableFloats(g);
    for (uint32_t t = 0; t < slot_count; ++t) {
      float sum = 0.0f;
      for (uint32_t subspace = 0; subspace < g.subspace_count; ++subspace) {
        const uint32_t code = GetCode(g, args.span.planes, args.span.plane_stride, subspace,
                                      args.span.slot_begin + t);
        const float entry = ClampEntry(tables[subspace * CentroidCount(g) + code]);
        sum = subspace == 0 ? entry : sum + entry;
      }
      args.logits[size_t{head} * slot_count + t] = sum;
    }
  }
}

struct Shape {
  uint32_t codebook_count = 0;
  size_t candidate_count = 0;
};

Shape ShapeOf(const PqSelectArgs& args) {
  Shape shape;
  const size_t floats_per_codebook = args.group_size * TableFloats(args.geometry);
  shape.codebook_count = static_cast<uint32_t>(args.tables.size() / floats_per_codebook);
  PQC_CHECK(args.tables.size() == shape.codebook_count * floats_per_codebook);
  for (const PqSpan& span : args.spans) {
    PQC_CHECK(span.slot_begin <= span.slot_end);
    PQC_CHECK(span.codebook < shape.codebook_count || span.slot_begin == span.slot_end);
    shape.candidate_count += SlotCount(span);
  }
  return shape;
}

// Scores every candidate, then selects by value: the specification at Level::kReference, and what
// serves geometries without cells at the others.
void SelectByScores(const Exec& exec, const PqSelectArgs& args, const Shape& shape) {
  ScratchCutter scratch(args.scratch);
  const size_t table_floats = TableFloats(args.geometry);
  const bool mean = args.rule == GroupRule::kMeanLogit && args.group_size > 1;
  const uint32_t group_size = mean ? 1 : args.group_size;
  std::span<const float> tables = args.tables;
  if (mean) {
    const std::span<float> sums = scratch.Take<float>(shape.codebook_count * table_floats);
    SumTables(args, shape.codebook_count, sums);
    tables = sums;
  }
  const std::span<float> logits = scratch.Take<float>(group_size * shape.candidate_count);
  const std::span<float> values = scratch.Take<float>(shape.candidate_count);
  const std::span<float> work = scratch.Take<float>(shape.candidate_count);

  // The logits of one span are a block of [group_size, slots], one after another.
  Normaliser normalisers[kMaxGroupSize];
  size_t first = 0;
  for (const PqSpan& span : args.spans) {
    const size_t slots = SlotCount(span);
    if (slots == 0) continue;
    const std::span<float> block = logits.subspan(first * group_size, slots * group_size);
    PqScore(exec, {.geometry = args.geometry,
                   .group_size = group_size,
                   .span = span,
                   .tables = tables.subspan(span.codebook * group_size * table_floats,
                                            group_size * table_floats),
                   .logits = block});
    for (uint32_t head = 0; head < group_size; ++head) {
      AddToMax(exec, block.subspan(head * slots, slots), normalisers[head]);
    }
    first += slots;
  }
  if (NeedsNormalisers(args.rule, group_size)) {
    first = 0;
    for (const PqSpan& span : args.spans) {
      const size_t slots = SlotCount(span);
      for (uint32_t head = 0; head < group_size; ++head) {
        AddToSum(exec, logits.subspan(first * group_size + head * slots, slots), normalisers[head]);
      }
      first += slots;
    }
  }
  first = 0;
  for (const PqSpan& span : args.spans) {
    const size_t slots = SlotCount(span);
    GroupValues(exec, {.group_size = group_size,
                       .rule = args.rule,
                       .logits = logits.data() + first * group_size,
                       .head_stride = slots,
                       .normalisers = {normalisers, group_size},
                       .values = values.subspan(first, slots)});
    first += slots;
  }

  const auto k = static_cast<uint32_t>(args.positions.size());
  ValueThreshold threshold = FindThreshold(exec, values, k, work);
  uint32_t written = 0;
  first = 0;
  for (const PqSpan& span : args.spans) {
    const size_t slots = SlotCount(span);
    written =
        EmitSelected(exec, values.subspan(first, slots), span.first_position + span.slot_begin,
                     threshold, args.positions, written);
    first += slots;
  }
  PQC_CHECK(written == k);
}

}  // namespace

size_t PqSelectScratchBytes(const Exec& exec, const PqSelectShape& shape) {
  (void)exec;
  size_t bytes = ScratchAligned(shape.codebook_count * TableFloats(shape.geometry) * sizeof(float));
  bytes += ScratchAligned(size_t{shape.group_size} * shape.candidate_count * sizeof(float));
  bytes += 2 * ScratchAligned(size_t{shape.candidate_count} * sizeof(float));
  return bytes;
}

void PqSelect(const Exec& exec, const PqSelectArgs& args) {
  PQC_CHECK(IsValid(args.geometry));
  PQC_CHECK(args.group_size >= 1 && args.group_size <= kMaxGroupSize);
  const Shape shape = ShapeOf(args);
  PQC_CHECK(args.positions.size() <= shape.candidate_count);
  if (args.positions.empty()) return;
  SelectByScores(exec, args, shape);
}

void PqScore(const Exec& exec, const PqScoreArgs& args) {
  PQC_CHECK(IsValid(args.geometry));
  PQC_CHECK(args.span.slot_begin <= args.span.slot_end);
  PQC_CHECK(args.tables.size() == args.group_size * TableFloats(args.geometry));
  PQC_CHECK(args.logits.size() == size_t{args.group_size} * SlotCount(args.span));
  (void)exec;
  PqScoreReference(args);
}

void PqCountCells(const Exec& exec, const PqCountCellsArgs& args) {
  PQC_CHECK(HasCells(args.geometry));
  PQC_CHECK(args.cell_counts.size() == CellCount(args.geometry));
  (void)exec;
  for (uint32_t slot = args.slot_begin; slot < args.slot_end; ++slot) {
    ++args.cell_counts[GetCell(args.geometry, args.planes, args.plane_stride, slot)];
  }
}

}  // namespace pqcached::kernels
