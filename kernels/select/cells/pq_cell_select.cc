#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/select/cells/pq_cell_emit.h"
#include "kernels/select/cells/pq_cells.h"
#include "kernels/select/cells/pq_postings.h"
#include "kernels/select/pq_select_paths.h"

namespace pqcached::kernels {
namespace {

// Weights are products of factors when every logit, and the distance of any two logits, is below
// this limit: then rounding stays within the bound of PqSelect, and no weight is small enough to
// count as zero.
constexpr float kMaxProductLogit = -kMinExponent;

// Returns the part of a span that contains candidates and is covered by the cell counts; may be
// empty.
SlotRange Common(const PqSpan& span) {
  const uint32_t begin = std::max(span.slot_begin, span.counted_begin);
  return {begin, std::max(begin, std::min(span.slot_end, span.counted_end))};
}

uint32_t Size(SlotRange slots) { return slots.end - slots.begin; }

// One selection over cells. Arrays have the shape [codebook, cell] unless stated otherwise.
class CellSelection {
 public:
  CellSelection(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan)
      : exec_(exec),
        ops_(CellOpsFor(exec)),
        args_(args),
        plan_(plan),
        geometry_(args.geometry),
        cell_count_(CellCount(args.geometry)) {
    ScratchCutter scratch(args.scratch);
    const size_t total = size_t{plan.codebook_count} * cell_count_;
    const size_t table_floats = plan.codebook_count * plan.head_count * TableFloats(geometry_);
    tables_ = scratch.Take<float>(table_floats);
    factors_ = scratch.Take<float>(table_floats);
    token_sums_ = scratch.Take<uint32_t>(total);
    values_ = scratch.Take<float>(total);
    logits_ = scratch.Take<float>(total);
    work_ = scratch.Take<uint32_t>(2 * total);
    codebooks_ = scratch.Take<CodebookEmission>(plan.codebook_count);
    listed_cells_ = scratch.Take<uint16_t>(total);
    lists_ = scratch.Take<CellListScratch>(1);
    at_least_ = scratch.Take<uint8_t>(total / 8);
    above_ = scratch.Take<uint8_t>(total / 8);
    FillTables(args, plan, tables_);
  }

  void Run() {
    const auto k = static_cast<uint32_t>(args_.positions.size());
    CountTokens();
    FindValues();
    const CellThreshold threshold = ops_.find_threshold(values_.data(), tokens_, values_.size(),
                                                        plan_.candidate_count, k, work_.data());
    ops_.compare(values_.data(), tokens_, values_.size(), threshold.value, at_least_.data(),
                 above_.data());
    EmitCells({.exec = exec_,
               .ops = ops_,
               .args = args_,
               .plan = plan_,
               .cell_count = cell_count_,
               .tokens = tokens_,
               .at_least = at_least_.data(),
               .above = above_.data(),
               .tables = tables_.data(),
               .threshold = threshold,
               .codebooks = codebooks_,
               .listed_cells = listed_cells_,
               .lists = lists_.data()});
  }

 private:
  size_t TableIndex(uint32_t codebook, uint32_t head) const {
    return (size_t{codebook} * plan_.head_count + head) * TableFloats(geometry_);
  }

  void CountTokens() {
    const PqSpan* only = nullptr;
    uint32_t span_count = 0;
    for (const PqSpan& span : args_.spans) {
      if (span.slot_begin == span.slot_end) continue;
      only = &span;
      ++span_count;
    }
    if (plan_.codebook_count == 1 && span_count == 1 && only->cell_counts != nullptr &&
        only->counted_begin == only->slot_begin && only->counted_end == only->slot_end) {
      tokens_ = only->cell_counts;
      for (uint32_t cell = 0; cell < cell_count_; cell += 16) __builtin_prefetch(tokens_ + cell);
      return;
    }
    tokens_ = token_sums_.data();
    std::fill(token_sums_.begin(), token_sums_.end(), 0u);
    for (const PqSpan& span : args_.spans) AddSpanTokens(span);
    AddPendingLists();
  }

