// pqc_merge: partial attentions over disjoint tokens add up to the attention over all of them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "pqcached/client.h"

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Partial {
  std::vector<float> output;
  std::vector<float> lse;
};

// Attention over tokens [begin, end) of given logits [rows, tokens] and values [tokens, dim], in
// double.
Partial Attend(const std::vector<float>& logits, const std::vector<float>& values, uint32_t rows,
               uint32_t tokens, uint32_t dim, uint32_t begin, uint32_t end) {
  Partial partial{std::vector<float>(size_t{rows} * dim), std::vector<float>(rows, kNothing)};
  for (uint32_t row = 0; row < rows; ++row) {
    double sum = 0;
    std::vector<double> output(dim);
    for (uint32_t token = begin; token < end; ++token) {
      const double weight = std::exp(double{logits[size_t{row} * tokens + token]});
      sum += weight;
      for (uint32_t d = 0; d < dim; ++d) output[d] += weight * values[size_t{token} * dim + d];
    }
    if (begin == end) continue;
    partial.lse[row] = static_cast<float>(std::log(sum));
    for (uint32_t d = 0; d < dim; ++d) {
      partial.output[size_t{row} * dim + d] = static_cast<float>(output[d] / sum);
    }
  }
  return partial;
}

class MergeTest : public testing::TestWithParam<uint32_t> {};

