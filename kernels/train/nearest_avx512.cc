#include "kernels/base/simd/simd_avx512.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/train/nearest_simd.h"

namespace pqcached::kernels {

const NearestOps kNearestAvx512 = {.find = FindF32,
                                   .find_bf16 = nullptr,
                                   .find_one = FindOne,
                                   .add = AddSamples<float>,
                                   .add_bf16 = nullptr,
                                   .pair_form = PairForm::kNone,
                                   .bf16_dims = 0};

}  // namespace pqcached::kernels
