// RotateRows against its reference on every level, and MakeKeyMaps against the properties of its
// header.
#include "kernels/train/key_map.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/train/rotate.h"

namespace pqcached::kernels {
namespace {

struct alignas(64) Line {
  std::byte bytes[64];
};

class Scratch {
 public:
  explicit Scratch(size_t bytes) : lines_(bytes / 64 + 1), bytes_(bytes) {}
  std::span<std::byte> get() { return {lines_[0].bytes, bytes_}; }

 private:
  std::vector<Line> lines_;
  size_t bytes_;
};

std::vector<float> Normal(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(random);
  return numbers;
}

struct RotateCase {
  uint32_t dim = 0;
  uint32_t row_count = 0;
  uint32_t first_output = 0;
  uint32_t output_count = 0;
  DType dtype = DType::kF32;
};

std::vector<float> Rotated(Level level, const RotateCase& c) {
  const std::vector<float> numbers = Normal(c.row_count * size_t{c.dim + 3}, c.dim);
  const std::vector<float> map = Normal(size_t{c.dim} * c.dim, 7);
  const size_t stride = (c.dim + 3) * DTypeBytes(c.dtype);
  std::vector<std::byte> rows(c.row_count * stride + 1);
  ConvertElements(DType::kF32, reinterpret_cast<const std::byte*>(numbers.data()), c.dtype,
                  rows.data(), numbers.size());
  constexpr float kUntouched = 1234.5f;
  std::vector<float> outputs(size_t{c.row_count} * c.output_count + 5, kUntouched);
  Scratch scratch(RotateScratchBytes(c.dim));
  RotateRows(Exec{level}, {.dtype = c.dtype,
                           .rows = rows.data(),
                           .row_stride = stride,
                           .row_count = c.row_count,
                           .dim = c.dim,
                           .map = map,
                           .first_output = c.first_output,
                           .output_count = c.output_count,
                           .outputs = outputs.data(),
                           .scratch = scratch.get()});
  for (size_t i = outputs.size() - 5; i < outputs.size(); ++i) EXPECT_EQ(outputs[i], kUntouched);
  outputs.resize(outputs.size() - 5);
  return outputs;
}

TEST(RotateTest, EveryLevelEqualsTheReference) {
  std::vector<RotateCase> cases;
  for (const uint32_t dim : {32u, 40u, 64u, 72u, 128u, 256u}) {
    for (const uint32_t rows : {0u, 1u, 5u, 6u, 7u, 47u, 48u, 49u, 100u}) {
      cases.push_back({dim, rows, 0, dim, DType::kBf16});
    }
    for (const uint32_t width : {0u, 1u, 4u, 8u, 15u, 16u, 17u, 31u}) {
      cases.push_back({dim, 13, dim - width, width});
      cases.push_back({dim, 13, 3 % (dim - width + 1), width, DType::kF16});
    }
  }
  for (const RotateCase& c : cases) {
    const std::vector<float> expected = Rotated(Level::kReference, c);
    for (const Level level : AvailableLevels()) {
      const std::vector<float> found = Rotated(level, c);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i) {
        ASSERT_NEAR(found[i], expected[i], 1e-4 * std::sqrt(c.dim))
            << LevelName(level) << " dim " << c.dim << " rows " << c.row_count << " outputs "
            << c.first_output << " + " << c.output_count;
      }
    }
  }
}

// Vectors whose dims have very different variances and depend on each other.
std::vector<float> Skewed(uint32_t dim, uint32_t count, uint64_t seed) {
  std::vector<float> rows = Normal(size_t{count} * dim, seed);
  std::vector<float> mix = Normal(size_t{dim} * dim, seed / 100);
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) mix[i * dim + j] *= i == j ? 1.0f : 0.05f;
    mix[i * dim + i] += 3.0f;
  }
  std::vector<float> mixed(rows.size());
  for (uint32_t row = 0; row < count; ++row) {
    for (uint32_t i = 0; i < dim; ++i) {
      for (uint32_t j = 0; j < dim; ++j) {
        mixed[row * dim + i] +=
            mix[i * dim + j] * rows[row * dim + j] / (1.0f + 0.1f * static_cast<float>(j));
      }
      mixed[row * dim + i] += 3.0f;
    }
  }
  return mixed;
}

struct Maps {
  std::vector<float> keys, queries;
};

Maps MapsOf(uint32_t dim, uint32_t subspaces, std::span<const float> queries,
            std::span<const float> keys) {
  std::vector<double> query_moments(size_t{dim} * dim), key_moments(size_t{dim} * dim), sums(dim);
  for (size_t i = 0; i < queries.size(); i += dim) {
    AddMoments(queries.subspan(i, dim), query_moments, {});
  }
  for (size_t i = 0; i < keys.size(); i += dim) AddMoments(keys.subspan(i, dim), key_moments, sums);
  Maps maps{std::vector<float>(size_t{dim} * dim), std::vector<float>(size_t{dim} * dim)};
  Scratch scratch(KeyMapScratchBytes(dim));
  MakeKeyMaps({.dim = dim,
               .subspace_count = subspaces,
               .query_moments = query_moments,
               .key_moments = key_moments,
               .key_sums = sums,
               .key_count = keys.size() / dim,
               .key_map = maps.keys,
               .query_map = maps.queries,
               .scratch = scratch.get()});
  return maps;
}

