// Dot products of a few queries with a few rows, written once for every Vec.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_DOT_SIMD_H_
#define PQCACHED_KERNELS_BASE_SIMD_DOT_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace pqcached::kernels {
namespace {

// Queries are padded with zeros to a multiple of this many floats.
constexpr uint32_t kDimPadding = 32;

constexpr uint32_t PaddedDim(uint32_t dim) { return (dim + kDimPadding - 1) & ~(kDimPadding - 1); }

// Dot products in fp32, for rows of any dtype.
template <DType kType>
struct FmaDots {
  // Sets to[0, PaddedDim(dim)) to scale * from[0, dim), followed by zeros.
  static void PrepareQuery(const float* from, uint32_t dim, float scale, float* to) {
    for (uint32_t i = 0; i < dim; ++i) to[i] = from[i] * scale;
    for (uint32_t i = dim; i < PaddedDim(dim); ++i) to[i] = 0.0f;
  }

  // Sets logits[q * stride + t] = query q . row t, for kQueries queries and kAccumulators /
  // kQueries rows.
  //
  // Each row element is loaded and widened once for all queries of the tile, and each query element
  // is loaded once for all rows.
  template <int kQueries>
  PQC_INLINE void Tile(const float* queries, size_t query_stride, uint32_t key_dim,
                       const std::byte* const* rows, float* logits, size_t stride) {
    constexpr int kRows = static_cast<int>(Vec::kAccumulators) / kQueries;
    using F = Vec::F;
    F sums[Vec::kAccumulators];
#pragma GCC unroll 16
    for (F& sum : sums) sum = Vec::Set(0.0f);
    uint32_t i = 0;
    for (; i + Vec::kLanes <= key_dim; i += Vec::kLanes) {
      F key[kRows];
#pragma GCC unroll 16
      for (int t = 0; t < kRows; ++t) key[t] = Vec::LoadRow<kType>(rows[t], i);
#pragma GCC unroll 4
      for (int q = 0; q < kQueries; ++q) {
        const F query = Vec::Load(queries + static_cast<size_t>(q) * query_stride + i);
#pragma GCC unroll 16
        for (int t = 0; t < kRows; ++t) {
          sums[q * kRows + t] = Vec::MulAdd(query, key[t], sums[q * kRows + t]);
        }
      }
    }
    if (i < key_dim) {
#pragma GCC unroll 16
      for (int t = 0; t < kRows; ++t) {
        const F key = Vec::LoadRowHalf<kType>(rows[t], i);
#pragma GCC unroll 4
        for (int q = 0; q < kQueries; ++q) {
          const F query = Vec::Load(queries + static_cast<size_t>(q) * query_stride + i);
          sums[q * kRows + t] = Vec::MulAdd(query, key, sums[q * kRows + t]);
        }
      }
    }
    Vec::StoreSums<kQueries>(sums, logits, stride);
  }
};

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_DOT_SIMD_H_
