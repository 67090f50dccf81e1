// gpu_cache_study: hit rates of block-cache policies on traces of steps, counted on the CPU.
//
//   gpu_cache_study FILE...     FILE as tests/gpu/cache_traces.py writes it: uint32 lanes, steps, blocks; then [step, lane,
//                               block] uint16, rows that the step asks for
//
// Prints, for each file, policy, ageing, size and k_cache: the share of rows that were found, and blocks loaded per step and
// lane, both without the first fifth of the steps.
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "tests/gpu/plain_block_cache.h"

namespace pqcached {
namespace {

using kernels::cuda::CachePolicy;
using kernels::cuda::kBlockSlots;

struct Trace {
  uint32_t lanes = 0;
  uint32_t steps = 0;
  uint32_t blocks = 0;
  std::vector<uint16_t> touches;  // [step, lane, block]
};

bool Read(const char* path, Trace& trace) {
  std::ifstream file(path, std::ios::binary);
  uint32_t header[3] = {};
  file.read(reinterpret_cast<char*>(header), sizeof header);
  trace = {header[0], header[1], header[2], {}};
  trace.touches.resize(size_t{trace.lanes} * trace.steps * trace.blocks);
  file.read(reinterpret_cast<char*>(trace.touches.data()),
            static_cast<std::streamsize>(trace.touches.size() * sizeof(uint16_t)));
  return static_cast<bool>(file);
}

struct Result {
  double hit_rate;
  double loads;
};

Result Play(const Trace& trace, PlainBlockCache::Options options) {
  options.block_capacity = trace.blocks;
  const uint32_t warm_steps = trace.steps / 5;
  uint64_t hits = 0;
  uint64_t rows = 0;
  uint64_t loads = 0;
  for (uint32_t lane = 0; lane < trace.lanes; ++lane) {
    PlainBlockCache cache(options);
    std::vector<uint32_t> touches(trace.blocks);
    for (uint32_t step = 0; step < trace.steps; ++step) {
      const uint16_t* asked =
          trace.touches.data() + (size_t{step} * trace.lanes + lane) * trace.blocks;
      for (uint32_t block = 0; block < trace.blocks; ++block) {
        touches[block] = asked[block];
        if (step < warm_steps) continue;
        rows += asked[block];
        if (cache.IsResident(block)) hits += asked[block];
      }
      if (step == warm_steps) loads -= cache.load_count();
      cache.Update(touches, [](uint32_t) { return true; });
    }
    loads += cache.load_count();
  }
  const auto counted = static_cast<double>(size_t{trace.lanes} * (trace.steps - warm_steps));
  return {static_cast<double>(hits) / static_cast<double>(rows),
          static_cast<double>(loads) / counted};
}

void Study(const char* path, const Trace& trace) {
  std::printf("%s: %u lanes, %u steps, %u blocks\n", path, trace.lanes, trace.steps, trace.blocks);
  const struct {
    const char* name;
    CachePolicy policy;
    float ageing;
  } policies[] = {{"LRU", CachePolicy::kLru, 0.9f},
                  {"LFU 0.5", CachePolicy::kLfu, 0.5f},
                  {"LFU 0.9", CachePolicy::kLfu, 0.9f},
                  {"LFU 0.98", CachePolicy::kLfu, 0.98f},
                  {"admission 0.5", CachePolicy::kFrequencyAdmission, 0.5f},
                  {"admission 0.9", CachePolicy::kFrequencyAdmission, 0.9f},
                  {"admission 0.98", CachePolicy::kFrequencyAdmission, 0.98f}};
  std::printf("  %-16s", "tokens/k_cache");
  const std::pair<uint32_t, uint32_t> sizes[] = {
      {2048, 32}, {4096, 8}, {4096, 32}, {4096, 128}, {8192, 32}};
  for (const auto& [tokens, loads] : sizes) std::printf("  %6u/%-3u   ", tokens, loads);
  std::printf("\n");
  for (const auto& policy : policies) {
    std::printf("  %-16s", policy.name);
    for (const auto& [tokens, loads] : sizes) {
      const Result result = Play(trace, {.policy = policy.policy,
                                         .slot_capacity = tokens / kBlockSlots,
                                         .ageing = policy.ageing,
                                         .max_loads = loads});
      std::printf("  %.3f (%5.2f)", result.hit_rate, result.loads);
    }
    std::printf("\n");
  }
}

int Main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    Trace trace;
    if (!Read(argv[i], trace)) {
      std::fprintf(stderr, "error: cannot read %s\n", argv[i]);
      return 1;
    }
    Study(argv[i], trace);
  }
  return 0;
}

}  // namespace
}  // namespace pqcached

int main(int argc, char** argv) { return pqcached::Main(argc, argv); }