std::vector<double> Apply(std::span<const float> map, std::span<const float> x) {
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t o = 0; o < x.size(); ++o) y[o] += double{x[i]} * map[i * x.size() + o];
  }
  return y;
}

TEST(KeyMapTest, MappedQueriesAndKeysHaveTheSameProducts) {
  for (const uint32_t dim : {32u, 40u, 64u, 128u}) {
    const std::vector<float> queries = Skewed(dim, 300, 100), keys = Skewed(dim, 500, 300);
    const Maps maps = MapsOf(dim, dim / 8, queries, keys);
    for (uint32_t i = 0; i < 50; ++i) {
      const auto q = std::span(queries).subspan(i * dim, dim);
      const auto k = std::span(keys).subspan(i * dim, dim);
      const std::vector<double> mapped_q = Apply(maps.queries, q), mapped_k = Apply(maps.keys, k);
      double product = 0, mapped = 0, magnitude = 0;
      for (uint32_t j = 0; j < dim; ++j) {
        product += double{q[j]} * k[j];
        mapped += mapped_q[j] * mapped_k[j];
        magnitude += std::abs(mapped_q[j] * mapped_k[j]);
      }
      EXPECT_NEAR(mapped, product, 1e-4 * magnitude) << dim;
    }
  }
}

// Squared lengths of mapped differences are mean squared errors of scores, up to the part that the
// header names and one factor.
TEST(KeyMapTest, LengthsAreErrorsOfScores) {
  constexpr uint32_t kDim = 32;
  const std::vector<float> queries = Skewed(kDim, 4000, 100), keys = Skewed(kDim, 500, 300);
  const Maps maps = MapsOf(kDim, 4, queries, keys);
  double square = 0;
  for (const float q : queries) square += double{q} * q;
  const double scale = square / static_cast<double>(queries.size());  // mean of the diagonal
  for (uint32_t pair = 0; pair + 1 < 40; ++pair) {
    std::vector<float> difference(kDim);
    double own = 0;
    for (uint32_t i = 0; i < kDim; ++i) {
      difference[i] = keys[pair * kDim + i] - keys[(pair + 1) * kDim + i];
      own += double{difference[i]} * difference[i];
    }
    double length = 0, error = 0;
    for (const double y : Apply(maps.keys, difference)) length += y * y;
    for (size_t q = 0; q < queries.size(); q += kDim) {
      double score = 0;
      for (uint32_t i = 0; i < kDim; ++i) score += double{queries[q + i]} * difference[i];
      error += score * score;
    }
    error /= static_cast<double>(queries.size() / kDim);
    EXPECT_NEAR(length, error / scale + 0.1 * own, 1e-3 * length);
  }
}

TEST(KeyMapTest, OutputsAreUncorrelatedAndSpreadOverSubspaces) {
  constexpr uint32_t kDim = 64, kSubspaces = 4, kCount = 2000;
  const std::vector<float> queries = Skewed(kDim, 300, 100), keys = Skewed(kDim, kCount, 300);
  const Maps maps = MapsOf(kDim, kSubspaces, queries, keys);
  std::vector<std::vector<double>> mapped;
  std::vector<double> mean(kDim);
  for (uint32_t i = 0; i < kCount; ++i) {
    mapped.push_back(Apply(maps.keys, std::span(keys).subspan(i * kDim, kDim)));
    for (uint32_t j = 0; j < kDim; ++j) mean[j] += mapped[i][j] / kCount;
  }
  const auto covariance = [&](uint32_t a, uint32_t b) {
    double sum = 0;
    for (const auto& y : mapped) sum += (y[a] - mean[a]) * (y[b] - mean[b]);
    return sum / kCount;
  };
  std::vector<double> logs(kSubspaces);
  for (uint32_t a = 0; a < kDim; ++a) {
    logs[a / (kDim / kSubspaces)] += std::log(covariance(a, a));
    for (uint32_t b = 0; b < a; ++b) {
      EXPECT_NEAR(covariance(a, b), 0, 1e-3 * std::sqrt(covariance(a, a) * covariance(b, b)))
          << a << " " << b;
    }
  }
  for (uint32_t s = 1; s < kSubspaces; ++s) EXPECT_NEAR(logs[s], logs[0], 6.0);
}

TEST(KeyMapTest, DegenerateSamplesGiveFiniteMaps) {
  constexpr uint32_t kDim = 32;
  const std::vector<float> zeros(kDim), one = Normal(kDim, 3);
  std::vector<float> huge(kDim, 3e38f);
  for (const auto& queries : {zeros, one, huge}) {
    for (const auto& keys : {std::vector<float>(), zeros, one, huge}) {
      const Maps maps = MapsOf(kDim, 4, queries, keys);
      for (const float x : maps.keys) ASSERT_TRUE(std::isfinite(x));
      for (const float x : maps.queries) ASSERT_TRUE(std::isfinite(x));
      const std::vector<double> y = Apply(maps.keys, one), x = Apply(maps.queries, one);
      double product = 0, expected = 0;
      for (uint32_t i = 0; i < kDim; ++i) {
        product += x[i] * y[i];
        expected += double{one[i]} * one[i];
      }
      EXPECT_NEAR(product, expected, 1e-3 * expected);
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels
