// k-means: every level against double precision, and what happens to empty clusters and few
// samples.
#include "kernels/train/kmeans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

namespace pqcached::kernels {
namespace {

struct alignas(64) Line {
  std::byte bytes[64];
};

// Samples of one type with a fp32 copy of what they hold.
class Samples {
 public:
  Samples(DType type, uint32_t count, uint32_t dim, std::vector<float> values)
      : type_(type), count_(count), dim_(dim), bytes_(count * dim * DTypeBytes(type)) {
    KMeansLoad(Exec{Level::kReference}, {.source_type = DType::kF32,
                                         .rows = reinterpret_cast<std::byte*>(values.data()),
                                         .row_stride = dim * sizeof(float),
                                         .row_count = count,
                                         .dim = dim,
                                         .sample_type = type,
                                         .samples = bytes_.data()});
    for (size_t i = 0; i < values.size(); ++i) {
      values_.push_back(LoadElement(type, bytes_.data(), i));
    }
  }

  KMeansProblem Problem(std::vector<float>& centroids) const {
    return {.sample_type = type_,
            .samples = bytes_.data(),
            .sample_count = count_,
            .dim = dim_,
            .centroid_count = static_cast<uint32_t>(centroids.size() / dim_),
            .centroids = centroids};
  }

  const std::vector<float>& values() const { return values_; }

