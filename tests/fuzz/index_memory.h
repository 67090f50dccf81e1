// Memory and numbers for the fuzz targets of index data.
#ifndef PQCACHED_TESTS_FUZZ_INDEX_MEMORY_H_
#define PQCACHED_TESTS_FUZZ_INDEX_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <vector>

#include "kvstore/read/layout.h"

namespace pqcached::fuzz {

// Memory of exactly the bytes asked for, so that a sanitizer sees what is read behind them.
class Memory {
 public:
  explicit Memory(size_t bytes)
      : bytes_(bytes),
        memory_(new (std::align_val_t{kvstore::kContentAlignment}) std::byte[bytes]) {
    std::memset(memory_, 0, bytes);
  }
  ~Memory() { operator delete[](memory_, std::align_val_t{kvstore::kContentAlignment}); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::span<std::byte> bytes() const { return {memory_, bytes_}; }

 private:
  const size_t bytes_;
  std::byte* const memory_;
};

// Numbers that are the same in each run.
inline std::vector<float> Numbers(size_t count, uint32_t seed) {
  std::vector<float> numbers(count);
  for (float& number : numbers) {
    seed = seed * 1664525u + 1013904223u;
    number = static_cast<float>(seed >> 8u) * 0x1p-23f - 1.0f;
  }
  return numbers;
}

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_INDEX_MEMORY_H_