  std::span<uint32_t> TokensOf(uint32_t codebook) const {
    return token_sums_.subspan(size_t{codebook} * cell_count_, cell_count_);
  }

  // Adds the candidates of a span, starting from its counts when these are nearly right. Its lists
  // are deferred until several can be added together.
  void AddSpanTokens(const PqSpan& span) {
    const std::span<uint32_t> tokens = TokensOf(span.codebook);
    const uint32_t begin = span.slot_begin;
    const uint32_t end = span.slot_end;
    const SlotRange common = Common(span);
    const bool counted = span.cell_counts != nullptr || span.posting_begins != nullptr;
    if (!counted || Size(common) == 0 ||
        end - begin + span.counted_end - span.counted_begin - 2 * Size(common) > end - begin) {
      AddCells(geometry_, span, {begin, end}, 1, tokens);
      return;
    }
    AddCounted(span, tokens);
    constexpr uint32_t kMinusOne = ~0u;
    AddCells(geometry_, span, {begin, common.begin}, 1, tokens);
    AddCells(geometry_, span, {common.end, end}, 1, tokens);
    AddCells(geometry_, span, {span.counted_begin, common.begin}, kMinusOne, tokens);
    AddCells(geometry_, span, {common.end, span.counted_end}, kMinusOne, tokens);
  }

  // Adds the counts of all counted slots, from the posting lists when these are shorter to read.
  void AddCounted(const PqSpan& span, std::span<uint32_t> tokens) {
    const uint32_t slot_count = span.counted_end - span.counted_begin;
    const uint32_t page_count = PostingPageCount(slot_count);
    if (span.posting_begins == nullptr || (span.cell_counts != nullptr && page_count > 1)) {
      ops_.add_counts(span.cell_counts, cell_count_, tokens.data());
      return;
    }
    if (page_count == 1) return HoldLists(span, slot_count);
    const uint16_t* const begins = span.posting_begins;
    for (size_t i = 0; i < size_t{cell_count_} * page_count; ++i) {
      tokens[i / page_count] += static_cast<uint16_t>(begins[i + page_count] - begins[i]);
    }
  }

  void HoldLists(const PqSpan& span, uint32_t slot_count) {
    if (pending_lists_.count > 0 &&
        (pending_lists_.codebook != span.codebook ||
         pending_lists_.slot_count + slot_count > std::numeric_limits<uint16_t>::max())) {
      AddPendingLists();
    }
    pending_lists_.codebook = span.codebook;
    pending_lists_.begins[pending_lists_.count++] = span.posting_begins;
    pending_lists_.slot_count += slot_count;
    if (pending_lists_.count == kMaxSummedLists) AddPendingLists();
  }

  void AddPendingLists() {
    if (pending_lists_.count == 0) return;
    ops_.add_list_counts(pending_lists_.begins, pending_lists_.count, cell_count_,
                         TokensOf(pending_lists_.codebook).data());
    pending_lists_.count = 0;
    pending_lists_.slot_count = 0;
  }

  // Computes the logits of all cells under one head of the plan.
  void FindLogits(uint32_t head, std::span<float> logits) const {
    const uint32_t centroid_count = CentroidCount(geometry_);
    for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
      const float* table = tables_.data() + TableIndex(codebook, head);
      float* out = logits.data() + size_t{codebook} * cell_count_;
      if (geometry_.subspace_count == 1) {
        std::copy(table, table + centroid_count, out);
      } else {
        ops_.add_outer(table, centroid_count, table + centroid_count, centroid_count, out);
      }
    }
  }

