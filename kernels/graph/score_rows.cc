#include "kernels/graph/score_rows.h"

#include <algorithm>

namespace pqcached::kernels {
namespace {

void PrepareReference(const float* query, uint32_t key_dim, float scale, float* prepared) {
  for (uint32_t i = 0; i < key_dim; ++i) prepared[i] = query[i] * scale;
  std::fill(prepared + key_dim, prepared + ScoreRowsQueryFloats(key_dim), 0.0f);
}

// The specification.
template <DType kType>
void ScoreReference(const ScoreRowsCall& call) {
  for (uint32_t row = 0; row < call.count; ++row) {
    double sum = 0.0;
    for (uint32_t i = 0; i < call.key_dim; ++i) {
      sum += double{call.query[i]} * double{LoadElement(kType, call.rows[row], i)};
    }
    call.scores[row] = static_cast<float>(sum);
  }
}

RowScorer RowScorerReference(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return {PrepareReference, ScoreReference<DType::kF16>};
    case DType::kBf16:
      return {PrepareReference, ScoreReference<DType::kBf16>};
    case DType::kF32:
      break;
  }
  return {PrepareReference, ScoreReference<DType::kF32>};
}

}  // namespace

RowScorer RowScorerFor(const Exec& exec, DType dtype) {
  if (exec.level == Level::kReference) return RowScorerReference(dtype);
#ifdef PQCACHED_X86
  if (exec.level == Level::kAvx512Bf16 && dtype == DType::kBf16) {
    return internal::RowScorerAvx512Bf16();
  }
  if (exec.level >= Level::kAvx512) return internal::RowScorerAvx512(dtype);
  if (exec.level == Level::kAvx2) return internal::RowScorerAvx2(dtype);
#endif
  return internal::RowScorerPortable(dtype);
}

}  // namespace pqcached::kernels
