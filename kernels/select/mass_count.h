// CountForMass finds how many tokens a selection needs for a share of the attention: the smallest k
// whose k best tokens have the wanted mass (Twilight, arXiv 2502.02770: top-p of attention).
//
// Stateless; thread-safe as long as the scratch is not shared.
#ifndef PQCACHED_KERNELS_SELECT_MASS_COUNT_H_
#define PQCACHED_KERNELS_SELECT_MASS_COUNT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/base/group_rule.h"
#include "kernels/select/score_select.h"

namespace pqcached::kernels {

// Tokens that are attended whatever is selected, of one query head.
struct OwnWeight {
  float max = 0;      // largest logit
  float sum_exp = 0;  // sum of exp(logit - max); 0: there are none
};

struct MassCountArgs {
  uint32_t group_size = 0;  // G
  GroupRule rule = GroupRule::kSumSoftmax;
  std::span<const ScoreSpan> spans;  // all candidates, as in ScoreSelectArgs
  std::span<const OwnWeight> own;    // [G]
  double mass = 1;                   // in (0, 1]
  std::span<std::byte> scratch;      // MassCountScratchBytes, 64-byte aligned
};

// Returns the bytes of scratch for `token_count` candidates. Never decreases when it increases.
size_t MassCountScratchBytes(uint32_t token_count);

// Returns the smallest k for which the own tokens and the k best candidates, in the order of
// ScoreSelect, have at least `mass` of the softmax over own tokens and candidates, in the mean over
// the heads; all candidates where rounding keeps the sum below it. Sums are double; weights have
// the precision of ScoreValues.
//
// REQUIRES: group_size is 1 to 64.
uint32_t CountForMass(const Exec& exec, const MassCountArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_MASS_COUNT_H_
