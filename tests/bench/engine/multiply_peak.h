// The machine's multiply peak, measured by a loop of independent products in registers.
#ifndef PQCACHED_TESTS_BENCH_ENGINE_MULTIPLY_PEAK_H_
#define PQCACHED_TESTS_BENCH_ENGINE_MULTIPLY_PEAK_H_

namespace pqcached::bench {

int MachineThreads();

// Returns the multiply-adds per second of `threads` threads together: of bf16 numbers where the
// machine has AVX-512 BF16, and of floats with its widest vectors elsewhere.
double MultiplyPeak(int threads);

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_ENGINE_MULTIPLY_PEAK_H_
