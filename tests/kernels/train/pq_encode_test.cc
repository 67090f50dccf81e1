// PqEncode: every level picks a nearest centroid, and writes only the slots that it was given.
#include "kernels/train/pq_encode.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/kernels/select/paired_geometries.h"

namespace pqcached::kernels {
namespace {

struct alignas(64) Line {
  std::byte bytes[64];
};

struct EncodeCase {
  PqGeometry geometry;
  DType dtype = DType::kF32;
  uint32_t row_count = 0;
  uint32_t first_slot = 0;
};

double SquaredDistance(const float* a, const float* b, uint32_t dim) {
  double distance = 0.0;
  for (uint32_t i = 0; i < dim; ++i) distance += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return distance;
}

// Returns the numbers of a key in a sub-space. Written without DimOf, which defines the kernels.
std::vector<float> SubspaceOf(const float* key, const PqGeometry& g, uint32_t subspace) {
  const uint32_t dim = SubspaceDim(g);
  const float* begin = key + subspace * dim;
  if (subspace * dim >= g.paired_dims) return {begin, begin + dim};
  std::vector<float> numbers;
  for (const uint32_t half : {0u, g.paired_dims / 2}) {
    for (uint32_t i = 0; i < dim / 2; ++i) numbers.push_back(key[half + subspace * dim / 2 + i]);
  }
  return numbers;
}

class EncodeProblem {
 public:
  EncodeProblem(const EncodeCase& encode_case, uint64_t seed) : case_(encode_case) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    const PqGeometry& g = case_.geometry;
    centroids_.resize(CentroidFloats(g));
    for (float& x : centroids_) x = normal(random);
    // Row: key, then as much again that is no key.
    stride_ = 2 * g.key_dim * DTypeBytes(case_.dtype);
    rows_.resize(stride_ * case_.row_count);
    keys_.resize(size_t{case_.row_count} * g.key_dim);
    for (uint32_t row = 0; row < case_.row_count; ++row) {
      for (uint32_t i = 0; i < 2 * g.key_dim; ++i) {
        StoreElement(case_.dtype, rows_.data() + row * stride_, i, normal(random));
        if (i >= g.key_dim) continue;
        keys_[row * g.key_dim + i] = LoadElement(case_.dtype, rows_.data() + row * stride_, i);
      }
    }
    slot_count_ = case_.first_slot + case_.row_count + 7;
  }

  std::vector<uint8_t> Encode(Level level) const {
    const PqGeometry& g = case_.geometry;
    std::vector<uint8_t> planes(PlaneCount(g) * slot_count_, 0xA5);
    std::vector<Line> scratch(PqEncodeScratchBytes(g) / 64 + 1);
    PqEncode(Exec{level}, {.geometry = g,
                           .dtype = case_.dtype,
                           .rows = rows_.data(),
                           .row_stride = stride_,
                           .row_count = case_.row_count,
                           .centroids = centroids_,
                           .planes = planes.data(),
                           .plane_stride = slot_count_,
                           .first_slot = case_.first_slot,
                           .scratch = {scratch[0].bytes, PqEncodeScratchBytes(g)}});
    return planes;
  }

  void ExpectNearest(const std::vector<uint8_t>& planes) const {
    const PqGeometry& g = case_.geometry;
    const uint32_t dim = SubspaceDim(g);
    for (uint32_t plane = 0; plane < PlaneCount(g); ++plane) {
      for (uint32_t slot = 0; slot < slot_count_; ++slot) {
        if (slot >= case_.first_slot && slot < case_.first_slot + case_.row_count) continue;
        ASSERT_EQ(planes[plane * slot_count_ + slot], 0xA5) << "wrote slot " << slot;
      }
    }
    for (uint32_t row = 0; row < case_.row_count; ++row) {
      for (uint32_t subspace = 0; subspace < g.subspace_count; ++subspace) {
        const std::vector<float> numbers = SubspaceOf(keys_.data() + row * g.key_dim, g, subspace);
        const float* key = numbers.data();
        const float* centroids = centroids_.data() + subspace * CentroidCount(g) * dim;
        const uint32_t code =
            GetCode(g, planes.data(), slot_count_, subspace, case_.first_slot + row);
        ASSERT_LT(code, CentroidCount(g));
        const std::vector<float> zero(dim, 0.0f);
        const double distance = SquaredDistance(key, centroids + code * dim, dim);
        for (uint32_t c = 0; c < CentroidCount(g); ++c) {
          const double other = SquaredDistance(key, centroids + c * dim, dim);
          const double slack = 1e-5 * (SquaredDistance(key, zero.data(), dim) +
                                       SquaredDistance(centroids + c * dim, zero.data(), dim));
          ASSERT_LE(distance, other + slack) << "row " << row << " subspace " << subspace;
        }
      }
    }
  }

