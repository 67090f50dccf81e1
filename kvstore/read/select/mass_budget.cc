#include "kvstore/read/select/mass_budget.h"

#include <atomic>
#include <functional>
#include <new>

#include "kernels/base/check.h"

namespace pqcached::kvstore {
namespace {

size_t SpanBytes(size_t range_count) {
  return PaddedBytes(range_count * sizeof(kernels::ScoreSpan));
}

// Writes where the logits of one set are.
std::span<const kernels::ScoreSpan> SpansOfSet(const MassBudgetArgs& args, uint32_t set,
                                               std::byte* memory) {
  auto* const spans = reinterpret_cast<kernels::ScoreSpan*>(memory);
  const float* logits = args.logits.data();
  size_t count = 0;
  for (const PositionRange& range : args.candidates) {
    const uint32_t tokens = range.end - range.begin;
    new (spans + count++)
        kernels::ScoreSpan{.logits = logits + size_t{set} * args.group_size * tokens,
                           .head_stride = tokens,
                           .token_count = tokens,
                           .first_position = range.begin};
    logits += size_t{args.kv_heads} * args.group_size * tokens;
  }
  return {spans, count};
}

}  // namespace

size_t MassBudgetScratchBytes(uint32_t candidate_count, size_t range_count) {
  return SpanBytes(range_count) + PaddedBytes(kernels::MassCountScratchBytes(candidate_count));
}

uint32_t CountByMass(const kernels::Exec& exec, const MassBudgetArgs& args,
                     const ParallelFor& parallel, std::span<std::byte> scratch) {
  uint32_t candidates = 0;
  for (const PositionRange& range : args.candidates) candidates += range.end - range.begin;
  const size_t bytes = MassBudgetScratchBytes(candidates, args.candidates.size());
  PQC_CHECK(parallel.worker_count * bytes <= scratch.size());
  std::atomic<uint32_t> most = 0;
  const auto count_set = [&](uint32_t set, uint32_t worker) {
    const std::span<std::byte> own = scratch.subspan(worker * bytes, bytes);
    const uint32_t count = kernels::CountForMass(
        exec, {.group_size = args.group_size,
               .rule = args.rule,
               .spans = SpansOfSet(args, set, own.data()),
               .own = args.own.subspan(size_t{set} * args.group_size, args.group_size),
               .mass = args.mass,
               .scratch = own.subspan(SpanBytes(args.candidates.size()))});
    uint32_t before = most.load(std::memory_order_relaxed);
    while (before < count && !most.compare_exchange_weak(before, count)) {
    }
  };
  parallel.run(args.kv_heads, std::cref(count_set));
  return most.load();
}

}  // namespace pqcached::kvstore
