#include "kernels/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/check.h"

namespace pqcached::kernels {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Merges one query. Writes each output element only after all its inputs are read, so that merging
// in place works.
void MergeQuery(const MergeArgs& args, size_t query) {
  double largest = static_cast<double>(kNegativeInfinity);
  for (const Partial& partial : args.partials) {
    largest = std::max(largest, static_cast<double>(partial.lse[query]));
  }
  float* output = args.output.data() + query * args.value_dim;
  if (!(largest > static_cast<double>(kNegativeInfinity))) {
    std::fill_n(output, args.value_dim, 0.0f);
    args.lse[query] = kNegativeInfinity;
    return;
  }
  double weight_sum = 0.0;
  for (const Partial& partial : args.partials) {
    weight_sum += std::exp(static_cast<double>(partial.lse[query]) - largest);
  }
  const double lse = largest + std::log(weight_sum);
  for (uint32_t i = 0; i < args.value_dim; ++i) {
    double sum = 0.0;
    for (const Partial& partial : args.partials) {
      if (partial.lse[query] == kNegativeInfinity) continue;
      const double weight = std::exp(static_cast<double>(partial.lse[query]) - largest);
      sum += weight * static_cast<double>(partial.output[query * args.value_dim + i]);
    }
    output[i] = static_cast<float>(sum / weight_sum);
  }
  args.lse[query] = static_cast<float>(lse);
}

}  // namespace

void MergePartials(const Exec& exec, const MergeArgs& args) {
  static_cast<void>(exec);
  PQC_CHECK(args.output.size() == size_t{args.query_count} * args.value_dim);
  PQC_CHECK(args.lse.size() == args.query_count);
  for (size_t query = 0; query < args.query_count; ++query) MergeQuery(args, query);
}

}  // namespace pqcached::kernels
