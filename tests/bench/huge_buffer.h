// HugeBuffer: memory on 2 MiB pages where the system gives them, touched once, so that figures are
// about memory and not about page faults.
#ifndef PQCACHED_TESTS_BENCH_HUGE_BUFFER_H_
#define PQCACHED_TESTS_BENCH_HUGE_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace pqcached::bench {

class HugeBuffer {
 public:
  // Zeros. Exits the program when there is no memory.
  explicit HugeBuffer(size_t bytes);
  ~HugeBuffer();
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  // Aligned to 2 MiB.
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }

  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Fills the memory with pieces of `pool` from random places that are multiples of 64 bytes: random
// contents at the speed of a copy. REQUIRES: pool.size() is a multiple of 64 and at least 128 KiB.
void FillFromPool(std::span<std::byte> memory, std::span<const std::byte> pool, uint64_t seed);

// Reads all of the memory as fast as one thread can, and returns something that depends on it: the
// limit that the figures are compared with. REQUIRES: 64-byte aligned.
uint64_t StreamRead(const std::byte* memory, size_t bytes);

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_HUGE_BUFFER_H_
