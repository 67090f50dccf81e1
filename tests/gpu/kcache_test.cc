// ScoreSelect over given logits, and KCache built of it: exact scores, the top tokens of their softmax, and
// the weighted values, against plain loops.
#include "kernels/cuda/kcache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/cuda/select/select.h"
#include "kernels/select/score_select.h"
#include "tests/gpu/device_array.h"
#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels::cuda {
namespace {

constexpr GroupRule kAllRules[] = {GroupRule::kSumSoftmax, GroupRule::kMaxSoftmax,
                                   GroupRule::kMeanLogit, GroupRule::kMaxLogit};

// Logits of one lane, [G, stride].
struct LogitLane {
  std::vector<float> logits;
  uint32_t token_count = 0;
};

std::vector<uint32_t> SelectOnCpu(const LogitLane& lane, size_t stride, uint32_t group_size,
                                  GroupRule rule, uint32_t k) {
  std::vector<uint32_t> positions(std::min(k, lane.token_count));
  const size_t bytes = kernels::ScoreSelectScratchBytes(group_size, lane.token_count);
  const std::unique_ptr<void, void (*)(void*)> scratch(
      std::aligned_alloc(64, (bytes + 63) / 64 * 64), &std::free);
  const ScoreSpan span = {lane.logits.data(), stride, lane.token_count, 100};
  kernels::ScoreSelect({Level::kReference},
                       {.group_size = group_size,
                        .rule = rule,
                        .spans = {&span, 1},
                        .positions = positions,
                        .scratch = {static_cast<std::byte*>(scratch.get()), bytes}});
  return positions;
}

struct SelectResult {
  std::vector<std::vector<uint32_t>> positions;
  std::vector<float> lse;  // [lane, G]
};

class ScoreSelectDeviceTest : public DeviceTest {
 protected:
  SelectResult Select(const std::vector<LogitLane>& lanes, size_t stride, uint32_t group_size,
                      GroupRule rule, uint32_t k) {
    std::vector<std::unique_ptr<DeviceArray<float>>> memory;
    std::vector<SelectLane> lane_table;
    std::vector<SelectChunk> chunks;
    for (const LogitLane& lane : lanes) {
      memory.push_back(std::make_unique<DeviceArray<float>>(lane.logits));
      SelectLane entry = {.chunk_begin = static_cast<uint32_t>(chunks.size()), .k = k};
      for (uint32_t begin = 0; begin < lane.token_count; begin += kChunkTokens) {
        chunks.push_back({.logits = memory.back()->data(),
                          .stride = stride,
                          .slot_begin = begin,
                          .slot_end = std::min(lane.token_count, begin + kChunkTokens),
                          .first_position = 100,
                          .lane = static_cast<uint32_t>(lane_table.size())});
      }
      entry.chunk_end = static_cast<uint32_t>(chunks.size());
      lane_table.push_back(entry);
    }
    const DeviceArray<SelectLane> device_lanes(lane_table);
    const DeviceArray<SelectChunk> device_chunks(chunks);
    const auto lane_count = static_cast<uint32_t>(lanes.size());
    const auto chunk_count = static_cast<uint32_t>(chunks.size());
    DeviceArray<uint32_t> positions(lanes.size() * (k + 1));
    DeviceArray<uint32_t> counts(lanes.size());
    DeviceArray<float> lse(lanes.size() * group_size);
    DeviceArray<std::byte> scratch(
        cuda::ScoreSelectScratchBytes({group_size, lane_count, chunk_count}));
    Finish(cuda::ScoreSelect(
        {.group_size = group_size,
         .rule = rule,
         .candidates = {lane_count, chunk_count, device_lanes.data(), device_chunks.data()},
         .selection = {positions.data(), k + 1, counts.data()},
         .lse = lse.data(),
         .scratch = scratch.data(),
         .scratch_bytes = scratch.size()},
        stream_));
    SelectResult result;
    result.lse = lse.Get();
    const std::vector<uint32_t> all = positions.Get();
    const std::vector<uint32_t> lane_counts = counts.Get();
    for (size_t lane = 0; lane < lanes.size(); ++lane) {
      const auto first = all.begin() + static_cast<ptrdiff_t>(lane * (k + 1));
      result.positions.emplace_back(first, first + lane_counts[lane]);
    }
    return result;
  }
};

TEST_F(ScoreSelectDeviceTest, MatchesTheCpu) {
  constexpr size_t kStride = 8200;
  for (const uint32_t group_size : {1u, 3u}) {
    for (const GroupRule rule : kAllRules) {
      std::vector<LogitLane> lanes;
      for (const uint32_t tokens : {0u, 1u, 255u, 257u, 4096u, 4097u, 8193u}) {
        lanes.push_back({RandomFloats(group_size * kStride, tokens, 3.0f), tokens});
      }
      for (const uint32_t k : {1u, 200u}) {
        const SelectResult result = Select(lanes, kStride, group_size, rule, k);
        if (HasFatalFailure()) return;
        for (size_t lane = 0; lane < lanes.size(); ++lane) {
          EXPECT_EQ(result.positions[lane], SelectOnCpu(lanes[lane], kStride, group_size, rule, k))
              << "tokens " << lanes[lane].token_count << " k " << k << " G " << group_size
              << " rule " << static_cast<int>(rule);
        }
      }
    }
  }
}

TEST_F(ScoreSelectDeviceTest, TakesTheLowestPositionsOfTiesAndStrangeLogits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<LogitLane> lanes(3);
  for (LogitLane& lane : lanes) {
    lane.token_count = 300;
    lane.logits.assign(2 * 300, 0.0f);
  }
  for (uint32_t i = 0; i < 600; ++i) {
    lanes[1].logits[i] = i % 2 == 0 ? 0.0f : -0.0f;
    const float strange[] = {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(),
                             3e38f,     -3e38f,     1e-42f,
                             -1e-42f};
    lanes[2].logits[i] = strange[i % 7];
  }
  for (const GroupRule rule : {GroupRule::kMeanLogit, GroupRule::kMaxLogit}) {
    const SelectResult result = Select(lanes, 300, 2, rule, 90);
    if (HasFatalFailure()) return;
    for (size_t lane = 0; lane < lanes.size(); ++lane) {
      EXPECT_EQ(result.positions[lane], SelectOnCpu(lanes[lane], 300, 2, rule, 90)) << lane;
    }
  }
}

class KCacheDeviceTest : public DeviceTest {};

TEST_F(KCacheDeviceTest, ScoresAndWeighsAsPlainLoops) {
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t dim : {32u, 128u, 200u}) {
      constexpr uint32_t kGroup = 3;
      const uint32_t token_counts[] = {0, 1, 130};
      constexpr size_t kStride = 131;
      constexpr size_t kTokenStride = 20;
      std::vector<RowData> rows;
      std::vector<std::unique_ptr<DeviceArray<std::byte>>> memory;
      std::vector<KeyLane> lanes;
      const std::vector<float> queries = RandomFloats(3 * kGroup * dim, 1);
      const DeviceArray<float> device_queries(queries);
      DeviceArray<float> scores(3 * kGroup * kStride);
      std::vector<uint32_t> tokens(3 * kTokenStride, 0);
      std::vector<const std::byte*> addresses(3 * kTokenStride, nullptr);
      std::vector<uint32_t> counts;
      const size_t key_bytes = dim * DTypeBytes(dtype);
      for (uint32_t lane = 0; lane < 3; ++lane) {
        rows.push_back(MakeRows(dtype, 2 * dim, token_counts[lane], 1, 40 + lane));
        memory.push_back(std::make_unique<DeviceArray<std::byte>>(rows[lane].bytes));
        lanes.push_back({memory[lane]->data(), device_queries.data() + lane * kGroup * dim,
                         scores.data() + lane * kGroup * kStride, token_counts[lane]});
        counts.push_back(std::min(token_counts[lane], 17u));
        for (uint32_t i = 0; i < counts[lane]; ++i) {
          tokens[lane * kTokenStride + i] = i * 7;
          addresses[lane * kTokenStride + i] =
              memory[lane]->data() + i * 7 * rows[lane].stride_bytes + key_bytes;
        }
      }
      const DeviceArray<KeyLane> device_lanes(lanes);
      const float scale = 0.1f;
      Finish(ExactScores({.dtype = dtype,
                          .key_dim = dim,
                          .row_stride_bytes = 2 * key_bytes,
                          .group_size = kGroup,
                          .scale = scale,
                          .score_stride = kStride,
                          .lane_capacity = 3,
                          .token_capacity = 130,
                          .lanes = device_lanes.data()},
                         stream_));
      const std::vector<float> actual = scores.Get();
      std::vector<float> lse;
      std::vector<double> logits(3 * kGroup * kStride);
      for (uint32_t lane = 0; lane < 3; ++lane) {
        for (uint32_t head = 0; head < kGroup; ++head) {
          double sum = 0.0;
          for (uint32_t t = 0; t < token_counts[lane]; ++t) {
            double logit = 0.0;
            for (uint32_t i = 0; i < dim; ++i) {
              logit += double{queries[(lane * kGroup + head) * dim + i]} * rows[lane].Values(t)[i];
            }
            logit *= double{scale};
            const size_t index = (lane * kGroup + head) * kStride + t;
            logits[index] = logit;
            ASSERT_NEAR(actual[index], logit, 1e-4) << "token " << t;
            sum += std::exp(logit);
          }
          lse.push_back(static_cast<float>(std::log(sum)));
        }
      }
      const DeviceArray<float> device_lse(lse);
      const DeviceArray<uint32_t> device_tokens(tokens);
      const DeviceArray<uint32_t> device_counts(counts);
      const DeviceArray<const std::byte*> device_addresses(addresses);
      for (const bool renormalise : {false, true}) {
        DeviceArray<float> output(3 * kGroup * dim);
        Finish(WeightedValues({.dtype = dtype,
                               .value_dim = dim,
                               .group_size = kGroup,
                               .lane_capacity = 3,
                               .lanes = device_lanes.data(),
                               .score_stride = kStride,
                               .lse = device_lse.data(),
                               .tokens = device_tokens.data(),
                               .token_stride = kTokenStride,
                               .counts = device_counts.data(),
                               .addresses = device_addresses.data(),
                               .renormalise = renormalise,
                               .output = output.data()},
                              stream_));
        const std::vector<float> values = output.Get();
        for (uint32_t lane = 0; lane < 3; ++lane) {
          for (uint32_t head = 0; head < kGroup; ++head) {
            double weight_sum = 0.0;
            std::vector<double> expected(dim, 0.0);
            for (uint32_t i = 0; i < counts[lane]; ++i) {
              const double weight = std::exp(logits[(lane * kGroup + head) * kStride + i * 7] -
                                             double{lse[lane * kGroup + head]});
              weight_sum += weight;
              for (uint32_t d = 0; d < dim; ++d) {
                expected[d] += weight * rows[lane].Values(i * 7)[dim + d];
              }
            }
            for (uint32_t d = 0; d < dim; ++d) {
              const double divisor = renormalise && weight_sum > 0.0 ? weight_sum : 1.0;
              ASSERT_NEAR(values[(lane * kGroup + head) * dim + d], expected[d] / divisor, 1e-4)
                  << "lane " << lane << " renormalise " << renormalise;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels::cuda
