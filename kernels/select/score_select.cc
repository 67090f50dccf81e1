#include "kernels/select/score_select.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/select/value_select.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kMostHeadsOfGroup = 64;

size_t TokenCount(std::span<const ScoreSpan> spans) {
  size_t token_count = 0;
  for (const ScoreSpan& span : spans) token_count += span.token_count;
  return token_count;
}

void FindNormalisers(const Exec& exec, const ScoreValuesArgs& args,
                     std::span<Normaliser> normalisers) {
  for (uint32_t head = 0; head < args.group_size; ++head) {
    for (const ScoreSpan& span : args.spans) {
      AddToMax(exec, {span.logits + head * span.head_stride, span.token_count}, normalisers[head]);
    }
    for (const ScoreSpan& span : args.spans) {
      AddToSum(exec, {span.logits + head * span.head_stride, span.token_count}, normalisers[head]);
    }
  }
}

}  // namespace

size_t ScoreSelectScratchBytes(uint32_t group_size, uint32_t token_count) {
  (void)group_size;
  return 2 * (size_t{token_count} + 16) * sizeof(float);
}

void ScoreSelect(const Exec& exec, const ScoreSelectArgs& args) {
  const size_t token_count = TokenCount(args.spans);
  const auto k = static_cast<uint32_t>(args.positions.size());
  PQC_CHECK(args.group_size >= 1 && args.group_size <= kMostHeadsOfGroup);
  PQC_CHECK(k <= token_count);
  PQC_CHECK(args.scratch.size() >=
            ScoreSelectScratchBytes(args.group_size, static_cast<uint32_t>(token_count)));
  if (k == 0) return;

  const std::span<float> values(reinterpret_cast<float*>(args.scratch.data()), token_count);
  const std::span<float> work(values.data() + (token_count + 15) / 16 * 16, token_count);
  ScoreValues(exec, {args.group_size, args.rule, args.spans, values});

  ValueThreshold threshold = FindThreshold(exec, values, k, work);
  uint32_t written = 0;
  size_t token = 0;
  for (const ScoreSpan& span : args.spans) {
    written = EmitSelected(exec, values.subspan(token, span.token_count), span.first_position,
                           threshold, args.positions, written);
    token += span.token_count;
  }
  PQC_CHECK(written == k);
}

void ScoreValues(const Exec& exec, const ScoreValuesArgs& args) {
  PQC_CHECK(args.group_size >= 1 && args.group_size <= kMostHeadsOfGroup);
  PQC_CHECK(args.values.size() == TokenCount(args.spans));
  Normaliser normalisers[kMostHeadsOfGroup];
  if (NeedsNormalisers(args.rule, args.group_size)) FindNormalisers(exec, args, normalisers);
  size_t token = 0;
  for (const ScoreSpan& span : args.spans) {
    GroupValues(exec, {.group_size = args.group_size,
                       .rule = args.rule,
                       .logits = span.logits,
                       .head_stride = span.head_stride,
                       .normalisers = {normalisers, args.group_size},
                       .values = args.values.subspan(token, span.token_count)});
    token += span.token_count;
  }
}

void SelectValues(const Exec& exec, const SelectValuesArgs& args) {
  const auto k = static_cast<uint32_t>(args.indices.size());
  PQC_CHECK(k <= args.values.size() && args.work.size() == args.values.size());
  if (k == 0) return;
  ValueThreshold threshold = FindThreshold(exec, args.values, k, args.work);
  PQC_CHECK(EmitSelected(exec, args.values, 0, threshold, args.indices, 0) == k);
}

}  // namespace pqcached::kernels