 private:
  EncodeCase case_;
  std::vector<float> centroids_;
  std::vector<std::byte> rows_;
  std::vector<float> keys_;
  size_t stride_ = 0;
  uint32_t slot_count_ = 0;
};

TEST(PqEncodeTest, PicksNearestCentroidsForAllGeometries) {
  uint64_t seed = 0;
  for (const uint32_t key_dim : {32u, 48u, 128u}) {
    for (const uint32_t subspaces : {1u, 2u, 4u, 8u, 16u}) {
      for (uint32_t bits = 4; bits <= 8; ++bits) {
        EncodeCase encode_case{.geometry = {key_dim, subspaces, bits}};
        encode_case.dtype = static_cast<DType>(1 + ++seed % 3);
        encode_case.row_count = seed % 2 == 0 ? 1 : 70;
        encode_case.first_slot = static_cast<uint32_t>(seed % 5);
        const EncodeProblem problem(encode_case, seed);
        for (const Level level : AvailableLevels()) {
          SCOPED_TRACE(testing::Message() << LevelName(level) << " dim " << key_dim << " m "
                                          << subspaces << " b " << bits);
          problem.ExpectNearest(problem.Encode(level));
        }
      }
    }
  }
}

TEST(PqEncodeTest, PicksNearestCentroidsAroundBlockBoundaries) {
  for (const uint32_t row_count : {0u, 1u, 5u, 6u, 7u, 127u, 128u, 129u, 1025u}) {
    for (const uint32_t bits : {4u, 6u, 8u}) {
      EncodeCase encode_case{.geometry = {64, 4, bits}, .dtype = DType::kF16};
      encode_case.row_count = row_count;
      encode_case.first_slot = 3;
      const EncodeProblem problem(encode_case, row_count);
      for (const Level level : AvailableLevels()) {
        SCOPED_TRACE(testing::Message() << LevelName(level) << " rows " << row_count);
        problem.ExpectNearest(problem.Encode(level));
      }
    }
  }
}

TEST(PqEncodeTest, PicksNearestCentroidsForRareGeometries) {
  for (const PqGeometry& geometry : RareGeometries()) {
    for (const uint32_t row_count : {1u, 7u, 127u, 129u}) {
      const EncodeProblem problem(
          {.geometry = geometry, .dtype = DType::kBf16, .row_count = row_count, .first_slot = 3},
          row_count);
      for (const Level level : AvailableLevels()) {
        SCOPED_TRACE(testing::Message() << LevelName(level) << " m " << geometry.subspace_count
                                        << " b " << geometry.bits << " rows " << row_count);
        problem.ExpectNearest(problem.Encode(level));
      }
    }
  }
}

TEST(PqEncodeTest, KeepsPairsTogether) {
  for (const PqGeometry& geometry : PairedGeometries()) {
    for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
      for (const uint32_t row_count : {0u, 1u, 11u, 12u, 127u, 129u}) {
        const EncodeProblem problem(
            {.geometry = geometry, .dtype = dtype, .row_count = row_count, .first_slot = 3},
            row_count);
        for (const Level level : AvailableLevels()) {
          SCOPED_TRACE(testing::Message() << LevelName(level) << " dim " << geometry.key_dim
                                          << " m " << geometry.subspace_count << " paired "
                                          << geometry.paired_dims << " rows " << row_count);
          problem.ExpectNearest(problem.Encode(level));
        }
      }
    }
  }
}

TEST(PqEncodeTest, GivesEqualCentroidsToTheLowestIndex) {
  const PqGeometry g{.key_dim = 32, .subspace_count = 2, .bits = 6};
  std::vector<float> centroids(CentroidFloats(g));
  for (size_t i = 0; i < centroids.size(); ++i) {
    const size_t c = i / 16 % 64;
    centroids[i] = c % 8 == i % 8 ? -3.7f : 1.3f;  // centroid c equals c + 8, c + 16, ...
  }
  std::vector<float> rows(size_t{32} * 100);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = centroids[i % 32 + 32 * (i / 320)];
  for (const Level level : AvailableLevels()) {
    for (const uint32_t row_count : {1u, 100u}) {
      std::vector<uint8_t> planes(200);
      std::vector<Line> scratch(PqEncodeScratchBytes(g) / 64 + 1);
      PqEncode(Exec{level}, {.geometry = g,
                             .rows = reinterpret_cast<const std::byte*>(rows.data()),
                             .row_stride = 32 * sizeof(float),
                             .row_count = row_count,
                             .centroids = centroids,
                             .planes = planes.data(),
                             .plane_stride = 100,
                             .scratch = {scratch[0].bytes, PqEncodeScratchBytes(g)}});
      for (uint32_t row = 0; row < row_count; ++row) {
        ASSERT_LT(planes[row], 8) << LevelName(level);
        ASSERT_LT(planes[100 + row], 8) << LevelName(level);
      }
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels
