// Merges partial attentions over disjoint token sets into the attention over their union.
//
//   lse = log sum_j exp(lse_j),   o = sum_j exp(lse_j - lse) o_j
//
// Pure; thread-safe.
#ifndef PQCACHED_KERNELS_ATTEND_MERGE_H_
#define PQCACHED_KERNELS_ATTEND_MERGE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"

namespace pqcached::kernels {

// One partial attention for `query_count` queries (heads times positions).
struct Partial {
  const float* output = nullptr;  // [query_count, value_dim]
  const float* lse = nullptr;     // [query_count], -infinity: no rows; the output is not read
};

struct MergeArgs {
  uint32_t query_count = 0;
  uint32_t value_dim = 0;
  std::span<const Partial> partials;  // any number, 0 included
  std::span<float> output;            // [query_count, value_dim], overwritten
  std::span<float> lse;               // [query_count], overwritten
};

// Merges the partials of each query. Partials whose lse is -infinity are ignored; if all are,
// output = 0 and lse = -infinity. `output` and `lse` may be those of partials[0] (merge in place)
// and must not overlap any other partial.
void MergePartials(const Exec& exec, const MergeArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ATTEND_MERGE_H_
