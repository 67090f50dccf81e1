// Bytes: a fuzzer's input, read as a stream of choices. At its end every choice is 0.
#ifndef PQCACHED_TESTS_FUZZ_BYTES_H_
#define PQCACHED_TESTS_FUZZ_BYTES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>

namespace pqcached::fuzz {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  bool empty() const { return size_ == 0; }

  uint8_t Byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }

  // In [0, count), count in 1..256; 0 of count 0.
  size_t Below(size_t count) { return count == 0 ? 0 : Byte() % count; }

  // A number that is likely to stand beside some limit, or any.
  uint64_t Number() {
    static constexpr uint64_t kEdges[] = {0,
                                          1,
                                          2,
                                          3,
                                          4,
                                          7,
                                          8,
                                          16,
                                          31,
                                          32,
                                          40,
                                          63,
                                          64,
                                          127,
                                          128,
                                          129,
                                          255,
                                          256,
                                          257,
                                          1023,
                                          1024,
                                          4095,
                                          4096,
                                          65535,
                                          65536,
                                          uint64_t{1} << 20,
                                          (uint64_t{1} << 30) - 1,
                                          uint64_t{1} << 30,
                                          (uint64_t{1} << 31) - 1,
                                          uint64_t{1} << 31,
                                          (uint64_t{1} << 32) - 1,
                                          uint64_t{1} << 32,
                                          (uint64_t{1} << 62),
                                          (uint64_t{1} << 63) - 1,
                                          uint64_t{1} << 63,
                                          ~uint64_t{0}};
    const uint8_t choice = Byte();
    if (choice < std::size(kEdges)) return kEdges[choice];
    if (choice < 192) return choice - std::size(kEdges);
    uint64_t number = 0;
    for (int i = 0; i < 8; ++i) number = number << 8 | Byte();
    return number;
  }

  // The next bytes, `most` of them when there are so many.
  std::string Text(size_t most) {
    const size_t count = std::min(most, size_);
    std::string text(reinterpret_cast<const char*>(data_), count);
    data_ += count;
    size_ -= count;
    return text;
  }

  // Overwrites `size` bytes at `to` with the next ones, as far as there are any.
  void Fill(void* to, size_t size) {
    const size_t count = std::min(size, size_);
    if (count > 0) std::memcpy(to, data_, count);
    data_ += count;
    size_ -= count;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_BYTES_H_