 private:
  DType type_;
  uint32_t count_;
  uint32_t dim_;
  std::vector<std::byte> bytes_;
  std::vector<float> values_;
};

std::vector<float> Clustered(uint32_t count, uint32_t dim, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> centers(size_t{40} * dim);
  for (float& x : centers) x = 2.0f * normal(random);
  std::vector<float> values(size_t{count} * dim);
  for (uint32_t s = 0; s < count; ++s) {
    const auto center = static_cast<size_t>(random() % 40);
    for (uint32_t i = 0; i < dim; ++i)
      values[s * dim + i] = centers[center * dim + i] + normal(random);
  }
  return values;
}

KMeansStats Step(Level level, const KMeansProblem& problem) {
  const size_t bytes = KMeansStepScratchBytes(problem.dim, problem.centroid_count);
  std::vector<Line> scratch(bytes / 64 + 1);
  return KMeansStep(Exec{level}, problem, {scratch[0].bytes, bytes});
}

double Inertia(const std::vector<float>& values, uint32_t dim,
               const std::vector<float>& centroids) {
  double inertia = 0.0;
  for (size_t s = 0; s < values.size() / dim; ++s) {
    double least = 1e300;
    for (size_t c = 0; c < centroids.size() / dim; ++c) {
      double distance = 0.0;
      for (uint32_t i = 0; i < dim; ++i) {
        const double difference = double{values[s * dim + i]} - centroids[c * dim + i];
        distance += difference * difference;
      }
      least = std::min(least, distance);
    }
    inertia += least;
  }
  return inertia;
}

TEST(KMeansTest, OneStepMatchesTheReferenceAtAllShapes) {
  uint64_t seed = 0;
  for (const uint32_t dim : {1u, 2u, 5u, 31u, 32u, 64u}) {
    for (const uint32_t centroid_count : {2u, 4u, 8u, 16u, 32u, 64u, 128u, 256u}) {
      for (const uint32_t count : {0u, 1u, 63u, 127u, 128u, 129u, 300u}) {
        for (const DType type : {DType::kF32, DType::kBf16}) {
          const Samples samples(type, count, dim, Clustered(count, dim, ++seed));
          std::vector<float> start(size_t{centroid_count} * dim);
          KMeansInit(samples.Problem(start), seed);
          std::vector<float> expected = start;
          const KMeansStats expected_stats = Step(Level::kReference, samples.Problem(expected));
          EXPECT_NEAR(expected_stats.inertia, Inertia(samples.values(), dim, start),
                      1e-4 * expected_stats.inertia + 1e-6 * count * dim);
          for (const Level level : AvailableLevels()) {
            std::vector<float> centroids = start;
            const KMeansStats stats = Step(level, samples.Problem(centroids));
            // A sample between two centroids may go either way, so only the quality must agree.
            const double slack = type == DType::kBf16 ? 0.01 : 1e-3;
            ASSERT_NEAR(stats.inertia, expected_stats.inertia,
                        slack * expected_stats.inertia + 1e-3 * count)
                << LevelName(level) << " dim " << dim << " K " << centroid_count << " n " << count;
            const double moved = Inertia(samples.values(), dim, centroids);
            ASSERT_LE(moved, (1 + slack) * expected_stats.inertia + 1e-3 * count)
                << LevelName(level) << " dim " << dim << " K " << centroid_count << " n " << count;
            // Where an empty cluster goes can hang on the last bit of a distance.
            if (expected_stats.empty_count > 0 || dim < 16) continue;
            const double expected_moved = Inertia(samples.values(), dim, expected);
            ASSERT_NEAR(moved, expected_moved, 0.05 * expected_moved + 1e-3 * count)
                << LevelName(level) << " dim " << dim << " K " << centroid_count << " n " << count;
          }
        }
      }
    }
  }
}

TEST(KMeansTest, Bf16LosesAtMostATenthOfAPercentOfInertia) {
  const uint32_t dim = 64;
  const std::vector<float> values = Clustered(8192, dim, 11);
  const Samples exact(DType::kF32, 8192, dim, values);
  const Samples rounded(DType::kBf16, 8192, dim, values);
  for (const Level level : AvailableLevels()) {
    if (level == Level::kReference) continue;  // slow, and its samples round alike
    std::vector<float> centroids(size_t{64} * dim);
    KMeansInit(exact.Problem(centroids), 5);
    std::vector<float> centroids_bf16 = centroids;
    for (uint32_t i = 0; i < 10; ++i) {
      Step(level, exact.Problem(centroids));
      Step(level, rounded.Problem(centroids_bf16));
    }
    const double inertia = Inertia(values, dim, centroids);
    EXPECT_LE(Inertia(values, dim, centroids_bf16), 1.001 * inertia) << LevelName(level);
  }
}

TEST(KMeansTest, InertiaNeverRisesFromStepToStep) {
  const uint32_t dim = 32;
  const Samples samples(DType::kF32, 5000, dim, Clustered(5000, dim, 3));
  for (const Level level : AvailableLevels()) {
    std::vector<float> centroids(size_t{64} * dim);
    KMeansInit(samples.Problem(centroids), 8);
    double last = 1e300;
    for (uint32_t i = 0; i < 8; ++i) {
      const KMeansStats stats = Step(level, samples.Problem(centroids));
      EXPECT_LE(stats.inertia, last * (1 + 1e-6)) << LevelName(level) << " step " << i;
      last = stats.inertia;
    }
  }
}

TEST(KMeansTest, SameSeedAndLevelGiveTheSameBits) {
  const Samples samples(DType::kF32, 1000, 16, Clustered(1000, 16, 3));
  for (const Level level : AvailableLevels()) {
    std::vector<float> results[2];
    for (std::vector<float>& centroids : results) {
      centroids.assign(size_t{32} * 16, 0.0f);
      KMeansInit(samples.Problem(centroids), 99);
      for (uint32_t i = 0; i < 5; ++i) Step(level, samples.Problem(centroids));
    }
    EXPECT_EQ(results[0], results[1]) << LevelName(level);
  }
  std::vector<float> other(size_t{32} * 16);
  std::vector<float> first(size_t{32} * 16);
  KMeansInit(samples.Problem(first), 99);
  KMeansInit(samples.Problem(other), 100);
  EXPECT_NE(first, other);
}

TEST(KMeansTest, InitDrawsDistinctSamples) {
  std::vector<float> values(300);
  for (uint32_t i = 0; i < 300; ++i) values[i] = static_cast<float>(i);
  for (const uint32_t count : {256u, 257u, 300u}) {
    const Samples samples(DType::kF32, count, 1, {values.begin(), values.begin() + count});
    std::vector<float> centroids(256);
    KMeansInit(samples.Problem(centroids), count);
    EXPECT_EQ(std::set<float>(centroids.begin(), centroids.end()).size(), 256u);
  }
}

TEST(KMeansTest, FewerSamplesThanCentroidsAreEachACentroid) {
  const Samples samples(DType::kF32, 10, 4, Clustered(10, 4, 1));
  for (const Level level : AvailableLevels()) {
    std::vector<float> centroids(size_t{64} * 4);
    KMeansInit(samples.Problem(centroids), 1);
    for (uint32_t i = 0; i < 3; ++i) Step(level, samples.Problem(centroids));
    EXPECT_NEAR(Inertia(samples.values(), 4, centroids), 0.0, 1e-9) << LevelName(level);
  }
}

TEST(KMeansTest, EmptyClustersMoveOntoFarSamples) {
  // Two clumps; all centroids begin in one of them.
  std::vector<float> values(2000);
  for (uint32_t i = 0; i < 1000; ++i)
    values[2 * i] = i < 900 ? 0.001f * static_cast<float>(i) : 50.0f + static_cast<float>(i);
  const Samples samples(DType::kF32, 1000, 2, values);
  for (const Level level : AvailableLevels()) {
    std::vector<float> centroids(32, 0.0f);
    for (uint32_t c = 1; c < 16; ++c) centroids[2 * c] = -1000.0f - static_cast<float>(c);
    const KMeansStats stats = Step(level, samples.Problem(centroids));
    EXPECT_EQ(stats.empty_count, 15u) << LevelName(level);
    EXPECT_EQ(stats.reseeded_count, 1u) << LevelName(level);
    EXPECT_NEAR(centroids[2], 50.0f + 999.0f, 0.01f) << LevelName(level);
    for (uint32_t i = 0; i < 20; ++i) Step(level, samples.Problem(centroids));
    EXPECT_EQ(Step(level, samples.Problem(centroids)).empty_count, 0u) << LevelName(level);
  }
}

TEST(KMeansTest, EqualSamplesGiveTheirValueWithoutDrift) {
  // 0.1 has no exact sum: adding it up in float alone would show.
  const uint32_t count = 100000;
  const Samples samples(DType::kF32, count, 2, std::vector<float>(2 * count, 0.1f));
  for (const Level level : AvailableLevels()) {
    std::vector<float> centroids(32);
    KMeansInit(samples.Problem(centroids), 4);
    const KMeansStats stats = Step(level, samples.Problem(centroids));
    EXPECT_EQ(stats.empty_count, 15u) << LevelName(level);
    EXPECT_NEAR(centroids[0], 0.1f, 2e-6f) << LevelName(level);
    EXPECT_NEAR(stats.inertia, 0.0, 1e-3) << LevelName(level);
  }
}

TEST(KMeansTest, LoadSkipsAndConvertsRows) {
  std::vector<uint16_t> rows(300);
  for (uint32_t i = 0; i < 300; ++i) rows[i] = F32ToF16(0.25f * static_cast<float>(i));
  for (const Level level : AvailableLevels()) {
    for (const uint32_t dim : {1u, 7u, 8u, 17u}) {
      std::vector<float> samples(size_t{4} * dim);
      KMeansLoad(Exec{level}, {.source_type = DType::kF16,
                               .rows = reinterpret_cast<const std::byte*>(rows.data() + 3),
                               .row_stride = 2 * 34 * sizeof(uint16_t),
                               .row_count = 4,
                               .dim = dim,
                               .sample_type = DType::kF32,
                               .samples = reinterpret_cast<std::byte*>(samples.data())});
      for (uint32_t row = 0; row < 4; ++row) {
        for (uint32_t i = 0; i < dim; ++i) {
          EXPECT_EQ(samples[row * dim + i], 0.25f * static_cast<float>(3 + row * 68 + i));
        }
      }
    }
  }
}

TEST(KMeansTest, LoadJoinsTheHalvesOfPairs) {
  std::vector<float> rows(300);
  for (uint32_t i = 0; i < 300; ++i) rows[i] = static_cast<float>(i);
  for (const Level level : AvailableLevels()) {
    for (const uint32_t half : {1u, 7u, 8u, 9u, 16u, 17u}) {
      std::vector<float> samples(size_t{3} * 2 * half, -1.0f);
      KMeansLoad(Exec{level}, {.source_type = DType::kF32,
                               .rows = reinterpret_cast<const std::byte*>(rows.data() + 5),
                               .row_stride = 64 * sizeof(float),
                               .row_count = 3,
                               .dim = 2 * half,
                               .pair_offset_bytes = 20 * sizeof(float),
                               .sample_type = DType::kF32,
                               .samples = reinterpret_cast<std::byte*>(samples.data())});
      for (uint32_t row = 0; row < 3; ++row) {
        for (uint32_t i = 0; i < 2 * half; ++i) {
          const uint32_t wanted = 5 + row * 64 + (i < half ? i : 20 + i - half);
          ASSERT_EQ(samples[row * 2 * half + i], static_cast<float>(wanted)) << LevelName(level);
        }
      }
    }
  }
}

TEST(KMeansTest, LoadGivesTheSameBitsAtEveryLevel) {
  // Every upper half of a float, with a lower half around the rounding tie.
  std::vector<uint32_t> bits;
  for (uint32_t upper = 0; upper < 0x10000u; upper += 3) {
    for (const uint32_t lower : {0u, 0x7FFFu, 0x8000u, 0x8001u})
      bits.push_back(upper << 16 | lower);
  }
  const std::byte* rows = reinterpret_cast<const std::byte*>(bits.data());
  for (const DType source : {DType::kF16, DType::kBf16, DType::kF32}) {
    for (const DType target : {DType::kF32, DType::kBf16}) {
      const auto count = static_cast<uint32_t>(bits.size() * 4 / DTypeBytes(source) / 13);
      std::vector<std::byte> expected(count * 13 * DTypeBytes(target));
      ConvertElements(source, rows, target, expected.data(), size_t{count} * 13);
      for (const Level level : AvailableLevels()) {
        std::vector<std::byte> samples(expected.size());
        KMeansLoad(Exec{level}, {.source_type = source,
                                 .rows = rows,
                                 .row_stride = 13 * DTypeBytes(source),
                                 .row_count = count,
                                 .dim = 13,
                                 .sample_type = target,
                                 .samples = samples.data()});
        for (size_t i = 0; i < size_t{count} * 13; ++i) {
          const float wanted = LoadElement(target, expected.data(), i);
          const float got = LoadElement(target, samples.data(), i);
          ASSERT_TRUE(got == wanted || (std::isnan(got) && std::isnan(wanted)))
              << LevelName(level) << " element " << i << " " << got << " not " << wanted;
        }
      }
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels
