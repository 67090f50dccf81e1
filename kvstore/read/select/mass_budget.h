// The k of a selection by attention mass.
//
// Stateless; thread-safe as long as the scratch is not shared.
#ifndef PQCACHED_KVSTORE_READ_SELECT_MASS_BUDGET_H_
#define PQCACHED_KVSTORE_READ_SELECT_MASS_BUDGET_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/select/mass_count.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/selection.h"

namespace pqcached::kvstore {

struct MassBudgetArgs {
  uint32_t kv_heads = 0;    // sets
  uint32_t group_size = 0;  // G: query heads of a set, times the query tokens
  GroupRule rule = GroupRule::kSumSoftmax;
  double mass = 1;                            // in (0, 1]
  std::span<const PositionRange> candidates;  // ascending, disjoint, not empty
  // Logits of each range in turn, [kv_heads, G, tokens of the range].
  std::span<const float> logits;
  std::span<const kernels::OwnWeight> own;  // [kv_heads, G]: of sink and window
};

// Returns the scratch size of one worker.
size_t MassBudgetScratchBytes(uint32_t candidate_count, size_t range_count);

// Returns the smallest k by which all sets have the mass (kernels/select/mass_count.h).
uint32_t CountByMass(const kernels::Exec& exec, const MassBudgetArgs& args,
                     const ParallelFor& parallel, std::span<std::byte> scratch);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_SELECT_MASS_BUDGET_H_
