#include "kernels/base/simd/simd_avx512.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/rows/int8_row_simd.h"

namespace pqcached::kernels::internal {

void QuantizeAvx512(const Int8Call& call) { Quantize(call); }

void DequantizeAvx512(const Int8Call& call) { Dequantize(call); }

}  // namespace pqcached::kernels::internal
