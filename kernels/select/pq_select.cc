#include "kernels/select/pq_select.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/select/pq_score.h"
#include "kernels/select/pq_select_paths.h"
#include "kernels/select/value_select.h"

namespace pqcached::kernels {
namespace {

uint32_t SlotCount(const PqSpan& span) { return span.slot_end - span.slot_begin; }

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

PqSelectPlan MakePlan(const PqSelectArgs& args) {
  PqSelectPlan plan;
  const size_t floats_per_codebook = args.group_size * TableFloats(args.geometry);
  plan.codebook_count = static_cast<uint32_t>(args.tables.size() / floats_per_codebook);
  PQC_CHECK(args.tables.size() == plan.codebook_count * floats_per_codebook);
  for (const PqSpan& span : args.spans) {
    PQC_CHECK(span.slot_begin <= span.slot_end);
    PQC_CHECK(span.codebook < plan.codebook_count || span.slot_begin == span.slot_end);
    plan.candidate_count += SlotCount(span);
  }
  plan.head_count = args.rule == GroupRule::kMeanLogit ? 1 : args.group_size;
  return plan;
}

}  // namespace

void FillTables(const PqSelectArgs& args, const PqSelectPlan& plan, std::span<float> tables) {
  const size_t table_floats = TableFloats(args.geometry);
  const uint32_t summed_count = args.group_size / plan.head_count;
  for (size_t row = 0; row < size_t{plan.codebook_count} * plan.head_count; ++row) {
    const float* in = args.tables.data() + row * summed_count * table_floats;
    float* out = tables.data() + row * table_floats;
    for (size_t i = 0; i < table_floats; ++i) out[i] = ClampEntry(in[i]);
    if (summed_count == 1) continue;
    for (uint32_t head = 1; head < summed_count; ++head) {
      in += table_floats;
      for (size_t i = 0; i < table_floats; ++i) out[i] += ClampEntry(in[i]);
    }
    for (size_t i = 0; i < table_floats; ++i) out[i] = ClampEntry(out[i]);
  }
}

size_t ScoreAllScratchBytes(const PqSelectShape& shape) {
  const size_t candidates = shape.candidate_count;
  const size_t table_floats =
      size_t{shape.codebook_count} * shape.group_size * TableFloats(shape.geometry);
  return ScratchAligned(table_floats * sizeof(float)) +
         ScratchAligned(shape.group_size * candidates * sizeof(float)) +
         2 * ScratchAligned(candidates * sizeof(float));
}

// Scores every candidate, then selects by value. This is the specification at Level::kReference.
void SelectByScores(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan) {
  ScratchCutter scratch(args.scratch);
  const size_t table_floats = plan.head_count * TableFloats(args.geometry);
  const uint32_t group_size = plan.head_count;
  const std::span<float> tables = scratch.Take<float>(plan.codebook_count * table_floats);
  FillTables(args, plan, tables);
  const std::span<float> logits = scratch.Take<float>(size_t{group_size} * plan.candidate_count);
  const std::span<float> values = scratch.Take<float>(plan.candidate_count);
  const std::span<float> work = scratch.Take<float>(plan.candidate_count);

  // The logits of each span are a block of [group_size, slots]; blocks follow each other.
  Normaliser normalisers[kMaxGroupSize];
  const bool normalised = NeedsNormalisers(args.rule, group_size);
  size_t first = 0;
  for (const PqSpan& span : args.spans) {
    const size_t slots = SlotCount(span);
    if (slots == 0) continue;
    const std::span<float> block = logits.subspan(first * group_size, slots * group_size);
    PqScore(exec, {.geometry = args.geometry,
                   .group_size = group_size,
                   .span = span,
                   .tables = tables.subspan(span.codebook * table_floats, table_floats),
                   .logits = block});
    for (uint32_t head = 0; normalised && head < group_size; ++head) {
      AddToMax(exec, block.subspan(head * slots, slots), normalisers[head]);
    }
    first += slots;
  }
  first = 0;
  for (const PqSpan& span : args.spans) {
    const size_t slots = SlotCount(span);
    for (uint32_t head = 0; normalised && head < group_size; ++head) {
      AddToSum(exec, logits.subspan(first * group_size + head * slots, slots), normalisers[head]);
    }
    first += slots;
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

size_t PqSelectScratchBytes(const Exec& exec, const PqSelectShape& shape) {
  if (exec.level > Level::kReference && HasCells(shape.geometry)) {
    return CellSelectScratchBytes(shape);
  }
  if (exec.level == Level::kReference) return ScoreAllScratchBytes(shape);
  return std::max({ScoreAllScratchBytes(shape), BlockSelectScratchBytes(shape),
                   RoughSelectScratchBytes(shape)});
}

void PqSelect(const Exec& exec, const PqSelectArgs& args) {
  PQC_CHECK(IsValid(args.geometry) && HasSelect(args.geometry));
  PQC_CHECK(args.group_size >= 1 && args.group_size <= kMaxGroupSize);
  const PqSelectPlan plan = MakePlan(args);
  PQC_CHECK(args.positions.size() <= plan.candidate_count);
  if (args.positions.empty()) return;
  if (exec.level > Level::kReference && HasCells(args.geometry)) {
    SelectByCells(exec, args, plan);
  } else if (exec.level > Level::kReference) {
    if (!SelectByRoughScores(exec, args, plan)) SelectByBlocks(exec, args, plan);
  } else {
    SelectByScores(exec, args, plan);
  }
}

void PqScore(const Exec& exec, const PqScoreArgs& args) {
  PQC_CHECK(IsValid(args.geometry));
  PQC_CHECK(args.span.slot_begin <= args.span.slot_end);
  PQC_CHECK(args.tables.size() == args.group_size * TableFloats(args.geometry));
  PQC_CHECK(args.logits.size() == size_t{args.group_size} * SlotCount(args.span));
  if (exec.level == Level::kReference) return PqScoreReference(args);
  const PqScoreTask task = {.subspace_count = args.geometry.subspace_count,
                            .bits = args.geometry.bits,
                            .nibble_planes = HasNibblePlanes(args.geometry),
                            .group_size = args.group_size,
                            .planes = args.span.planes + args.span.slot_begin,
                            .plane_stride = args.span.plane_stride,
                            .slot_count = SlotCount(args.span),
                            .tables = args.tables.data(),
                            .logits = args.logits.data()};
#if defined(PQCACHED_X86)
  if (exec.level >= Level::kAvx512Vbmi && task.bits >= 7) return PqScoreAvx512Vbmi(task);
  if (exec.level >= Level::kAvx512 && task.bits >= 4) return PqScoreAvx512(task);
#endif
  PqScorePortable(task);
}

void PqCountCells(const Exec& exec, const PqCountCellsArgs& args) {
  PQC_CHECK(HasCells(args.geometry));
  PQC_CHECK(args.cell_counts.size() == CellCount(args.geometry));
  if (exec.level > Level::kReference) {
    PqSpan span;
    span.planes = args.planes;
    span.plane_stride = args.plane_stride;
    AddCells(args.geometry, span, {args.slot_begin, args.slot_end}, 1, args.cell_counts);
    return;
  }
  for (uint32_t slot = args.slot_begin; slot < args.slot_end; ++slot) {
    ++args.cell_counts[GetCell(args.geometry, args.planes, args.plane_stride, slot)];
  }
}

}  // namespace pqcached::kernels
