// Memory and numbers for the fuzz targets of index data.
#ifndef PQCACHED_TESTS_FUZZ_INDEX_MEMORY_H_
#define PQCACHED_TESTS_FUZZ_INDEX_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "kvstore/read/layout.h"
#include "tests/fuzz/bytes.h"

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

// Overwrites words of index data, or the slots that its header says to be closed.
inline void ChangeIndexData(Bytes& bytes, kvstore::IndexDataHeader& header,
                            std::span<std::byte> contents) {
  constexpr size_t kMaxChanges = 64;
  for (size_t i = 0; i < kMaxChanges && !bytes.empty(); ++i) {
    const size_t place = (256u * bytes.Byte() + bytes.Byte()) * sizeof(uint32_t);
    const auto number = static_cast<uint32_t>(bytes.Number());
    if (place + sizeof(number) <= contents.size()) {
      std::memcpy(contents.data() + place, &number, sizeof(number));
    } else if (place % 8 == 0) {
      header.counted_end = number;
    } else {
      header.counted_begin = number;
    }
  }
}

// Adds inputs that change one of the first words, and the closed slots; `opening` is read before
// the changes.
inline void AddChanges(const std::string& opening, std::vector<std::string>* seeds) {
  for (const char number : {'\0', '\1', '\6', '\24', '\43'}) {
    for (char place = 0; place < 120; ++place) {
      seeds->push_back(opening + '\0' + place + number);
    }
    for (const char place : {'\0', '\1'}) seeds->push_back(opening + '\xff' + place + number);
  }
}

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_INDEX_MEMORY_H_
