// Selection, scores and attention over one layer: over all its kv heads and all segments together.
//
// Each kv head is one task. The caller supplies the way in which tasks run (ParallelFor) and the
// scratch memory: 64-byte aligned, worker_count times the size that the matching ...ScratchBytes
// function returns. No state is retained between calls.
//
// Thread-safe as long as outputs and scratch are not shared.
#ifndef PQCACHED_KVSTORE_READ_LAYER_OPS_H_
#define PQCACHED_KVSTORE_READ_LAYER_OPS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/select/mass_count.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/selection.h"

namespace pqcached::kvstore {

struct SelectLayerArgs {
  IndexDescriptor index;  // pq: every segment with candidates has index_data and codebook
  GroupRule rule = GroupRule::kSumSoftmax;
  std::span<const PositionRange> candidates;  // ascending, disjoint, stored
  std::span<const float> queries;             // [query_heads, key_dim]
  uint32_t select_count = 0;                  // k <= candidates
  // Candidates that the index proposes, and of which the k best by their exact scores are selected;
  // at most k = the index alone selects.
  uint32_t shortlist_count = 0;
  std::span<uint32_t> positions;  // [kv_heads, k], overwritten, ascending per kv head
  // Logits of the positions, [query_heads, k], overwritten, which AttendLayer can take; only with
  // a shortlist. Empty = not wanted.
  std::span<float> logits = {};
};

// Returns the scratch size of one worker for SelectLayer; of `args`, neither the queries nor the
// positions are read.
size_t SelectScratchBytes(const kernels::Exec& exec, const LayerView& view,
                          const SelectLayerArgs& args);

// Writes the k candidates with the largest values under the GQA head aggregation `rule`; softmax
// normalisers are over all candidates. Ties are resolved in favour of the lower position. With a
// shortlist, this is how the index makes it, and Rerank selects from it.
void SelectLayer(const kernels::Exec& exec, const LayerView& view, const SelectLayerArgs& args,
                 const ParallelFor& parallel, std::span<std::byte> scratch);

// Exact re-ranking in one kv head: of the candidates that an index proposes, the best by their true
// keys.
struct RerankArgs {
  uint32_t kv_head = 0;
  GroupRule rule = GroupRule::kSumSoftmax;
  std::span<const float> queries;       // [G, key_dim]
  std::span<const uint32_t> shortlist;  // ascending, stored
  std::span<uint32_t> positions;        // [k], k <= shortlist, overwritten: ascending
  std::span<float> logits;              // [G, k], overwritten; empty = not wanted
};

size_t RerankScratchBytes(const LayerView& view, uint32_t shortlist_count);

// Writes the k positions of the shortlist with the largest values under the rule, by exact logits
// with the layer's softcap; softmax normalisers are over the shortlist. Ties are resolved in favour
// of the lower position. `scratch`: 64-byte aligned.
void Rerank(const kernels::Exec& exec, const LayerView& view, const RerankArgs& args,
            std::span<std::byte> scratch);

// A budget by the share of the attention.
struct CountLayerArgs {
  IndexDescriptor index;  // as in SelectLayerArgs
  GroupRule rule = GroupRule::kSumSoftmax;
  std::span<const PositionRange> candidates;  // ascending, disjoint, stored, not empty
  std::span<const float> queries;             // [query_heads, key_dim]
  std::span<const kernels::OwnWeight> own;    // [query_heads]: of sink and window
  double mass = 1;                            // in (0, 1]
};

// Returns the scratch size of one worker for CountLayer.
size_t CountScratchBytes(const LayerView& view, const IndexDescriptor& index,
                         std::span<const PositionRange> candidates);

// Returns the smallest k by which every kv head has the mass (kernels/select/mass_count.h), by the
// logits of the index.
uint32_t CountLayer(const kernels::Exec& exec, const LayerView& view, const CountLayerArgs& args,
                    const ParallelFor& parallel, std::span<std::byte> scratch);

struct ScoreLayerArgs {
  IndexDescriptor index;
  PositionRange tokens;            // stored, not empty
  std::span<const float> queries;  // [query_heads, key_dim]
  std::span<float> logits;         // [query_heads, tokens], overwritten: scaled, softcapped
  std::span<float> max;            // [query_heads], overwritten; empty = neither this nor sum_exp
  std::span<float> sum_exp;        // [query_heads], overwritten: sum of exp(logit - max)
};

// Returns the scratch size of one worker for ScoreLayer.
size_t ScoreScratchBytes(const LayerView& view, const IndexDescriptor& index, PositionRange tokens);

// Writes the logits of every query head over `tokens`, with their maximum and sum of exponentials.
void ScoreLayer(const kernels::Exec& exec, const LayerView& view, const ScoreLayerArgs& args,
                const ParallelFor& parallel, std::span<std::byte> scratch);

// Returns the shape of attention over the rows of one kv head. The group has all query tokens.
kernels::AttendShape AttendShapeOf(const LayerShape& shape);

struct AttendLayerArgs {
  std::span<const float> queries;       // [query_heads, key_dim]; may be empty with logits
  std::span<const uint32_t> positions;  // [kv_heads, k], ascending per kv head, stored
  // [kv_heads], each ascending and stored: in place of `positions` when not empty.
  std::span<const std::span<const uint32_t>> lists = {};
  // Logits of the positions, [query_heads, k], scaled and softcapped: the keys are then not read.
  // k is that of the query head's list.
  std::span<const float> logits = {};
  std::span<float> output;  // [query_heads, value_dim], overwritten; 0 when k = 0
  std::span<float> lse;     // [query_heads], overwritten; -infinity when k = 0
};

// Returns the scratch size of one worker for AttendLayer.
size_t AttendLayerScratchBytes(const LayerView& view);

// Writes the attention output of every query head over the k positions of its kv head, and the
// log-sum-exp (`lse`) of the scaled logits, with which the engine merges it with its own part.
void AttendLayer(const kernels::Exec& exec, const LayerView& view, const AttendLayerArgs& args,
                 const ParallelFor& parallel, std::span<std::byte> scratch);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_LAYER_OPS_H_