  // Sets factors_ so that the weight of a cell under a head, relative to offsets_, is the product
  // of its factors, as its logit is the sum of its entries. Returns false when the logits are too
  // large or too far apart.
  bool FindFactors() {
    const uint32_t centroid_count = CentroidCount(geometry_);
    for (uint32_t head = 0; head < plan_.head_count; ++head) {
      float magnitude = 0.0f;
      float distance = 0.0f;
      for (uint32_t subspace = 0; subspace < geometry_.subspace_count; ++subspace) {
        EntryRange all = {.least = kEntryLimit, .largest = -kEntryLimit};
        for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
          const size_t first = TableIndex(codebook, head) + subspace * centroid_count;
          const EntryRange range = ops_.range(tables_.data() + first, centroid_count);
          all.least = std::min(all.least, range.least);
          all.largest = std::max(all.largest, range.largest);
        }
        offsets_[head] = subspace == 0 ? all.largest : offsets_[head] + all.largest;
        magnitude += std::max(std::abs(all.least), std::abs(all.largest));
        distance += all.largest - all.least;
        if (magnitude > kMaxProductLogit || distance > kMaxProductLogit) return false;
        for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
          const size_t first = TableIndex(codebook, head) + subspace * centroid_count;
          ops_.exponentials(tables_.data() + first, centroid_count, all.largest,
                            factors_.data() + first);
        }
      }
    }
    return true;
  }

  // Returns the factors of one codebook for all heads from `head` on.
  CellFactors Factors(uint32_t codebook, uint32_t head) const {
    const float* first = factors_.data() + TableIndex(codebook, head);
    const size_t stride = TableFloats(geometry_);
    const uint32_t centroid_count = CentroidCount(geometry_);
    if (geometry_.subspace_count == 1) return {&row_of_one_, 0, 1, first, stride, centroid_count};
    return {first, stride, centroid_count, first + centroid_count, stride, centroid_count};
  }

  // Returns the sum of the weights of all candidates, computed from the factors.
  double WeightSum(uint32_t head) const {
    double sum = 0.0;
    for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
      sum += ops_.sum_products(Factors(codebook, head), tokens_ + size_t{codebook} * cell_count_);
    }
    return sum;
  }

  // Computes values under kSumSoftmax from the factors, with exponentials of table entries only.
  void FindValuesByFactors() {
    for (uint32_t head = 0; head < plan_.head_count; ++head) {
      const auto scale = static_cast<float>(1.0 / WeightSum(head));
      for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
        // The factors of the last sub-space, the only one that always exists.
        float* const last = factors_.data() + TableIndex(codebook, head) +
                            (geometry_.subspace_count - 1) * CentroidCount(geometry_);
        for (uint32_t i = 0; i < CentroidCount(geometry_); ++i) last[i] *= scale;
      }
    }
    for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
      ops_.add_products(Factors(codebook, 0), plan_.head_count,
                        values_.data() + size_t{codebook} * cell_count_);
    }
  }

  void FindValues() {
    if (plan_.head_count == 1) return FindLogits(0, values_);
    if (args_.rule == GroupRule::kMaxLogit) return FindLargestLogits();
    const bool by_factors = FindFactors();
    const bool sum = args_.rule == GroupRule::kSumSoftmax;
    if (sum && by_factors) return FindValuesByFactors();
    const size_t total = values_.size();
    std::fill(values_.begin(), values_.end(), sum ? 0.0f : std::numeric_limits<float>::lowest());
    for (uint32_t head = 0; head < plan_.head_count; ++head) {
      FindLogits(head, logits_);
      if (by_factors) {
        const auto log_sum = static_cast<float>(std::log(WeightSum(head)));
        ops_.update_max(logits_.data(), offsets_[head], log_sum, total, values_.data());
        continue;
      }
      const float max = ops_.largest(logits_.data(), tokens_, total, -kLogitLimit);
      float* const weights = sum ? logits_.data() : reinterpret_cast<float*>(work_.data());
      if (!sum) std::copy(logits_.begin(), logits_.end(), weights);
      const double weight_sum = ops_.weigh(weights, tokens_, total, max);
      if (sum) {
        ops_.add_scaled(weights, static_cast<float>(1.0 / weight_sum), total, values_.data());
      } else {
        const auto log_sum = static_cast<float>(std::log(weight_sum));
        ops_.update_max(logits_.data(), max, log_sum, total, values_.data());
      }
    }
  }

  void FindLargestLogits() {
    FindLogits(0, values_);
    for (uint32_t head = 1; head < plan_.head_count; ++head) {
      FindLogits(head, logits_);
      ops_.update_max(logits_.data(), 0.0f, 0.0f, values_.size(), values_.data());
    }
  }

  const Exec& exec_;
  const CellOps& ops_;
  const PqSelectArgs& args_;
  const PqSelectPlan& plan_;
  const PqGeometry& geometry_;
  const uint32_t cell_count_;  // cells per codebook
  const float row_of_one_ = 1.0f;
  float offsets_[kMaxGroupSize];  // offsets of the factors: sums of the largest entries
  std::span<float> tables_;       // [codebook, head of the plan, TableFloats], clamped
  std::span<float> factors_;      // the same shape
  const uint32_t* tokens_ = nullptr;
  std::span<uint32_t> token_sums_;
  // Lists of one codebook that have not been added to token_sums_ yet.
  struct {
    const uint16_t* begins[kMaxSummedLists];
    uint32_t count = 0;
    uint32_t slot_count = 0;
    uint32_t codebook = 0;
  } pending_lists_;
  std::span<float> values_;
  std::span<float> logits_;  // logits of one head, replaced by its weights
  std::span<uint32_t> work_;
  std::span<CodebookEmission> codebooks_;
  std::span<uint16_t> listed_cells_;
  std::span<CellListScratch> lists_;
  std::span<uint8_t> at_least_;  // bits
  std::span<uint8_t> above_;     // bits
};

}  // namespace

