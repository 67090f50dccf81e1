#include "tests/bench/engine/multiply_peak.h"

#include <algorithm>
#include <cstdint>
#include <thread>

#include "kernels/base/exec.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pqcached::bench {
namespace {

constexpr uint64_t kSteps = 4000000;
constexpr int kChains = 12;  // independent sums, which hide the latency of the products

#if defined(__x86_64__)
[[gnu::target("avx512f,avx512bf16")]] double Bf16Products() {
  __m512 sums[kChains];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  __m512i factor = _mm512_set1_epi16(0x3f80);
  for (uint64_t step = 0; step < kSteps; ++step) {
    asm volatile("" : "+v"(factor));
#pragma GCC unroll 12
    for (__m512& sum : sums) {
      sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(factor),
                             reinterpret_cast<__m512bh>(factor));
    }
  }
  for (__m512& sum : sums) asm volatile("" : "+v"(sum));
  return double{kSteps} * kChains * 32;
}

[[gnu::target("avx512f")]] double Avx512Products() {
  __m512 sums[kChains];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  __m512 factor = _mm512_set1_ps(0.5f);
  for (uint64_t step = 0; step < kSteps; ++step) {
    asm volatile("" : "+v"(factor));
#pragma GCC unroll 12
    for (__m512& sum : sums) sum = _mm512_fmadd_ps(factor, factor, sum);
  }
  for (__m512& sum : sums) asm volatile("" : "+v"(sum));
  return double{kSteps} * kChains * 16;
}

[[gnu::target("avx2,fma")]] double Avx2Products() {
  __m256 sums[kChains];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  __m256 factor = _mm256_set1_ps(0.5f);
  for (uint64_t step = 0; step < kSteps; ++step) {
    asm volatile("" : "+x"(factor));
#pragma GCC unroll 12
    for (__m256& sum : sums) sum = _mm256_fmadd_ps(factor, factor, sum);
  }
  for (__m256& sum : sums) asm volatile("" : "+x"(sum));
  return double{kSteps} * kChains * 8;
}

double Products() {
  const kernels::Level level = kernels::BestLevel();
  if (level >= kernels::Level::kAvx512Bf16) return Bf16Products();
  if (level >= kernels::Level::kAvx512) return Avx512Products();
  Require(level >= kernels::Level::kAvx2, "the machine has AVX2");
  return Avx2Products();
}
#else
double Products() {
  Require(false, "the machine is an x86-64");
  return 0;
}
#endif

}  // namespace

int MachineThreads() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

double MultiplyPeak(int threads) {
  double products = 0;  // of each thread
  double best = 0;
  for (int round = 0; round < 3; ++round) {
    const double seconds = TimeOnThreads(threads, [&](int thread) {
      const double done = Products();
      if (thread == 0) products = done;
    });
    best = std::max(best, products * threads / seconds);
  }
  return best;
}

}  // namespace pqcached::bench
