#include "kernels/value_select.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/check.h"

namespace pqcached::kernels {
namespace {

double WeightReference(float logit, float max) {
  const float exponent = ClampLogit(logit) - max;
  return exponent < kMinExponent ? 0.0 : std::exp(double{exponent});
}

float GroupValueReference(const GroupValuesArgs& args, size_t token) {
  const auto logit = [&](uint32_t head) {
    return ClampLogit(args.logits[head * args.head_stride + token]);
  };
  if (args.group_size == 1) return logit(0);
  float largest = -std::numeric_limits<float>::infinity();
  float logit_sum = 0.0f;
  double weight_sum = 0.0;
  for (uint32_t head = 0; head < args.group_size; ++head) {
    switch (args.rule) {
      case GroupRule::kSumSoftmax: {
        const Normaliser& normaliser = args.normalisers[head];
        weight_sum += WeightReference(logit(head), normaliser.max) / normaliser.sum;
        break;
      }
      case GroupRule::kMaxSoftmax: {
        const Normaliser& normaliser = args.normalisers[head];
        const auto log_sum = static_cast<float>(std::log(normaliser.sum));
        largest = std::max(largest, (logit(head) - normaliser.max) - log_sum);
        break;
      }
      case GroupRule::kMeanLogit:
        logit_sum = head == 0 ? logit(0) : logit_sum + logit(head);
        break;
      case GroupRule::kMaxLogit:
        largest = std::max(largest, logit(head));
        break;
    }
  }
  if (args.rule == GroupRule::kSumSoftmax) return static_cast<float>(weight_sum);
  return args.rule == GroupRule::kMeanLogit ? logit_sum : largest;
}

}  // namespace

ValueThreshold FindThreshold(const Exec& exec, std::span<const float> values, uint32_t k,
                             std::span<float> work) {
  PQC_CHECK(k >= 1 && k <= values.size() && work.size() == values.size());
  (void)exec;
  std::copy(values.begin(), values.end(), work.begin());
  std::nth_element(work.begin(), work.begin() + (k - 1), work.end(), std::greater<float>());
  ValueThreshold threshold;
  threshold.value = work[k - 1];
  threshold.equal_quota = k;
  for (uint32_t i = 0; i + 1 < k; ++i) threshold.equal_quota -= work[i] > threshold.value ? 1 : 0;
  return threshold;
}

uint32_t EmitSelected(const Exec& exec, std::span<const float> values, uint32_t first_position,
                      ValueThreshold& threshold, std::span<uint32_t> positions, uint32_t written) {
  (void)exec;
  for (uint32_t i = 0; i < values.size(); ++i) {
    bool selected = values[i] > threshold.value;
    if (values[i] == threshold.value && threshold.equal_quota > 0) {
      --threshold.equal_quota;
      selected = true;
    }
    if (selected) positions[written++] = first_position + i;
  }
  return written;
}

void AddToMax(const Exec& exec, std::span<const float> logits, Normaliser& normaliser) {
  (void)exec;
  for (const float logit : logits) normaliser.max = std::max(normaliser.max, ClampLogit(logit));
}

void AddToSum(const Exec& exec, std::span<const float> logits, Normaliser& normaliser) {
  (void)exec;
  for (const float logit : logits) normaliser.sum += WeightReference(logit, normaliser.max);
}

void GroupValues(const Exec& exec, const GroupValuesArgs& args) {
  (void)exec;
  for (size_t token = 0; token < args.values.size(); ++token) {
    args.values[token] = GroupValueReference(args, token);
  }
}

}  // namespace pqcached::kernels
