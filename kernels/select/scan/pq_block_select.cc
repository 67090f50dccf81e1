#include <algorithm>
#include <cmath>

#include "kernels/base/check.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/select/pq_select_paths.h"
#include "kernels/select/value_ops.h"
#include "kernels/select/value_select.h"

namespace pqcached::kernels {
namespace {

// Slots per block: a block's logits are computed, and then weighted, while they are in the L2
// cache.
constexpr uint32_t kBlockSlots = 4096;

// Normaliser of one head over one block.
struct BlockNormaliser {
  float max;
  float sum;
};

// Largest number of spans, each of which ends a block early; with more spans, blocks do not pay
// off.
constexpr size_t kMaxSpanCount = 4096;

size_t MaxBlockCount(size_t candidate_count) {
  return candidate_count / kBlockSlots + std::min(candidate_count, kMaxSpanCount);
}

size_t BlockCount(std::span<const PqSpan> spans) {
  size_t count = 0;
  for (const PqSpan& span : spans) {
    count += (span.slot_end - span.slot_begin + kBlockSlots - 1) / kBlockSlots;
  }
  return count;
}

// One selection by the scores of all tokens, block by block. A block never crosses a span boundary.
class BlockSelection {
 public:
  BlockSelection(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan)
      : exec_(exec),
        ops_(ValueOpsFor(exec)),
        args_(args),
        plan_(plan),
        normalised_(NeedsNormalisers(args.rule, plan.head_count)) {
    ScratchCutter scratch(args.scratch);
    const uint32_t heads = plan.head_count;
    table_floats_ = heads * TableFloats(args.geometry);
    tables_ = scratch.Take<float>(plan.codebook_count * table_floats_);
    values_ = scratch.Take<float>(plan.candidate_count);
    work_ = scratch.Take<float>(plan.candidate_count);
    const size_t kept_slots = normalised_ ? plan.candidate_count : kBlockSlots;
    if (heads > 1) logits_ = scratch.Take<float>(heads * kept_slots);
    if (normalised_) {
      block_normalisers_ = scratch.Take<BlockNormaliser>(heads * BlockCount(args.spans));
    }
    FillTables(args, plan, tables_);
  }

  void Run() {
    ForEachBlock([&](const Block& block) { ScoreBlock(block); });
    if (normalised_) {
      MergeNormalisers();
      ForEachBlock([&](const Block& block) { ValueBlock(block); });
    }
    const auto k = static_cast<uint32_t>(args_.positions.size());
    ValueThreshold threshold = FindThreshold(exec_, values_, k, work_);
    uint32_t written = 0;
    size_t first = 0;
    for (const PqSpan& span : args_.spans) {
      const size_t slots = span.slot_end - span.slot_begin;
      written =
          EmitSelected(exec_, values_.subspan(first, slots), span.first_position + span.slot_begin,
                       threshold, args_.positions, written);
      first += slots;
    }
    PQC_CHECK(written == k);
  }

 private:
  struct Block {
    const PqSpan* span;
    uint32_t slot_begin;
    uint32_t slot_count;
    size_t index;
    size_t first_candidate;
  };

  template <typename Visit>
  void ForEachBlock(Visit visit) const {
    Block block = {
        .span = nullptr, .slot_begin = 0, .slot_count = 0, .index = 0, .first_candidate = 0};
    for (const PqSpan& span : args_.spans) {
      block.span = &span;
      for (uint32_t slot = span.slot_begin; slot < span.slot_end; slot += block.slot_count) {
        block.slot_begin = slot;
        block.slot_count = std::min(kBlockSlots, span.slot_end - slot);
        visit(block);
        ++block.index;
        block.first_candidate += block.slot_count;
      }
    }
  }

  // Returns the block's logits, [head, slot_count]; they are kept for the second pass only when
  // normalisers are needed.
  std::span<float> LogitsOf(const Block& block) const {
    const uint32_t heads = plan_.head_count;
    if (heads == 1) return values_.subspan(block.first_candidate, block.slot_count);
    const size_t first = normalised_ ? block.first_candidate * heads : 0;
    return logits_.subspan(first, size_t{block.slot_count} * heads);
  }

