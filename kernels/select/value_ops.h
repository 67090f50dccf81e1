// The variants of value_select.h, on raw pointers so that the instruction-set files need no
// standard headers.
//
// Included by value_select.cc and the instruction-set files only.
#ifndef PQCACHED_KERNELS_SELECT_VALUE_OPS_H_
#define PQCACHED_KERNELS_SELECT_VALUE_OPS_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {

// Normaliser of one head, in the forms that the rules need.
struct HeadWeight {
  float max;          // largest logit
  float inverse_sum;  // 1 / sum of exponentials
  float log_sum;      // log of the sum of exponentials
};

struct ValueCut {
  float value;           // the k-th largest value
  uint32_t above_count;  // values above it
};

struct EmitTask {
  const float* values;
  uint32_t count;
  uint32_t first_position;
  float threshold;
  uint32_t equal_quota;  // decremented for every selected tie
  uint32_t* positions;   // [capacity]; entries from written on may be overwritten
  uint32_t capacity;
  uint32_t written;
};

// Operations over arrays. They clamp logits themselves. Any count is allowed; nothing beyond it is
// read or written.
struct ValueOps {
  // Returns the largest clamped logit, or `least`.
  float (*largest)(const float* logits, size_t count, float least);
  // Returns the sum of exp(clamped logit - max).
  double (*sum_exponentials)(const float* logits, size_t count, float max);
  // Sets (`first`) or adds to values[i] the weight exp(logit - max) * inverse_sum.
  void (*add_softmax)(const float* logits, size_t count, HeadWeight head, bool first,
                      float* values);
  // Sets values[i] = max(values[i], (logit - max) - log_sum); `first` overwrites. With max =
  // log_sum = 0 this is the largest logit.
  void (*update_max)(const float* logits, size_t count, HeadWeight head, bool first, float* values);
  // Sets (`first`) or adds to values[i] the logit.
  void (*add_logits)(const float* logits, size_t count, bool first, float* values);
  // Returns the k-th largest of count >= k >= 1 values. `work` has count floats.
  ValueCut (*find_cut)(const float* values, size_t count, uint32_t k, float* work);
  // Appends positions of values above the threshold, and of values equal to it while the quota
  // lasts.
  void (*emit)(EmitTask& task);
};

extern const ValueOps kValueOpsPortable;
extern const ValueOps kValueOpsAvx2;
extern const ValueOps kValueOpsAvx512;
extern const ValueOps kValueOpsNeon;

// Implements ValueOps::emit with VBMI2.
void EmitValuesAvx512Vbmi(EmitTask& task);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_VALUE_OPS_H_
