#include "kernels/exact_score.h"

#include "kernels/check.h"

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

}  // namespace

size_t ExactScoreScratchBytes(uint32_t group_size, uint32_t key_dim) {
  static_cast<void>(group_size);
  static_cast<void>(key_dim);
  return 0;
}

void ExactScores(const Exec& exec, const ExactScoreArgs& args) {
  static_cast<void>(exec);
  PQC_CHECK(args.key_dim > 0 && args.key_dim % 8 == 0);
  PQC_CHECK(args.queries.size() == size_t{args.group_size} * args.key_dim);
  PQC_CHECK(args.score_stride >= args.token_count);
  PQC_CHECK(args.token_count == 0 ||
            args.scores.size() >= (args.group_size - 1) * args.score_stride + args.token_count);
  PQC_CHECK(args.scratch.size() >= ExactScoreScratchBytes(args.group_size, args.key_dim));
  ExactScoresReference(args);
}

}  // namespace pqcached::kernels
