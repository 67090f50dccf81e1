#include "kernels/select/exact/exact_score.h"

#include <memory>

#include "kernels/base/check.h"
#include "kernels/select/exact/exact_score_internal.h"

namespace pqcached::kernels {
namespace {

// Returns the row of each token in turn.
class Rows {
 public:
  Rows(const ExactScoreArgs& args, bool at_positions)
      : args_(args), span_(at_positions ? args.spans.data() : nullptr) {}

  const std::byte* Next() {
    const size_t token = next_++;
    if (span_ == nullptr) return args_.rows + token * args_.row_stride_bytes;
    const uint32_t position = args_.positions[token];
    while (position - span_->first_position >= span_->token_count) ++span_;
    return span_->rows + size_t{position - span_->first_position} * args_.row_stride_bytes;
  }

 private:
  const ExactScoreArgs& args_;
  const RowSpan* span_;
  size_t next_ = 0;
};

// The specification.
void ExactScoresReference(const ExactScoreArgs& args, bool at_positions) {
  for (size_t head = 0; head < args.group_size; ++head) {
    const float* query = args.queries.data() + head * args.key_dim;
    Rows rows(args, at_positions);
    for (size_t token = 0; token < args.token_count; ++token) {
      const std::byte* row = rows.Next();
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

void Score(const Exec& exec, const ExactScoreArgs& args, bool at_positions) {
  PQC_CHECK(args.key_dim > 0 && args.key_dim % 8 == 0);
  PQC_CHECK(args.queries.size() == size_t{args.group_size} * args.key_dim);
  PQC_CHECK(args.score_stride >= args.token_count);
  PQC_CHECK(args.token_count == 0 ||
            args.scores.size() >= (args.group_size - 1) * args.score_stride + args.token_count);
  PQC_CHECK(args.scratch.size() >= ExactScoreScratchBytes(args.group_size, args.key_dim));
  if (exec.level == Level::kReference) return ExactScoresReference(args, at_positions);
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
       .rows = at_positions ? nullptr : args.rows,
       .spans = args.spans.data(),
       .positions = args.positions.data(),
       .score_stride = args.score_stride,
       .scores = args.scores.data(),
       .scratch = static_cast<float*>(std::align(64, sizeof(float), scratch, scratch_bytes))});
}

}  // namespace

size_t ExactScoreScratchBytes(uint32_t group_size, uint32_t key_dim) {
  return 64 + size_t{group_size} * ((key_dim + 31) / 32 * 32) * sizeof(float);
}

void ExactScores(const Exec& exec, const ExactScoreArgs& args) { Score(exec, args, false); }

void ExactScoresAt(const Exec& exec, const ExactScoreArgs& args) {
  PQC_CHECK(args.positions.size() == args.token_count);
  PQC_CHECK(args.token_count == 0 || !args.spans.empty());
  Score(exec, args, true);
}

}  // namespace pqcached::kernels