const CellOps& CellOpsFor(const Exec& exec) {
#if defined(PQCACHED_X86)
  if (exec.level >= Level::kAvx512) return kCellOpsAvx512;
  if (exec.level >= Level::kAvx2) return kCellOpsAvx2;
#elif defined(PQCACHED_NEON)
  if (exec.level == Level::kNeon) return kCellOpsNeon;
#endif
  (void)exec;
  return kCellOpsPortable;
}

void AddCells(const PqGeometry& geometry, const PqSpan& span, SlotRange slots, uint32_t weight,
              std::span<uint32_t> counts) {
  if (PlaneCount(geometry) == 2) {
    const uint8_t* const plane_0 = span.planes;
    const uint8_t* const plane_1 = span.planes + span.plane_stride;
    uint32_t* const cells = counts.data();
    const uint32_t bits = geometry.bits;
    for (uint32_t slot = slots.begin; slot < slots.end; ++slot) {
      cells[uint32_t{plane_0[slot]} << bits | plane_1[slot]] += weight;
    }
    return;
  }
  for (uint32_t slot = slots.begin; slot < slots.end; ++slot) {
    counts[GetCell(geometry, span.planes, span.plane_stride, slot)] += weight;
  }
}

size_t CellSelectScratchBytes(const PqSelectShape& shape) {
  const size_t total = size_t{shape.codebook_count} * CellCount(shape.geometry) * sizeof(uint32_t);
  const size_t table_floats =
      size_t{shape.codebook_count} * shape.group_size * TableFloats(shape.geometry);
  return 2 * ScratchAligned(table_floats * sizeof(float)) + 3 * ScratchAligned(total) +
         ScratchAligned(2 * total) + ScratchAligned(total / 2) + 2 * ScratchAligned(total / 32) +
         ScratchAligned(shape.codebook_count * sizeof(CodebookEmission)) +
         ScratchAligned(sizeof(CellListScratch));
}

void SelectByCells(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan) {
  CellSelection(exec, args, plan).Run();
}

}  // namespace pqcached::kernels
