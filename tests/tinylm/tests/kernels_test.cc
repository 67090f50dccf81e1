// The kernels of the test engine: every instruction set against plain loops in double.

#include "tests/tinylm/kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace tinylm {
namespace {

std::vector<const Kernels*> AvailableKernels() {
  std::vector<const Kernels*> kernels{&PortableKernels()};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    kernels.push_back(&Avx2Kernels());
  }
  if (__builtin_cpu_supports("avx512f")) kernels.push_back(&Avx512Kernels());
#endif
  return kernels;
}

std::vector<float> RandomFloats(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

class KernelsTest : public testing::TestWithParam<const Kernels*> {};

TEST_P(KernelsTest, MatMulMatchesPlainLoopsAtRowCountsAroundTheTile) {
  constexpr uint32_t kInner = 37, kColumns = 96;
  for (const uint32_t rows : {1u, 2u, 5u, 6u, 7u, 11u, 12u, 13u, 25u}) {
    for (const bool add : {false, true}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, add " << add);
      const auto a = RandomFloats(size_t{rows} * kInner, 1);
      const auto b = RandomFloats(size_t{kInner} * kColumns, 2);  // [3 panels][kInner][32]
      const auto before = RandomFloats(size_t{rows} * kColumns, 3);
      auto c = before;
      GetParam()->mat_mul({.a = a.data(),
                           .a_stride = kInner,
                           .b = b.data(),
                           .b_stride = kPanelColumns,
                           .b_panel_stride = kInner * kPanelColumns,
                           .c = c.data(),
                           .c_stride = kColumns,
                           .rows = rows,
                           .inner = kInner,
                           .columns = kColumns,
                           .add = add});
      for (uint32_t row = 0; row < rows; ++row) {
        for (uint32_t column = 0; column < kColumns; ++column) {
          double sum = add ? before[row * kColumns + column] : 0;
          for (uint32_t i = 0; i < kInner; ++i) {
            const size_t panel = column / kPanelColumns;
            sum += double{a[row * kInner + i]} *
                   b[(panel * kInner + i) * kPanelColumns + column % kPanelColumns];
          }
          ASSERT_NEAR(c[row * kColumns + column], sum, 1e-4) << row << ", " << column;
        }
      }
    }
  }
}

struct AttendCase {
  uint32_t rows, group_size, first_position, first_key, key_count, window, head_dim = 64;
};

bool IsVisible(const AttendCase& c, uint32_t row, uint32_t key_index) {
  const uint32_t position = c.first_position + row / c.group_size, key = c.first_key + key_index;
  return key <= position && (c.window == 0 || key + c.window > position);
}

TEST_P(KernelsTest, AttendMatchesPlainLoops) {
  const AttendCase cases[] = {
      {2, 2, 0, 0, 1, 0},          {2, 2, 100, 0, 64, 0},         {2, 2, 5000, 0, 4097, 0},
      {256, 2, 0, 0, 128, 0},      {256, 2, 300, 0, 428, 0},      {254, 2, 129, 0, 256, 0},
      {256, 2, 300, 237, 191, 64}, {200, 1, 0, 0, 200, 64},       {7, 1, 130, 67, 70, 64},
      {8, 8, 128, 0, 129, 0},      {6, 2, 63, 0, 66, 64},         {4, 2, 10, 0, 127, 0},
      {4, 4, 900, 0, 901, 0, 128}, {256, 4, 300, 0, 428, 0, 128}, {63, 1, 64, 0, 127, 64, 128},
  };
  for (const AttendCase& c : cases) {
    SCOPED_TRACE(testing::Message()
                 << c.head_dim << " dims, " << c.rows << " rows at " << c.first_position << ", "
                 << c.key_count << " keys, window " << c.window);
    const uint32_t dim = c.head_dim;
    auto q = RandomFloats(size_t{c.rows} * dim, 1);
    for (float& x : q) x *= 0.5f;
    const auto k = RandomFloats(size_t{c.key_count} * dim, 2);
    const auto v = RandomFloats(size_t{c.key_count} * dim, 3);
    std::vector<float> o(q.size()), lse(c.rows);
    GetParam()->attend({.head_dim = dim,
                        .q = q.data(),
                        .row_count = c.rows,
                        .group_size = c.group_size,
                        .first_position = c.first_position,
                        .k = k.data(),
                        .v = v.data(),
                        .key_count = c.key_count,
                        .first_key = c.first_key,
                        .window = c.window,
                        .o = o.data(),
                        .lse = lse.data()});
    for (uint32_t row = 0; row < c.rows; ++row) {
      double sum = 0;
      std::vector<double> expected(dim);
      for (uint32_t key = 0; key < c.key_count; ++key) {
        if (!IsVisible(c, row, key)) continue;
        double logit = 0;
        for (uint32_t d = 0; d < dim; ++d) {
          logit += double{q[row * dim + d]} * k[key * dim + d];
        }
        sum += std::exp(logit);
        for (uint32_t d = 0; d < dim; ++d) {
          expected[d] += std::exp(logit) * v[key * dim + d];
        }
      }
      ASSERT_GT(sum, 0);
      ASSERT_NEAR(lse[row], std::log(sum), 1e-4) << "row " << row;
      for (uint32_t d = 0; d < dim; ++d) {
        ASSERT_NEAR(o[row * dim + d], expected[d] / sum, 1e-5) << "row " << row << " dim " << d;
      }
    }
  }
}

TEST_P(KernelsTest, AttendToNothingIsZeroWithLseOfMinusInfinity) {
  constexpr uint32_t dim = 64;
  const auto q = RandomFloats(2 * dim, 1), rows = RandomFloats(3 * dim, 2);
  for (const uint32_t key_count : {0u, 3u}) {  // none at all; only later ones
    std::vector<float> o(q.size(), 7.0f), lse(2, 7.0f);
    GetParam()->attend({.head_dim = dim,
                        .q = q.data(),
                        .row_count = 2,
                        .group_size = 2,
                        .first_position = 4,
                        .k = rows.data(),
                        .v = rows.data(),
                        .key_count = key_count,
                        .first_key = 5,
                        .o = o.data(),
                        .lse = lse.data()});
    EXPECT_EQ(o, std::vector<float>(q.size(), 0.0f));
    EXPECT_EQ(lse, std::vector<float>(2, -std::numeric_limits<float>::infinity()));
  }
}

TEST_P(KernelsTest, AttendSurvivesLogitsThatOverflowExp) {
  constexpr uint32_t dim = 64;
  std::vector<float> q(dim, 10.0f), k(2 * dim, 1.0f), v(2 * dim);
  for (uint32_t d = 0; d < dim; ++d) k[dim + d] = -1.0f;  // logits 640 and -640
  for (uint32_t d = 0; d < dim; ++d) v[d] = static_cast<float>(d);
  std::vector<float> o(dim), lse(1);
  GetParam()->attend({.head_dim = dim,
                      .q = q.data(),
                      .row_count = 1,
                      .group_size = 1,
                      .first_position = 1,
                      .k = k.data(),
                      .v = v.data(),
                      .key_count = 2,
                      .first_key = 0,
                      .o = o.data(),
                      .lse = lse.data()});
  EXPECT_FLOAT_EQ(lse[0], 640.0f);
  for (uint32_t d = 0; d < dim; ++d) EXPECT_EQ(o[d], v[d]);
}

TEST_P(KernelsTest, SiluMulMatchesPlainLoopsFromUnderflowToOverflow) {
  auto gate = RandomFloats(67, 1);
  const auto up = RandomFloats(67, 2);
  gate[0] = -120;
  gate[1] = 120;
  gate[2] = 0;
  gate[65] = -120;
  const auto before = gate;
  GetParam()->silu_mul(gate.data(), up.data(), gate.size());
  for (size_t i = 0; i < gate.size(); ++i) {
    const double z = before[i], expected = z / (1 + std::exp(-z)) * up[i];
    ASSERT_NEAR(gate[i], expected, 1e-5 + 1e-6 * std::abs(expected)) << "element " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(AllLevels, KernelsTest, testing::ValuesIn(AvailableKernels()),
                         [](const auto& level) { return std::string(level.param->name); });

}  // namespace
}  // namespace tinylm