  void ScoreBlock(const Block& block) {
    const std::span<float> logits = LogitsOf(block);
    PqSpan span = *block.span;
    span.slot_begin = block.slot_begin;
    span.slot_end = block.slot_begin + block.slot_count;
    PqScore(exec_, {.geometry = args_.geometry,
                    .group_size = plan_.head_count,
                    .span = span,
                    .tables = tables_.subspan(span.codebook * table_floats_, table_floats_),
                    .logits = logits});
    if (plan_.head_count == 1) return;
    float* const values = values_.data() + block.first_candidate;
    for (uint32_t head = 0; head < plan_.head_count; ++head) {
      float* const row = logits.data() + size_t{head} * block.slot_count;
      if (args_.rule == GroupRule::kMaxLogit) {
        const HeadWeight none = {.max = 0.0f, .inverse_sum = 1.0f, .log_sum = 0.0f};
        ops_.update_max(row, block.slot_count, none, head == 0, values);
        continue;
      }
      BlockNormaliser& normaliser = block_normalisers_[block.index * plan_.head_count + head];
      normaliser.max = ops_.largest(row, block.slot_count, -kLogitLimit);
      normaliser.sum =
          static_cast<float>(ops_.sum_exponentials(row, block.slot_count, normaliser.max));
    }
  }

  void MergeNormalisers() {
    const uint32_t heads = plan_.head_count;
    for (uint32_t head = 0; head < heads; ++head) {
      Normaliser& merged = normalisers_[head];
      for (size_t i = head; i < block_normalisers_.size(); i += heads) {
        merged.max = std::max(merged.max, block_normalisers_[i].max);
      }
      for (size_t i = head; i < block_normalisers_.size(); i += heads) {
        const BlockNormaliser& block = block_normalisers_[i];
        merged.sum += std::exp(double{block.max} - merged.max) * block.sum;
      }
    }
  }

  void ValueBlock(const Block& block) {
    const std::span<float> logits = LogitsOf(block);
    float* const values = values_.data() + block.first_candidate;
    for (uint32_t head = 0; head < plan_.head_count; ++head) {
      const float* row = logits.data() + size_t{head} * block.slot_count;
      const Normaliser& merged = normalisers_[head];
      const HeadWeight weight = {.max = merged.max,
                                 .inverse_sum = static_cast<float>(1.0 / merged.sum),
                                 .log_sum = static_cast<float>(std::log(merged.sum))};
      if (args_.rule == GroupRule::kMaxSoftmax) {
        ops_.update_max(row, block.slot_count, weight, head == 0, values);
      } else {
        ops_.add_softmax(row, block.slot_count, weight, head == 0, values);
      }
    }
  }

  const Exec& exec_;
  const ValueOps& ops_;
  const PqSelectArgs& args_;
  const PqSelectPlan& plan_;
  const bool normalised_;
  size_t table_floats_ = 0;
  std::span<float> tables_;  // [codebook, head of the plan, TableFloats], clamped
  std::span<float> values_;  // [candidate]
  std::span<float> work_;    // [candidate]
  std::span<float> logits_;  // [block, head, slot]
  std::span<BlockNormaliser> block_normalisers_;  // [block, head]
  Normaliser normalisers_[kMaxGroupSize];
};

}  // namespace

void SelectByBlocks(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan) {
  if (BlockCount(args.spans) > MaxBlockCount(plan.candidate_count)) {
    return SelectByScores(exec, args, plan);
  }
  BlockSelection(exec, args, plan).Run();
}

size_t BlockSelectScratchBytes(const PqSelectShape& shape) {
  const size_t candidates = shape.candidate_count;
  const size_t heads = shape.group_size;
  const size_t table_floats = shape.codebook_count * heads * TableFloats(shape.geometry);
  return ScratchAligned(table_floats * sizeof(float)) +
         2 * ScratchAligned(candidates * sizeof(float)) +
         ScratchAligned(heads * std::max<size_t>(candidates, kBlockSlots) * sizeof(float)) +
         ScratchAligned(heads * MaxBlockCount(candidates) * sizeof(BlockNormaliser));
}

}  // namespace pqcached::kernels
