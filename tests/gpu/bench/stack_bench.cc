// Whole decode steps: over the length of contexts, in a fixed budget of device memory, and over settings of the block cache.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>

#include "tests/gpu/bench/bench.h"
#include "tests/gpu/bench/stack.h"

namespace pqcached::bench {
namespace {

using kernels::cuda::CachePolicy;

// What is left of the device for KV, as an operator would set it.
constexpr size_t kHbmBudgetBytes = size_t{40} << 30;
constexpr uint32_t kMaxBatch = 64;

ModelShape ModelFor(const Bench& bench) {
  if (!bench.smoke) return {};
  return {.layer_count = 2,
          .hidden = 64,
          .ffn = 96,
          .vocabulary = 100,
          .query_heads = 4,
          .kv_heads = 2,
          .dim = 32};
}

StackOptions OptionsFor(const Bench& bench, KvMode mode, uint32_t tokens) {
  return {.model = ModelFor(bench),
          .mode = mode,
          .token_count = bench.Size(tokens, tokens / 256),
          .k = bench.Size(2048u, 40u),
          .cache_tokens = bench.Size(4096u, 256u),
          .multiprocessor_count = bench.device.multiprocessor_count};
}

struct StepTimes {
  Stat seconds;
  double hit_rate = 0.0;
};

// Steps until the cache is warm, then those that count.
StepTimes TimeSteps(Bench& bench, const StackOptions& options, Weights& weights) {
  Stack stack(options, weights, bench.stream);
  (void)stack.Run(bench.stream, bench.Size(24, 1));
  const gpu::BlockCache::Counters before = stack.Counters();
  StepTimes times = {.seconds = StatOf(stack.Run(bench.stream, bench.Size(32, 1)))};
  const gpu::BlockCache::Counters after = stack.Counters();
  const auto hits = static_cast<double>(after.hits - before.hits);
  const auto misses = static_cast<double>(after.misses - before.misses);
  if (hits + misses > 0) times.hit_rate = hits / (hits + misses);
  std::printf("  %8u tokens, batch %2u, mode %d, cache %4u: %9.3f ms a step, hit rate %.3f\n",
              options.token_count, options.batch, static_cast<int>(options.mode),
              options.cache_tokens, times.seconds.median * 1e3, times.hit_rate);
  return times;
}

Stat Times(Stat stat, double factor) {
  return {stat.median * factor, stat.spread * factor, stat.samples};
}

Stat Over(const Stat& a, const Stat& b) {
  return {a.median / b.median, (a.spread / a.median + b.spread / b.median) * a.median / b.median,
          a.samples};
}

// Tokens per second of the largest batch whose KV fits the budget.
Stat TokensPerSecond(Bench& bench, StackOptions options, Weights& weights) {
  const size_t budget = bench.smoke ? 3 * KvBytesPerSequence(options) : kHbmBudgetBytes;
  const size_t batch = std::min<size_t>(budget / KvBytesPerSequence(options), kMaxBatch);
  if (batch == 0) throw Absent("not one sequence fits the budget of device memory");
  options.batch = static_cast<uint32_t>(batch);
  const Stat seconds = TimeSteps(bench, options, weights).seconds;
  const double rate = options.batch / seconds.median;
  return {rate, rate * seconds.spread / seconds.median, seconds.samples};
}

}  // namespace

void BenchStack(Bench& bench) {
  Weights weights(ModelFor(bench));
  const auto times_of = [&](KvMode mode, uint32_t tokens) {
    return TimeSteps(bench, OptionsFor(bench, mode, tokens), weights).seconds;
  };
  const Stat long_context = times_of(KvMode::kSelected, 512u << 10);
  const Stat short_context = times_of(KvMode::kSelected, 32u << 10);
  bench.add("gpu_step_512k_over_32k", Over(long_context, short_context));

  const Stat linear = times_of(KvMode::kNone, 128u << 10);
  const Stat selecting = times_of(KvMode::kSelect, 128u << 10);
  const Stat whole = times_of(KvMode::kSelected, 128u << 10);
  bench.add("gpu_decode_linear_ms", Times(linear, 1e3));
  bench.add("gpu_decode_select_ms",
            {(selecting.median - linear.median) * 1e3, selecting.spread * 1e3, selecting.samples});
  bench.add("gpu_decode_attend_ms",
            {(whole.median - selecting.median) * 1e3, whole.spread * 1e3, whole.samples});

  const auto rate_of = [&](KvMode mode, uint32_t tokens) {
    StackOptions options = OptionsFor(bench, mode, tokens);
    if (mode == KvMode::kKCache) options.k = bench.Size(128u, 16u);
    return TokensPerSecond(bench, options, weights);
  };
  bench.add("gpu_tokens_per_s_at_budget_vs_full",
            Over(rate_of(KvMode::kSelected, 128u << 10), rate_of(KvMode::kFull, 128u << 10)));
  bench.add("gpu_kcache_tokens_per_s_vs_full",
            Over(rate_of(KvMode::kKCache, 16u << 10), rate_of(KvMode::kFull, 16u << 10)));
}

void BenchCache(Bench& bench) {
  Weights weights(ModelFor(bench));
  const auto measure = [&](const std::string& name, uint32_t cache_tokens, CachePolicy policy,
                           uint32_t max_loads) {
    StackOptions options = OptionsFor(bench, KvMode::kSelected, 128u << 10);
    options.cache_tokens = bench.smoke ? cache_tokens / 16 : cache_tokens;
    options.policy = policy;
    options.max_loads = max_loads;
    const StepTimes times = TimeSteps(bench, options, weights);
    bench.add("gpu_tpot_ms_" + name, Times(times.seconds, 1e3));
    bench.add("gpu_hit_rate_" + name, {times.hit_rate, 0.0, times.seconds.samples});
  };
  measure("cache_0", 0, CachePolicy::kLru, 32);
  const std::pair<const char*, CachePolicy> policies[] = {
      {"lru", CachePolicy::kLru},
      {"lfu", CachePolicy::kLfu},
      {"admission", CachePolicy::kFrequencyAdmission}};
  for (const auto& [name, policy] : policies) {
    for (const uint32_t tokens : {4096u, 8192u}) {
      measure("cache_" + std::to_string(tokens) + "_" + name + "_k32", tokens, policy, 32);
    }
  }
  measure("cache_4096_lru_k8", 4096, CachePolicy::kLru, 8);
  measure("cache_4096_lru_k128", 4096, CachePolicy::kLru, 128);
}

}  // namespace pqcached::bench
