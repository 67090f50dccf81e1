// Positions of large values, 64 at a time: one byte compression (VBMI2) replaces four compressions
// of words.
#include <immintrin.h>

#include "kernels/base/simd/emit_avx512vbmi.h"
#include "kernels/select/value_ops.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kLanes = 16;

struct Masks {
  __mmask64 above;
  __mmask64 equal;
};

inline Masks Compare(const float* values, __mmask64 valid, __m512 threshold) {
  Masks masks = {0, 0};
  for (uint32_t part = 0; part < 4; ++part) {
    const auto lanes = static_cast<__mmask16>(valid >> (part * kLanes));
    const __m512 x = _mm512_maskz_loadu_ps(lanes, values + part * kLanes);
    const __mmask16 above = _mm512_mask_cmp_ps_mask(lanes, x, threshold, _CMP_GT_OQ);
    const __mmask16 equal = _mm512_mask_cmp_ps_mask(lanes, x, threshold, _CMP_EQ_OQ);
    masks.above |= uint64_t{above} << (part * kLanes);
    masks.equal |= uint64_t{equal} << (part * kLanes);
  }
  return masks;
}

}  // namespace

void EmitValuesAvx512Vbmi(EmitTask& task) {
  const __m512 threshold = _mm512_set1_ps(task.threshold);
  PositionWriter writer = {task.positions, task.capacity, task.written};
  uint32_t quota = task.equal_quota;
  for (uint32_t i = 0; i < task.count; i += kEmitGroup) {
    const Masks masks = Compare(task.values + i, ValidLanes(i, task.count), threshold);
    __mmask64 selected = masks.above;
    if (quota > 0) selected |= TakeQuota(masks.equal, quota);
    if (selected != 0) writer.Write(selected, task.first_position + i);
  }
  task.written = writer.written;
  task.equal_quota = quota;
}

}  // namespace pqcached::kernels
