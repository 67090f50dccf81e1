// ScoreSelect selects exactly k tokens, those with the largest values under given logits.
//
// Indexes that score every token (flat) use it, and it is the last step of PqSelect when there are
// no cells. Logits pass ClampLogit first. Under kMeanLogit the value is the float sum of the logits
// in the order of heads. kMeanLogit, kMaxLogit and a group of one select the same positions on
// every instruction set; under the softmax rules, instruction sets may round a value by 1e-5 of
// itself (kMaxSoftmax: by 1e-5 + 1e-6 * |value|).
#ifndef PQCACHED_KERNELS_SELECT_SCORE_SELECT_H_
#define PQCACHED_KERNELS_SELECT_SCORE_SELECT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/base/group_rule.h"

namespace pqcached::kernels {

struct ScoreSpan {
  const float* logits = nullptr;  // [G, token_count], rows head_stride floats apart
  size_t head_stride = 0;
  uint32_t token_count = 0;
  uint32_t first_position = 0;  // position of token 0
};

struct ScoreSelectArgs {
  uint32_t group_size = 0;  // G
  GroupRule rule = GroupRule::kSumSoftmax;
  std::span<const ScoreSpan> spans;  // positions ascend from span to span, without overlap
  std::span<uint32_t> positions;     // [k], overwritten: ascending
  std::span<std::byte> scratch;      // ScoreSelectScratchBytes, 64-byte aligned
};

// Returns the bytes of scratch for ScoreSelect over `token_count` tokens of all spans. Never
// decreases when an argument increases.
size_t ScoreSelectScratchBytes(uint32_t group_size, uint32_t token_count);

// Writes the positions of the k = positions.size() tokens with the largest values, ascending. Among
// tokens whose values equal the k-th, those at the lowest positions are selected.
//
// REQUIRES: group_size is 1 to 64; k <= tokens of all spans; scratch as above.
void ScoreSelect(const Exec& exec, const ScoreSelectArgs& args);

struct ScoreValuesArgs {
  uint32_t group_size = 0;  // G
  GroupRule rule = GroupRule::kSumSoftmax;
  std::span<const ScoreSpan> spans;  // as in ScoreSelectArgs
  std::span<float> values;           // [tokens of all spans], overwritten; never NaN
};

// Writes the value by which ScoreSelect compares each token. REQUIRES: group_size is 1 to 64.
void ScoreValues(const Exec& exec, const ScoreValuesArgs& args);

struct SelectValuesArgs {
  std::span<const float> values;  // no NaN
  std::span<uint32_t> indices;    // [k], overwritten: ascending
  std::span<float> work;          // as many as values; overwritten
};

// Writes the indices of the k = indices.size() largest values, ascending. Among values that equal
// the k-th, those at the lowest indices are selected. REQUIRES: k <= values.size().
void SelectValues(const Exec& exec, const SelectValuesArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_SCORE_SELECT_H_
