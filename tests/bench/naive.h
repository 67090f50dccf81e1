// What the kernels are compared with when nobody takes any trouble: plain loops over float tables
// and rows, compiled for this machine with all optimisations, and std::nth_element.
#ifndef PQCACHED_TESTS_BENCH_NAIVE_H_
#define PQCACHED_TESTS_BENCH_NAIVE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/select/pq.h"

namespace pqcached::bench {

// Token selection over code planes of one head; holds what memory it needs.
class NaiveSelect {
 public:
  // Writes the positions.size() tokens with the largest logits under one query head, ascending
  // (ties by position). REQUIRES: no nibble planes.
  void Single(const kernels::PqGeometry& geometry, const uint8_t* planes, size_t plane_stride,
              uint32_t token_count, const float* tables, std::span<uint32_t> positions);

  // The same by the sum of the softmax weights of `group_size` query heads.
  void SumSoftmax(const kernels::PqGeometry& geometry, const uint8_t* planes, size_t plane_stride,
                  uint32_t token_count, uint32_t group_size, const float* tables,
                  std::span<uint32_t> positions);

 private:
  void Emit(std::span<uint32_t> positions);

  std::vector<float> scores_;
  std::vector<float> head_scores_;
  std::vector<float> work_;
};

struct NaiveRows {
  kernels::DType dtype = kernels::DType::kBf16;  // bf16 or fp16
  const std::byte* rows = nullptr;
  size_t row_stride = 0;
  uint32_t dim = 0;  // of the key and of the value
};

// Attention of `group_size` heads over the rows of `positions`, which are read where they lie.
class NaiveAttend {
 public:
  void Run(const NaiveRows& rows, uint32_t group_size, const float* queries, float scale,
           std::span<const uint32_t> positions, float* output);

 private:
  template <kernels::DType kType>
  void RunTyped(const NaiveRows& rows, uint32_t group_size, const float* queries, float scale,
                std::span<const uint32_t> positions, float* output);

  std::vector<float> weights_;
};

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_NAIVE_H_
