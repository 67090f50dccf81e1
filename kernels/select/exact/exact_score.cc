#include "kernels/select/exact/exact_score.h"

#include <memory>

#include "kernels/base/check.h"
#include "kernels/select/exact/exact_score_internal.h"

namespace pqcached::kernels {
namespace {

// The specification.
void ExactScoresReference(const ExactScoreArgs& args) {
  for (size_t head = 0; head < args.group_size; ++head) {
    const float* query = args.queries.data() + head * args.key_dim;
    for (size_t token = 0; token < args.token_count; ++token) {
      const std::byte* row = args.rows + token * args.row_stride_bytes;
      double sum = 0.0;
      for (size_t i = 0; i < args.key_dim; ++i) {
        sum += static_cast<double>(query[i]) * static_cast<double>(LoadElement(args.dtype, row, i));
      }
      args.scores[head * args.score_stride + token] =
          static_cast<float>(sum * static_cast<double>(args.scale));
    }
  }
}

void RunVariant(Level level, const internal::ExactScoreCall& call) {
#ifdef PQCACHED_X86
  if (level == Level::kAvx512Bf16 && call.dtype == DType::kBf16) {
    return internal::ExactScoresAvx512Bf16(call);
  }
  if (level >= Level::kAvx512) return internal::ExactScoresAvx512(call);
  if (level == Level::kAvx2) return internal::ExactScoresAvx2(call);
#else
  static_cast<void>(level);
#endif
  internal::ExactScoresPortable(call);
}

}  // namespace

size_t ExactScoreScratchBytes(uint32_t group_size, uint32_t key_dim) {
  return 64 + size_t{group_size} * ((key_dim + 31) / 32 * 32) * sizeof(float);
}

void ExactScores(const Exec& exec, const ExactScoreArgs& args) {
  PQC_CHECK(args.key_dim > 0 && args.key_dim % 8 == 0);
  PQC_CHECK(args.queries.size() == size_t{args.group_size} * args.key_dim);
  PQC_CHECK(args.score_stride >= args.token_count);
  PQC_CHECK(args.token_count == 0 ||
            args.scores.size() >= (args.group_size - 1) * args.score_stride + args.token_count);
  PQC_CHECK(args.scratch.size() >= ExactScoreScratchBytes(args.group_size, args.key_dim));
  if (exec.level == Level::kReference) return ExactScoresReference(args);
  void* scratch = args.scratch.data();
  size_t scratch_bytes = args.scratch.size();
  RunVariant(
      exec.level,
      {.dtype = args.dtype,
       .key_dim = args.key_dim,
       .row_stride_bytes = args.row_stride_bytes,
       .group_size = args.group_size,
       .token_count = args.token_count,
       .scale = args.scale,
       .queries = args.queries.data(),
       .rows = args.rows,
       .score_stride = args.score_stride,
       .scores = args.scores.data(),
       .scratch = static_cast<float*>(std::align(64, sizeof(float), scratch, scratch_bytes))});
}

}  // namespace pqcached::kernels
