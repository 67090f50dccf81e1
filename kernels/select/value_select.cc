#include "kernels/select/value_select.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/select/value_ops.h"

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

void EmitReference(EmitTask& task) {
  for (uint32_t i = 0; i < task.count; ++i) {
    bool selected = task.values[i] > task.threshold;
    if (task.values[i] == task.threshold && task.equal_quota > 0) {
      --task.equal_quota;
      selected = true;
    }
    if (selected) task.positions[task.written++] = task.first_position + i;
  }
}

bool IsReference(const Exec& exec) { return exec.level == Level::kReference; }

// Computes the group's values head by head.
void GroupValuesByHead(const ValueOps& ops, const GroupValuesArgs& args) {
  const size_t count = args.values.size();
  float* const values = args.values.data();
  for (uint32_t head = 0; head < args.group_size; ++head) {
    const float* logits = args.logits + head * args.head_stride;
    const bool first = head == 0;
    HeadWeight weight = {.max = 0.0f, .inverse_sum = 1.0f, .log_sum = 0.0f};
    if (NeedsNormalisers(args.rule, args.group_size)) {
      const Normaliser& normaliser = args.normalisers[head];
      weight = {.max = normaliser.max,
                .inverse_sum = static_cast<float>(1.0 / normaliser.sum),
                .log_sum = static_cast<float>(std::log(normaliser.sum))};
    }
    if (args.group_size == 1 || args.rule == GroupRule::kMeanLogit) {
      ops.add_logits(logits, count, first, values);
    } else if (args.rule == GroupRule::kSumSoftmax) {
      ops.add_softmax(logits, count, weight, first, values);
    } else {
      ops.update_max(logits, count, weight, first, values);
    }
  }
}

}  // namespace

const ValueOps& ValueOpsFor(const Exec& exec) {
#if defined(PQCACHED_X86)
  if (exec.level >= Level::kAvx512) return kValueOpsAvx512;
  if (exec.level >= Level::kAvx2) return kValueOpsAvx2;
#elif defined(PQCACHED_NEON)
  if (exec.level == Level::kNeon) return kValueOpsNeon;
#endif
  (void)exec;
  return kValueOpsPortable;
}

namespace {

void Emit(const Exec& exec, EmitTask& task) {
  if (IsReference(exec)) return EmitReference(task);
#if defined(PQCACHED_X86)
  if (exec.level >= Level::kAvx512Vbmi) return EmitValuesAvx512Vbmi(task);
#endif
  ValueOpsFor(exec).emit(task);
}

}  // namespace

ValueThreshold FindThreshold(const Exec& exec, std::span<const float> values, uint32_t k,
                             std::span<float> work) {
  PQC_CHECK(k >= 1 && k <= values.size() && work.size() == values.size());
  // The portable variant is also the reference, because nth_element is the simplest form.
  const ValueOps& ops = IsReference(exec) ? kValueOpsPortable : ValueOpsFor(exec);
  const ValueCut cut = ops.find_cut(values.data(), values.size(), k, work.data());
  return {.value = cut.value, .equal_quota = k - cut.above_count};
}

uint32_t EmitSelected(const Exec& exec, std::span<const float> values, uint32_t first_position,
                      ValueThreshold& threshold, std::span<uint32_t> positions, uint32_t written) {
  EmitTask task = {.values = values.data(),
                   .count = static_cast<uint32_t>(values.size()),
                   .first_position = first_position,
                   .threshold = threshold.value,
                   .equal_quota = threshold.equal_quota,
                   .positions = positions.data(),
                   .capacity = static_cast<uint32_t>(positions.size()),
                   .written = written};
  Emit(exec, task);
  threshold.equal_quota = task.equal_quota;
  return task.written;
}

void AddToMax(const Exec& exec, std::span<const float> logits, Normaliser& normaliser) {
  if (!IsReference(exec)) {
    normaliser.max = ValueOpsFor(exec).largest(logits.data(), logits.size(), normaliser.max);
    return;
  }
  for (const float logit : logits) normaliser.max = std::max(normaliser.max, ClampLogit(logit));
}

void AddToSum(const Exec& exec, std::span<const float> logits, Normaliser& normaliser) {
  if (!IsReference(exec)) {
    normaliser.sum +=
        ValueOpsFor(exec).sum_exponentials(logits.data(), logits.size(), normaliser.max);
    return;
  }
  for (const float logit : logits) normaliser.sum += WeightReference(logit, normaliser.max);
}

void GroupValues(const Exec& exec, const GroupValuesArgs& args) {
  if (!IsReference(exec)) return GroupValuesByHead(ValueOpsFor(exec), args);
  for (size_t token = 0; token < args.values.size(); ++token) {
    args.values[token] = GroupValueReference(args, token);
  }
}

}  // namespace pqcached::kernels
