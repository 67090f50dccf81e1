#include "kernels/simd_avx512.h"
// Vec comes first: what follows is written in terms of it.
#include "kernels/int8_row_simd.h"

namespace pqcached::kernels::internal {

void QuantizeAvx512(const Int8Call& call) { Quantize(call); }

void DequantizeAvx512(const Int8Call& call) { Dequantize(call); }

}  // namespace pqcached::kernels::internal
