// Exact attention by several threads, beside the sums in double precision.
#include "client/engines/llama/own_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/dtype.h"

namespace pqcached::llama {
namespace {

constexpr uint32_t kDim = 32, kHeads = 4, kKvHeads = 2, kStreams = 2;
constexpr uint16_t kHiddenCell = 0xfc00;

// A node of llama.cpp with F16 rows in a cache, and random values.
struct Case {
  Case(uint32_t token_count, uint32_t cell_count, uint32_t seed)
      : tokens(token_count),
        cells(cell_count),
        queries(size_t{kStreams} * tokens * kHeads * kDim),
        keys(size_t{kStreams} * cells * kKvHeads * kDim),
        values(keys.size()),
        seen(size_t{kStreams} * tokens * cells, kHiddenCell),
        output(queries.size(), -1.0f) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& each : queries) each = normal(random);
    for (auto* rows : {&keys, &values}) {
      for (size_t i = 0; i < rows->size(); ++i) {
        kernels::StoreElement(kernels::DType::kF16, reinterpret_cast<std::byte*>(rows->data()), i,
                              normal(random));
      }
    }
    for (uint32_t row = 0; row < kStreams * tokens; ++row) {
      const uint32_t end = 1 + static_cast<uint32_t>(random()) % cells;
      for (uint32_t cell = 0; cell < end; ++cell) {
        if (cell == 0 || random() % 9 != 0) seen[size_t{row} * cells + cell] = 0;
      }
    }
    const auto set = [](GgmlTensor* tensor, GgmlType type, void* data, std::vector<int64_t> shape,
                        std::vector<size_t> strides) {
      tensor->type = type;
      tensor->data = data;
      std::copy(shape.begin(), shape.end(), tensor->ne);
      std::copy(strides.begin(), strides.end(), tensor->nb);
    };
    const size_t row_bytes = size_t{2} * kDim * kKvHeads;
    set(&q, kGgmlF32, queries.data(), {kDim, tokens, kHeads, kStreams},
        {4, size_t{4} * kDim * kHeads, size_t{4} * kDim, size_t{4} * kDim * kHeads * tokens});
    for (auto [tensor, rows] : {std::pair(&k, &keys), std::pair(&v, &values)}) {
      set(tensor, kGgmlF16, rows->data(), {kDim, cells, kKvHeads, kStreams},
          {2, row_bytes, size_t{2} * kDim, row_bytes * cells});
    }
    set(&mask, kGgmlF16, seen.data(), {cells, tokens, 1, kStreams},
        {2, size_t{2} * cells, size_t{2} * cells * tokens, size_t{2} * cells * tokens});
    set(&node, kGgmlF32, output.data(), {kDim, kHeads, tokens, kStreams},
        {4, size_t{4} * kDim, size_t{4} * kDim * kHeads, size_t{4} * kDim * kHeads * tokens});
    const float parameters[] = {0.25f, 0.0f, 0.0f};
    std::memcpy(node.op_params, parameters, sizeof(parameters));
    node.src[0] = &q;
    node.src[1] = &k;
    node.src[2] = &v;
    node.src[3] = &mask;
  }
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  static double At(const std::vector<uint16_t>& rows, size_t index) {
    return kernels::LoadElement(kernels::DType::kF16,
                                reinterpret_cast<const std::byte*>(rows.data()), index);
  }

  // The output of a head of a query token; `row` counts tokens over all streams.
  std::vector<double> Expected(uint32_t row, uint32_t head) const {
    Attention attention;
    EXPECT_EQ(Describe(node, &attention), nullptr);
    float query[kDim];
    LoadQuery(attention, row / tokens, row % tokens, head, query);
    std::vector<double> sum(kDim, 0.0);
    double whole = 0.0;
    for (uint32_t cell = 0; cell < cells; ++cell) {
      if (seen[size_t{row} * cells + cell] != 0) continue;
      const size_t first =
          ((size_t{row / tokens} * cells + cell) * kKvHeads + head / (kHeads / kKvHeads)) * kDim;
      double logit = 0.0;
      for (uint32_t i = 0; i < kDim; ++i) logit += double{query[i]} * At(keys, first + i);
      const double weight = std::exp(0.25 * logit);
      whole += weight;
      for (uint32_t i = 0; i < kDim; ++i) sum[i] += weight * At(values, first + i);
    }
    for (double& each : sum) each /= whole;
    return sum;
  }

  uint32_t tokens, cells;
  std::vector<float> queries;
  std::vector<uint16_t> keys, values, seen;
  std::vector<float> output;
  GgmlTensor q{}, k{}, v{}, mask{}, node{};
};

// Runs work on threads of its own, which begin together.
Crew Threads(uint32_t count) {
  const auto run = [](void* crew, void (*work)(void* context, uint32_t thread), void* context) {
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < *static_cast<const uint32_t*>(crew); ++i) {
      threads.emplace_back(work, context, i);
    }
    for (std::thread& each : threads) each.join();
  };
  static uint32_t counts[] = {0, 1, 2, 3, 4};
  return {.threads = count, .run = run, .crew = &counts[count]};
}

TEST(LlamaOwnRowsTest, SeveralThreadsComputeTheAttention) {
  OwnRows rows{kernels::Exec{}};
  uint32_t seed = 1;
  for (const uint32_t threads : {1u, 2u, 4u}) {
    for (const uint32_t tokens : {1u, 3u, 20u}) {
      for (const uint32_t cells : {1u, 64u, 1500u}) {
        const Case each(tokens, cells, seed++);
        Attention attention;
        ASSERT_EQ(Describe(each.node, &attention), nullptr);
        ASSERT_TRUE(rows.Prepare(attention));
        rows.Compute(Threads(threads));
        for (uint32_t row = 0; row < kStreams * tokens; ++row) {
          for (uint32_t head = 0; head < kHeads; ++head) {
            const std::vector<double> expected = each.Expected(row, head);
            for (uint32_t i = 0; i < kDim; ++i) {
              const size_t at = (size_t{row} * kHeads + head) * kDim + i;
              ASSERT_NEAR(each.output[at], expected[i], 2e-5)
                  << threads << " " << tokens << " " << cells << " " << row << " " << head;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace pqcached::llama
