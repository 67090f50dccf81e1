#include "kernels/attend/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/check.h"

namespace pqcached::kernels {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

double LargestLse(const MergeArgs& args, size_t query) {
  double largest = static_cast<double>(kNegativeInfinity);
  for (const Partial& partial : args.partials) {
    largest = std::max(largest, static_cast<double>(partial.lse[query]));
  }
  return largest;
}

void SetEmpty(const MergeArgs& args, size_t query) {
  std::fill_n(args.output.data() + query * args.value_dim, args.value_dim, 0.0f);
  args.lse[query] = kNegativeInfinity;
}

// The specification. Writes each output element only after all its inputs are read, so that merging
// in place is safe.
void MergeReference(const MergeArgs& args, size_t query) {
  const double largest = LargestLse(args, query);
  if (largest == static_cast<double>(kNegativeInfinity)) return SetEmpty(args, query);
  double weight_sum = 0.0;
  for (const Partial& partial : args.partials) {
    weight_sum += std::exp(static_cast<double>(partial.lse[query]) - largest);
  }
  for (uint32_t i = 0; i < args.value_dim; ++i) {
    double sum = 0.0;
    for (const Partial& partial : args.partials) {
      if (partial.lse[query] == kNegativeInfinity) continue;
      const double weight = std::exp(static_cast<double>(partial.lse[query]) - largest);
      sum += weight * static_cast<double>(partial.output[query * args.value_dim + i]);
    }
    args.output[query * args.value_dim + i] = static_cast<float>(sum / weight_sum);
  }
  args.lse[query] = static_cast<float>(largest + std::log(weight_sum));
}

// Merges with one pass per partial, in fp32. The first partial is scaled into the output, which may
// be that partial's own.
void MergeInOrder(const MergeArgs& args, size_t query) {
  const double largest = LargestLse(args, query);
  if (largest == static_cast<double>(kNegativeInfinity)) return SetEmpty(args, query);
  double weight_sum = 0.0;
  for (const Partial& partial : args.partials) {
    weight_sum += std::exp(static_cast<double>(partial.lse[query]) - largest);
  }
  float* output = args.output.data() + query * args.value_dim;
  bool first = true;
  for (const Partial& partial : args.partials) {
    const float lse = partial.lse[query];
    if (lse == kNegativeInfinity && !first) continue;
    const float* values = partial.output + query * args.value_dim;
    const float weight =
        static_cast<float>(std::exp(static_cast<double>(lse) - largest) / weight_sum);
    if (lse == kNegativeInfinity) {
      std::fill_n(output, args.value_dim, 0.0f);
    } else if (first) {
      for (uint32_t i = 0; i < args.value_dim; ++i) output[i] = weight * values[i];
    } else {
      for (uint32_t i = 0; i < args.value_dim; ++i) output[i] += weight * values[i];
    }
    first = false;
  }
  args.lse[query] = static_cast<float>(largest + std::log(weight_sum));
}

}  // namespace

void MergePartials(const Exec& exec, const MergeArgs& args) {
  PQC_CHECK(args.output.size() == size_t{args.query_count} * args.value_dim);
  PQC_CHECK(args.lse.size() == args.query_count);
  for (size_t query = 0; query < args.query_count; ++query) {
    if (exec.level == Level::kReference) {
      MergeReference(args, query);
    } else {
      MergeInOrder(args, query);
    }
  }
}

}  // namespace pqcached::kernels
