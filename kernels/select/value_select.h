// The last two steps of every selection over plain value arrays: the threshold, then the positions.
//
// Included by the files of ScoreSelect and PqSelect only.
#ifndef PQCACHED_KERNELS_SELECT_VALUE_SELECT_H_
#define PQCACHED_KERNELS_SELECT_VALUE_SELECT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/base/group_rule.h"

namespace pqcached::kernels {

struct ValueOps;

// Returns the operations of the instruction set. REQUIRES: exec.level > kReference.
const ValueOps& ValueOpsFor(const Exec& exec);

// The k-th largest of some values, and the number of selected values that equal it.
struct ValueThreshold {
  float value = 0.0f;
  uint32_t equal_quota = 0;
};

// Finds the k-th largest value. Overwrites `work`.
// REQUIRES: 1 <= k <= values.size() == work.size(); no NaN.
ValueThreshold FindThreshold(const Exec& exec, std::span<const float> values, uint32_t k,
                             std::span<float> work);

// Appends first_position + i to positions[written...] for every value above the threshold, and for
// values equal to it while threshold.equal_quota (which is decremented) lasts. Returns the new
// `written`.
uint32_t EmitSelected(const Exec& exec, std::span<const float> values, uint32_t first_position,
                      ValueThreshold& threshold, std::span<uint32_t> positions, uint32_t written);

// Normaliser of one head over all candidates: the largest logit and the sum of exponentials
// relative to it.
struct Normaliser {
  float max = -kLogitLimit;
  double sum = 0.0;  // sum of exp(logit - max); zero for exponents below kMinExponent
};

// Raises max to the largest clamped logit.
void AddToMax(const Exec& exec, std::span<const float> logits, Normaliser& normaliser);

// Adds the exponentials of the logits; max must be final.
void AddToSum(const Exec& exec, std::span<const float> logits, Normaliser& normaliser);

// Arguments for computing the group's values of a run of tokens.
struct GroupValuesArgs {
  uint32_t group_size = 0;
  GroupRule rule = GroupRule::kSumSoftmax;
  const float* logits = nullptr;  // [G, token_count], rows head_stride floats apart
  size_t head_stride = 0;
  std::span<const Normaliser> normalisers;  // [G]; read by the softmax rules when group_size > 1
  std::span<float> values;                  // [token_count], overwritten
};
void GroupValues(const Exec& exec, const GroupValuesArgs& args);

// Returns true if the rule reads normalisers.
constexpr bool NeedsNormalisers(GroupRule rule, uint32_t group_size) {
  return group_size > 1 && (rule == GroupRule::kSumSoftmax || rule == GroupRule::kMaxSoftmax);
}

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_VALUE_SELECT_H_
