// RowArena: random rows of many kv heads in one large memory.
#ifndef PQCACHED_TESTS_BENCH_ROW_ARENA_H_
#define PQCACHED_TESTS_BENCH_ROW_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/base/row_span.h"
#include "tests/bench/huge_buffer.h"

namespace pqcached::bench {

// Rows [key | value] of 128 dims each, 16 bits an element: 512 bytes.
class RowArena {
 public:
  static constexpr uint32_t kDim = 128;
  static constexpr size_t kRowBytes = 2 * kDim * sizeof(uint16_t);

  // Contents are zero until Fill.
  RowArena(uint32_t head_count, uint32_t token_count);

  // Fills with normally distributed elements of fp16 or bf16.
  void Fill(kernels::DType dtype, uint64_t seed);

  kernels::DType dtype() const { return dtype_; }
  uint32_t head_count() const { return head_count_; }
  uint32_t token_count() const { return token_count_; }
  size_t head_bytes() const { return token_count_ * kRowBytes; }
  std::byte* Rows(uint32_t head) const { return memory_.data() + size_t{head} * head_bytes(); }
  kernels::RowSpan Span(uint32_t head) const { return {Rows(head), token_count_, 0}; }

 private:
  kernels::DType dtype_ = kernels::DType::kBf16;
  uint32_t head_count_;
  uint32_t token_count_;
  HugeBuffer memory_;
};

// `count` different tokens below token_count, ascending.
std::vector<uint32_t> RandomPositions(uint32_t token_count, uint32_t count, uint64_t seed);

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_ROW_ARENA_H_
