#include <algorithm>
#include <functional>

#include "kernels/base/simd/fast_exp.h"
#include "kernels/select/value_ops.h"

namespace pqcached::kernels {
namespace {

// Loops below use independent lanes where the order of float additions would prevent vectorisation.
constexpr size_t kLanes = 16;

// Number of floats that are summed before the lanes are added to the double sum.
constexpr size_t kFlushCount = 64 * kLanes;

float Largest(const float* logits, size_t count, float least) {
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, least);
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) {
      const float logit = ClampLogit(logits[i + j]);
      lanes[j] = lanes[j] < logit ? logit : lanes[j];
    }
  }
  for (; i < count; ++i) lanes[0] = std::max(lanes[0], ClampLogit(logits[i]));
  return *std::max_element(lanes, lanes + kLanes);
}

double SumExponentials(const float* logits, size_t count, float max) {
  double sum = 0.0;
  for (size_t begin = 0; begin < count; begin += kFlushCount) {
    const size_t end = std::min(count, begin + kFlushCount);
    float lanes[kLanes] = {};
    size_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (size_t j = 0; j < kLanes; ++j) lanes[j] += FastExp(ClampLogit(logits[i + j]) - max);
    }
    for (; i < end; ++i) lanes[0] += FastExp(ClampLogit(logits[i]) - max);
    for (const float lane : lanes) sum += double{lane};
  }
  return sum;
}

void AddSoftmax(const float* logits, size_t count, HeadWeight head, bool first, float* values) {
  for (size_t i = 0; i < count; ++i) {
    const float share = FastExp(ClampLogit(logits[i]) - head.max) * head.inverse_sum;
    values[i] = first ? share : values[i] + share;
  }
}

void RaiseTo(const float* logits, size_t count, HeadWeight head, bool first, float* values) {
  for (size_t i = 0; i < count; ++i) {
    const float value = (ClampLogit(logits[i]) - head.max) - head.log_sum;
    values[i] = first || values[i] < value ? value : values[i];
  }
}

void AddLogits(const float* logits, size_t count, bool first, float* values) {
  for (size_t i = 0; i < count; ++i) {
    values[i] = first ? ClampLogit(logits[i]) : values[i] + ClampLogit(logits[i]);
  }
}

ValueCut FindCut(const float* values, size_t count, uint32_t k, float* work) {
  std::copy(values, values + count, work);
  std::nth_element(work, work + (k - 1), work + count, std::greater<float>());
  ValueCut cut = {.value = work[k - 1], .above_count = 0};
  for (uint32_t i = 0; i + 1 < k; ++i) cut.above_count += work[i] > cut.value ? 1 : 0;
  return cut;
}

void Emit(EmitTask& task) {
  uint32_t written = task.written;
  for (uint32_t i = 0; i < task.count; ++i) {
    if (task.values[i] < task.threshold) continue;
    if (task.values[i] == task.threshold) {
      if (task.equal_quota == 0) continue;
      --task.equal_quota;
    }
    task.positions[written++] = task.first_position + i;
  }
  task.written = written;
}

}  // namespace

const ValueOps kValueOpsPortable = {.largest = Largest,
                                    .sum_exponentials = SumExponentials,
                                    .add_softmax = AddSoftmax,
                                    .update_max = RaiseTo,
                                    .add_logits = AddLogits,
                                    .find_cut = FindCut,
                                    .emit = Emit};

}  // namespace pqcached::kernels
