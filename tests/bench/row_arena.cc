#include "tests/bench/row_arena.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <random>
#include <span>

#include "tests/bench/code_arena.h"

namespace pqcached::bench {

RowArena::RowArena(uint32_t head_count, uint32_t token_count)
    : head_count_(head_count),
      token_count_(token_count),
      memory_(size_t{head_count} * token_count * kRowBytes) {}

void RowArena::Fill(kernels::DType dtype, uint64_t seed) {
  dtype_ = dtype;
  const std::vector<float> values = NormalFloats(size_t{2} << 20, seed);
  std::vector<std::byte> pool(values.size() * sizeof(uint16_t));
  kernels::ConvertElements(kernels::DType::kF32, reinterpret_cast<const std::byte*>(values.data()),
                           dtype, pool.data(), values.size());
  FillFromPool(memory_.bytes(), pool, seed + 1);
}

std::vector<uint32_t> RandomPositions(uint32_t token_count, uint32_t count, uint64_t seed) {
  std::vector<uint32_t> all(token_count);
  std::iota(all.begin(), all.end(), 0u);
  std::vector<uint32_t> chosen;
  std::mt19937_64 random(seed);
  std::sample(all.begin(), all.end(), std::back_inserter(chosen), count, random);
  return chosen;
}

}  // namespace pqcached::bench