TEST_P(MergeTest, PartsAddUpToTheWhole) {
  constexpr uint32_t kRows = 5, kTokens = 40;
  const uint32_t dim = GetParam();
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(kRows * kTokens), values(kTokens * dim);
  for (float& logit : logits) logit = normal(random);
  for (float& value : values) value = normal(random);
  const Partial whole = Attend(logits, values, kRows, kTokens, dim, 0, kTokens);
  for (const uint32_t cut : {0u, 1u, 17u, 39u, 40u}) {
    Partial merged = Attend(logits, values, kRows, kTokens, dim, 0, cut);
    const Partial rest = Attend(logits, values, kRows, kTokens, dim, cut, kTokens);
    ASSERT_EQ(pqc_merge(kRows, dim, merged.output.data(), merged.lse.data(), rest.output.data(),
                        rest.lse.data()),
              PQC_OK);
    for (uint32_t row = 0; row < kRows; ++row) ASSERT_NEAR(merged.lse[row], whole.lse[row], 1e-5f);
    for (size_t i = 0; i < whole.output.size(); ++i) {
      ASSERT_NEAR(merged.output[i], whole.output[i], 1e-5f) << "cut " << cut << ", element " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, MergeTest, testing::Values(1u, 32u, 40u, 256u));

TEST(MergeTest, NothingAndNothingIsNothing) {
  float output_a[2] = {5, 6}, lse_a = kNothing;
  const float output_b[2] = {7, 8}, lse_b = kNothing;
  ASSERT_EQ(pqc_merge(1, 2, output_a, &lse_a, output_b, &lse_b), PQC_OK);
  EXPECT_EQ(lse_a, kNothing);
  EXPECT_EQ(output_a[0], 0);
  EXPECT_EQ(output_a[1], 0);
}

TEST(MergeTest, LargeLogitsDoNotOverflow) {
  float output_a = 1, lse_a = 500;
  const float output_b = 3, lse_b = 500;
  ASSERT_EQ(pqc_merge(1, 1, &output_a, &lse_a, &output_b, &lse_b), PQC_OK);
  EXPECT_FLOAT_EQ(output_a, 2);
  EXPECT_FLOAT_EQ(lse_a, 500 + std::log(2.0f));
}

TEST(MergeTest, NullsAreRefusedByName) {
  float number = 0;
  EXPECT_EQ(pqc_merge(0, 4, nullptr, nullptr, nullptr, nullptr), PQC_OK);
  EXPECT_EQ(pqc_merge(1, 1, nullptr, &number, &number, &number), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_merge(1, 1, &number, nullptr, &number, &number), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_merge(1, 1, &number, &number, nullptr, &number), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_merge(1, 1, &number, &number, &number, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(pqc_last_error(), "lse_b: must not be NULL");
}

// A partial of [tokens, heads, dim] floats.
struct TensorPartial {
  TensorPartial(Partial& of, uint64_t tokens, uint64_t heads, uint64_t dim)
      : output_shape{tokens, heads, dim} {
    c.output.ptr = of.output.data();
    c.output.ndim = 3;
    c.lse.ptr = of.lse.data();
    c.lse.ndim = 2;
    c.output.dtype = c.lse.dtype = PQC_F32;
    c.output.shape = c.lse.shape = output_shape;
  }
  uint64_t output_shape[3];
  pqc_partial c = PQC_INIT(pqc_partial);
};

pqc_tensor Vector(const void* numbers, pqc_dtype dtype, const uint64_t* count) {
  pqc_tensor tensor = PQC_INIT(pqc_tensor);
  tensor.ptr = const_cast<void*>(numbers);
  tensor.dtype = dtype;
  tensor.ndim = 1;
  tensor.shape = count;
  return tensor;
}

// The sink of a head is one more logit of its softmax, whose value is zero.
TEST(MergeTest, SinksAreOneMoreTermOfEachHeadsSoftmax) {
  constexpr uint32_t kTokens = 3, kHeads = 4, kRows = kTokens * kHeads, kKeys = 40, kDim = 24;
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(kRows * kKeys), values(kKeys * kDim), sinks(kHeads);
  for (float& logit : logits) logit = normal(random);
  for (float& value : values) value = normal(random);
  for (float& sink : sinks) sink = normal(random);
  sinks[1] = kNothing;
  // Of the direct formula: a last key with the sink's logit and a value of zeros.
  std::vector<float> all_logits, all_values = values;
  for (uint32_t row = 0; row < kRows; ++row) {
    const auto begin = logits.begin() + row * kKeys;
    all_logits.insert(all_logits.end(), begin, begin + kKeys);
    all_logits.push_back(sinks[row % kHeads]);
  }
  all_values.resize(values.size() + kDim);
  const Partial whole = Attend(all_logits, all_values, kRows, kKeys + 1, kDim, 0, kKeys + 1);
  const uint64_t head_count[] = {kHeads};
  const pqc_tensor sink_logits = Vector(sinks.data(), PQC_F32, head_count);
  for (const uint32_t cut : {0u, 17u, 40u}) {
    Partial first = Attend(logits, values, kRows, kKeys, kDim, 0, cut);
    Partial second = Attend(logits, values, kRows, kKeys, kDim, cut, kKeys);
    TensorPartial a(first, kTokens, kHeads, kDim);
    const TensorPartial b(second, kTokens, kHeads, kDim);
    a.c.sink_logits = &sink_logits;
    ASSERT_EQ(pqc_merge_tensors(&a.c, &b.c), PQC_OK) << pqc_last_error();
    for (uint32_t row = 0; row < kRows; ++row) ASSERT_NEAR(first.lse[row], whole.lse[row], 1e-5f);
    for (size_t i = 0; i < whole.output.size(); ++i) {
      ASSERT_NEAR(first.output[i], whole.output[i], 1e-5f) << "cut " << cut << ", element " << i;
    }
  }
}

TEST(MergeTest, SinksAloneGiveNoOutput) {
  Partial first{{5, 6}, {kNothing}}, second{{7, 8}, {kNothing}};
  TensorPartial a(first, 1, 1, 2);
  const TensorPartial b(second, 1, 1, 2);
  const uint64_t one[] = {1};
  const uint16_t half = 0x3e00;  // 1.5
  const pqc_tensor sink = Vector(&half, PQC_F16, one);
  a.c.sink_logits = &sink;
  a.c.lse_base = PQC_LOG_BASE2;
  ASSERT_EQ(pqc_merge_tensors(&a.c, &b.c), PQC_OK) << pqc_last_error();
  EXPECT_FLOAT_EQ(first.lse[0], 1.5f / std::log(2.0f));
  EXPECT_EQ(first.output, (std::vector<float>{0, 0}));
}

TEST(MergeTest, BadSinksAreNamed) {
  Partial first{{5, 6}, {0, 0}}, second{{7, 8}, {0, 0}};
  TensorPartial a(first, 1, 2, 1), b(second, 1, 2, 1);
  const float numbers[3] = {};
  const uint64_t two[] = {2}, three[] = {3};
  const pqc_tensor long_sinks = Vector(numbers, PQC_F32, three);
  a.c.sink_logits = &long_sinks;
  EXPECT_EQ(pqc_merge_tensors(&a.c, &b.c), PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(pqc_last_error_field(), "a.sink_logits.shape");
  const pqc_tensor sinks = Vector(numbers, PQC_F32, two);
  a.c.sink_logits = nullptr;
  b.c.sink_logits = &sinks;
  EXPECT_EQ(pqc_merge_tensors(&a.c, &b.c), PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(pqc_last_error_field(), "b.sink_logits");
  EXPECT_EQ(first.output[0], 5.0f);
}

}  // namespace
