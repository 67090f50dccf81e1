// Selection: the parameters of one top-k query, shared by client and sidecar.
#ifndef PQCACHED_KVSTORE_READ_SELECTION_H_
#define PQCACHED_KVSTORE_READ_SELECTION_H_

#include <cstdint>
#include <vector>

#include "kernels/base/group_rule.h"
#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

using kernels::GroupRule;

struct PositionRange {
  uint32_t begin = 0;
  uint32_t end = 0;
  friend bool operator==(const PositionRange&, const PositionRange&) = default;
};

enum class BudgetKind : uint8_t { kCount = 0, kRatio = 1 };

// A query with n = query_position + 1 tokens of context attends to
//   sink      [0, sink_tokens)                      attended by the engine itself
//   window    [n - window_tokens, n)                attended by the engine itself
//   selected  k of the other tokens that are not excluded
// and the budget counts all three: budget = sink + window + k.
struct Selection {
  IndexDescriptor index = {};
  GroupRule group_rule = GroupRule::kSumSoftmax;
  uint32_t sink_tokens = 0;
  uint32_t window_tokens = 0;
  // Masked tokens, neither attended nor counted; ascending, disjoint, non-empty.
  std::vector<PositionRange> excluded = {};
  BudgetKind budget_kind = BudgetKind::kRatio;
  uint64_t budget_count = 0;  // kCount: in [sink + window + 1, number of attendable tokens]
  // kRatio: in (0, 1]; k = clamp(floor(ratio * n) - sink - window, 0, candidates).
  double budget_ratio = 1.0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_SELECTION_H_
