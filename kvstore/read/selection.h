// Selection: the parameters of one top-k query, shared by client and sidecar.
#ifndef PQCACHED_KVSTORE_READ_SELECTION_H_
#define PQCACHED_KVSTORE_READ_SELECTION_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "kernels/base/group_rule.h"
#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

using kernels::GroupRule;

struct PositionRange {
  uint32_t begin = 0;
  uint32_t end = 0;
  friend bool operator==(const PositionRange&, const PositionRange&) = default;
};

// Masked tokens, neither attended nor counted; ascending, disjoint, non-empty. Holds the ranges
// itself, so that a selection can be copied without an allocation. Of more than kMaxExcludedRanges
// ranges only the number is kept, and Resolve refuses them.
class ExcludedRanges {
 public:
  ExcludedRanges() = default;
  ExcludedRanges(std::initializer_list<PositionRange> ranges) {
    for (const PositionRange& range : ranges) push_back(range);
  }

  void push_back(const PositionRange& range) {
    if (size_ < kMaxExcludedRanges) ranges_[size_] = range;
    ++size_;
  }
  size_t size() const { return size_; }
  const PositionRange* begin() const { return ranges_; }
  const PositionRange* end() const { return ranges_ + std::min(size_, kMaxExcludedRanges); }
  const PositionRange& operator[](size_t i) const { return ranges_[i]; }

 private:
  uint32_t size_ = 0;
  PositionRange ranges_[kMaxExcludedRanges];
};

inline constexpr float kMaxRerankFactor = 8.0f;
constexpr bool IsRerankFactor(double factor) { return factor >= 1 && factor <= kMaxRerankFactor; }

enum class BudgetKind : uint8_t { kCount = 0, kRatio = 1, kRetrieved = 2, kMass = 3 };

// A query with n = query_position + 1 tokens of context attends to
//   sink      [0, sink_tokens)                      attended by the engine itself
//   window    [n - window_tokens, n)                attended by the engine itself
//   selected  k of the other tokens that are not excluded
// and a count or ratio counts all three: budget = sink + window + k. A selection of all candidates
// is exact attention, for which nothing is scored.
struct Selection {
  IndexDescriptor index = {};
  GroupRule group_rule = GroupRule::kSumSoftmax;
  // A set for each query head, in place of one for each kv head. The rule then joins only the
  // tokens of a speculation. It lies in what was padding, as rerank_factor does.
  bool per_query_head = false;
  uint32_t sink_tokens = 0;
  uint32_t window_tokens = 0;
  ExcludedRanges excluded = {};
  BudgetKind budget_kind = BudgetKind::kRatio;
  // Attention also estimates the candidates that are not selected, from the clusters of the
  // sequence (tail.h). It lies in padding, too.
  bool tail_estimate = false;
  // Exact re-ranking: the index proposes ceil(rerank_factor * k) candidates, whose keys are scored
  // exactly, and the k best of these remain. In [1, kMaxRerankFactor]; 1 = off. Without an effect
  // under flat, whose scores are exact. It lies in what was padding, because the struct has one
  // layout in all versions: the two libraries of a client share it.
  float rerank_factor = 1.0f;
  // kCount: in [sink + window + 1, number of attendable tokens]. kRetrieved: at least 1;
  // k = min(budget_count, candidates). kMass: the bounds of k (MassBounds).
  uint64_t budget_count = 0;
  // kRatio: in (0, 1]; k = clamp(floor(ratio * n) - sink - window, 0, candidates). kMass: the share
  // of the attention, in (0, 1], that sink, window and selected tokens are to have by estimate.
  double budget_ratio = 1.0;

  // Bounds of k under kMass, as budget_count has them.
  struct MassBounds {
    uint32_t least = 0;
    uint32_t most = 0;  // 0: all candidates
  };
  static constexpr uint64_t CountOf(const MassBounds& bounds) {
    return uint64_t{bounds.least} << 32 | bounds.most;
  }
  MassBounds mass_bounds() const {
    return {static_cast<uint32_t>(budget_count >> 32), static_cast<uint32_t>(budget_count)};
  }

  // Returns the number of sets in a layer with these heads.
  uint32_t SetCount(uint32_t kv_heads, uint32_t query_heads) const {
    return per_query_head ? query_heads : kv_heads;
  }
};

// Positions [begin, end) as a caller gives them, before they are checked.
struct TokenRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// The part of a row: [key, value], its key, or its value.
enum class RowPart : uint8_t { kRow = 0, kKey = 1, kValue = 2 };

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_SELECTION_H_
