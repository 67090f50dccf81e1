// The example of values.hpp, compiled.
#include "pqcached/values.hpp"

#include <cstdint>
#include <span>

// k: the engine's block memory, [1024, 16, 8, 128]; block_table: numbers of 256 blocks.
pqcached::Tensor ValuesHppExample(const void* k, std::span<const uint32_t> block_table);

// clang-format off
pqcached::Tensor ValuesHppExample(const void* k, std::span<const uint32_t> block_table) {
  // [example]
  // [blocks, block_tokens, kv_heads, dim]
  const pqcached::Tensor block_memory(k, PQC_F16, {1024, 16, 8, 128});
  const auto keys = pqcached::Tensor::Paged(block_memory, block_table, /*token_count=*/4096);
  // [/example]
  return keys;
}
