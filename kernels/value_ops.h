// The variants of value_select.h, on raw pointers so that the instruction-set files need no
// standard headers.
//
// Shared by value_select.cc and the instruction-set files; nobody else includes it.
#ifndef PQCACHED_KERNELS_VALUE_OPS_H_
#define PQCACHED_KERNELS_VALUE_OPS_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {

// One head's part in the value of a token: its normaliser in the forms that the rules need.
struct HeadWeight {
  float max;          // of the logits
  float inverse_sum;  // 1 / sum of exponentials
  float log_sum;      // log of that sum
};

struct ValueCut {
  float value;           // the k-th largest
  uint32_t above_count;  // values above it
};

struct EmitTask {
  const float* values;
  uint32_t count;
  uint32_t first_position;
  float threshold;
  uint32_t equal_quota;  // counted down
  uint32_t* positions;   // [capacity]; those from written on may be overwritten at will
  uint32_t capacity;
  uint32_t written;
};

// Logits are not clamped yet. Counts may be any; nothing beyond them is read or written.
struct ValueOps {
  // The largest clamped logit, or `least`.
  float (*largest)(const float* logits, size_t count, float least);
  // Sum of exp(clamped logit - max).
  double (*sum_exponentials)(const float* logits, size_t count, float max);
  // values[i] (+)= exp(logit - max) * inverse_sum; `first` overwrites.
  void (*add_softmax)(const float* logits, size_t count, HeadWeight head, bool first,
                      float* values);
  // values[i] = max(values[i], (logit - max) - log_sum); `first` overwrites. With max = log_sum =
  // 0: the largest logit.
  void (*raise_to)(const float* logits, size_t count, HeadWeight head, bool first, float* values);
  // values[i] (+)= logit; `first` overwrites.
  void (*add_logits)(const float* logits, size_t count, bool first, float* values);
  // The k-th largest of count >= k >= 1 values. Work: count floats.
  ValueCut (*find_cut)(const float* values, size_t count, uint32_t k, float* work);
  // Appends positions of values above the threshold, and equal to it while the quota lasts.
  void (*emit)(EmitTask& task);
};

extern const ValueOps kValueOpsPortable;
extern const ValueOps kValueOpsAvx512;

// ValueOps::emit with VBMI2.
void EmitValuesAvx512Vbmi(EmitTask& task);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_VALUE_OPS_H_
