// Attention on the device against the reference, over dtypes, shapes, splits and lanes of different
// lengths; merging.
#include "kernels/cuda/attend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/attend/attend.h"
#include "kernels/attend/merge.h"
#include "tests/gpu/device_array.h"
#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Result {
  std::vector<float> output;
  std::vector<float> lse;
};

class AttendDeviceTest : public DeviceTest {
 protected:
  // Lanes of `row_counts` random rows; every lane's result against the reference.
  void ExpectMatches(AttendShape shape, const std::vector<uint32_t>& row_counts, uint32_t seed,
                     float query_deviation = 2.0f, float softcap = 0.0f) {
    shape.lane_capacity = static_cast<uint32_t>(row_counts.size());
    shape.row_capacity = *std::max_element(row_counts.begin(), row_counts.end());
    const uint32_t heads = shape.query_length * shape.group_size;
    const std::vector<float> queries =
        RandomFloats(row_counts.size() * heads * shape.key_dim, seed, query_deviation);
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape.key_dim));

    std::vector<RowData> lanes;
    std::vector<std::unique_ptr<DeviceArray<std::byte>>> memory;
    const size_t stride = shape.row_capacity + 1;
    std::vector<const std::byte*> addresses(row_counts.size() * stride, nullptr);
    for (size_t lane = 0; lane < row_counts.size(); ++lane) {
      lanes.push_back(MakeRows(shape.dtype, shape.key_dim + shape.value_dim, row_counts[lane], 1,
                               seed + 1 + static_cast<uint32_t>(lane)));
      memory.push_back(std::make_unique<DeviceArray<std::byte>>(lanes[lane].bytes));
      for (uint32_t row = 0; row < row_counts[lane]; ++row) {
        addresses[lane * stride + row] = memory[lane]->data() + row * lanes[lane].stride_bytes;
      }
    }
    const DeviceArray<const std::byte*> device_addresses(addresses);
    const DeviceArray<uint32_t> device_counts(row_counts);
    const DeviceArray<float> device_queries(queries);
    DeviceArray<float> output(row_counts.size() * heads * shape.value_dim);
    DeviceArray<float> lse(row_counts.size() * heads);
    DeviceArray<std::byte> scratch(AttendScratchBytes(shape));
    Finish(AttendRows({.shape = shape,
                       .scale = scale,
                       .softcap = softcap,
                       .queries = device_queries.data(),
                       .addresses = device_addresses.data(),
                       .address_stride = stride,
                       .row_counts = device_counts.data(),
                       .output = output.data(),
                       .lse = lse.data(),
                       .scratch = scratch.data(),
                       .scratch_bytes = scratch.size()},
                      stream_));
    const Result actual = {output.Get(), lse.Get()};
    for (size_t lane = 0; lane < row_counts.size(); ++lane) {
      const auto first = queries.begin() + static_cast<ptrdiff_t>(lane * heads * shape.key_dim);
      const std::vector<float> lane_queries(first, first + heads * shape.key_dim);
      const Result expected = Expected(shape, lanes[lane], lane_queries, scale, softcap);
      for (size_t i = 0; i < heads; ++i) {
        const float difference = actual.lse[lane * heads + i] - expected.lse[i];
        ASSERT_TRUE(actual.lse[lane * heads + i] == expected.lse[i] || std::abs(difference) < 5e-5f)
            << "lane " << lane << " head " << i << ": " << actual.lse[lane * heads + i] << ", not "
            << expected.lse[i];
      }
      for (size_t i = 0; i < expected.output.size(); ++i) {
        ASSERT_NEAR(actual.output[lane * expected.output.size() + i], expected.output[i], 1e-4f)
            << "lane " << lane << " element " << i;
      }
    }
  }

  static Result Expected(const AttendShape& shape, const RowData& rows,
                         const std::vector<float>& queries, float scale, float softcap) {
    const kernels::AttendShape cpu_shape = {.dtype = shape.dtype,
                                            .key_dim = shape.key_dim,
                                            .value_dim = shape.value_dim,
                                            .row_stride_bytes = rows.stride_bytes,
                                            .group_size = shape.group_size,
                                            .query_length = shape.query_length};
    const size_t heads = size_t{shape.query_length} * shape.group_size;
    Result result = {std::vector<float>(heads * shape.value_dim), std::vector<float>(heads)};
    std::vector<std::byte> scratch(kernels::AttendScratchBytes(cpu_shape));
    AttendAllRows({Level::kReference}, {.shape = cpu_shape,
                                        .scale = scale,
                                        .softcap = softcap,
                                        .queries = queries,
                                        .spans = rows.spans,
                                        .positions = {},
                                        .output = result.output,
                                        .lse = result.lse,
                                        .scratch = scratch});
    return result;
  }
};

TEST_F(AttendDeviceTest, MatchesReferenceForDTypesAndShapes) {
  uint32_t seed = 1;
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t key_dim : {32u, 128u, 200u, 256u}) {
      for (const uint32_t group_size : {1u, 4u, 7u}) {
        ExpectMatches({.dtype = dtype,
                       .key_dim = key_dim,
                       .value_dim = key_dim == 200 ? 40 : key_dim,
                       .group_size = group_size},
                      {0, 1, 33}, seed += 10);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(AttendDeviceTest, MatchesReferenceAroundTilesAndSplits) {
  for (const uint32_t splits : {1u, 2u, 5u, 64u}) {
    ExpectMatches({.dtype = DType::kBf16,
                   .key_dim = 64,
                   .value_dim = 64,
                   .group_size = 4,
                   .split_count = splits},
                  {0, 1, 31, 32, 33, 63, 65, 300}, splits);
    if (HasFatalFailure()) return;
  }
}

TEST_F(AttendDeviceTest, MatchesReferenceForSeveralQueryPositions) {
  for (const uint32_t length : {1u, 2u, 3u, 8u}) {
    ExpectMatches({.dtype = DType::kF16,
                   .key_dim = 64,
                   .value_dim = 96,
                   .group_size = 8,
                   .query_length = length,
                   .split_count = 2},
                  {70, 5}, length);
    if (HasFatalFailure()) return;
  }
}

// Each query token attends to a range of the rows, empty ones included.
TEST_F(AttendDeviceTest, QueryTokensAttendToTheirRanges) {
  constexpr uint32_t kLength = 3, kGroup = 2, kDim = 32;
  for (const uint32_t splits : {1u, 3u}) {
    for (const uint32_t row_count : {0u, 1u, 31u, 33u, 100u}) {
      AttendShape shape = {.dtype = DType::kF32,
                           .key_dim = kDim,
                           .value_dim = kDim,
                           .group_size = kGroup,
                           .query_length = kLength,
                           .lane_capacity = 1,
                           .row_capacity = row_count,
                           .split_count = splits};
      const std::vector<uint32_t> ranges = {0, row_count / 2, row_count / 3, row_count, 1, 1};
      const std::vector<float> queries = RandomFloats(kLength * kGroup * kDim, 5, 2.0f);
      const RowData rows = MakeRows(shape.dtype, 2 * kDim, row_count, 1, 6);
      const DeviceArray<std::byte> memory(rows.bytes);
      std::vector<const std::byte*> addresses(row_count + 1, nullptr);
      for (uint32_t row = 0; row < row_count; ++row) {
        addresses[row] = memory.data() + row * rows.stride_bytes;
      }
      const DeviceArray<const std::byte*> device_addresses(addresses);
      const DeviceArray<uint32_t> counts(std::vector<uint32_t>{row_count}), row_ranges(ranges);
      const DeviceArray<float> device_queries(queries);
      DeviceArray<float> output(kLength * kGroup * kDim), lse(kLength * kGroup);
      DeviceArray<std::byte> scratch(AttendScratchBytes(shape));
      Finish(AttendRows({.shape = shape,
                         .queries = device_queries.data(),
                         .addresses = device_addresses.data(),
                         .address_stride = addresses.size(),
                         .row_counts = counts.data(),
                         .row_ranges = row_ranges.data(),
                         .output = output.data(),
                         .lse = lse.data(),
                         .scratch = scratch.data(),
                         .scratch_bytes = scratch.size()},
                        stream_));
      const Result actual = {output.Get(), lse.Get()};
      shape.query_length = 1;
      for (uint32_t token = 0; token < kLength; ++token) {
        const uint32_t begin = ranges[2 * token], end = ranges[2 * token + 1];
        RowData seen = MakeRows(shape.dtype, 2 * kDim, end - begin, 1, 6);
        if (begin < end) {
          std::copy_n(rows.bytes.begin() + begin * static_cast<ptrdiff_t>(rows.stride_bytes),
                      (end - begin) * rows.stride_bytes, seen.bytes.begin());
        }
        const auto first = queries.begin() + token * kGroup * kDim;
        const Result expected = Expected(shape, seen, {first, first + kGroup * kDim}, 1.0f, 0.0f);
        for (uint32_t i = 0; i < kGroup; ++i) {
          const float found = actual.lse[token * kGroup + i];
          ASSERT_TRUE(found == expected.lse[i] || std::abs(found - expected.lse[i]) < 5e-5f)
              << "token " << token << " of " << row_count << " rows: " << found;
        }
        for (uint32_t i = 0; i < kGroup * kDim; ++i) {
          ASSERT_NEAR(actual.output[token * kGroup * kDim + i], expected.output[i], 1e-4f)
              << "token " << token << " of " << row_count << " rows";
        }
      }
    }
  }
}

TEST_F(AttendDeviceTest, StaysFiniteUnderLargeLogitsAndSoftcap) {
  const AttendShape shape = {.dtype = DType::kF32, .key_dim = 32, .value_dim = 32, .group_size = 2};
  ExpectMatches(shape, {100}, 3, 2.0f, 5.0f);
  ExpectMatches(shape, {100}, 4, 30.0f);
}

TEST_F(AttendDeviceTest, RefusesWhatIsOutOfRange) {
  AttendArgs args = {.shape = {.key_dim = 128, .value_dim = 128, .lane_capacity = 0}};
  EXPECT_TRUE(AttendRows(args, stream_).ok()) << "no lanes";
  args.shape.query_length = 9;
  EXPECT_FALSE(AttendRows(args, stream_).ok());
  args.shape.query_length = 1;
  args.shape.key_dim = 264;
  EXPECT_FALSE(AttendRows(args, stream_).ok());
  args.shape.key_dim = 128;
  args.shape.lane_capacity = 1;
  args.shape.split_count = 2;
  EXPECT_FALSE(AttendRows(args, stream_).ok()) << "no scratch";
}

TEST_F(AttendDeviceTest, ChoosesSplitsThatFillTheDevice) {
  EXPECT_EQ(ChooseSplitCount(132, 8, 2048), 32u) << "no fewer than 64 rows a split";
  EXPECT_EQ(ChooseSplitCount(132, 8, 128 << 10), 66u);
  EXPECT_EQ(ChooseSplitCount(132, 1024, 128 << 10), 1u);
  EXPECT_EQ(ChooseSplitCount(132, 0, 0), 1u);
}

TEST_F(AttendDeviceTest, MergesPartialsInPlace) {
  constexpr uint32_t kQueries = 5;
  constexpr uint32_t kDim = 40;
  for (const uint32_t count : {0u, 1u, 2u, 8u}) {
    std::vector<std::vector<float>> outputs;
    std::vector<std::vector<float>> lses;
    std::vector<Partial> partials;
    for (uint32_t j = 0; j < count; ++j) {
      outputs.push_back(RandomFloats(kQueries * kDim, j));
      lses.push_back(RandomFloats(kQueries, 100 + j, 5.0f));
      lses.back()[j % kQueries] = -kInfinity;
      lses.back()[4] = -kInfinity;
    }
    for (uint32_t j = 0; j < count; ++j) partials.push_back({outputs[j].data(), lses[j].data()});
    Result expected = {std::vector<float>(kQueries * kDim), std::vector<float>(kQueries)};
    kernels::MergePartials({Level::kReference}, {.query_count = kQueries,
                                                 .value_dim = kDim,
                                                 .partials = partials,
                                                 .output = expected.output,
                                                 .lse = expected.lse});
    std::vector<std::unique_ptr<DeviceArray<float>>> memory;
    MergePartialsArgs args = {.query_count = kQueries, .value_dim = kDim, .partial_count = count};
    for (uint32_t j = 0; j < count; ++j) {
      memory.push_back(std::make_unique<DeviceArray<float>>(outputs[j]));
      args.outputs[j] = memory.back()->data();
      memory.push_back(std::make_unique<DeviceArray<float>>(lses[j]));
      args.lses[j] = memory.back()->data();
    }
    DeviceArray<float> output(kQueries * kDim);
    DeviceArray<float> lse(kQueries);
    args.output = count > 0 ? memory[0]->data() : output.data();
    args.lse = count > 0 ? memory[1]->data() : lse.data();
    Finish(MergePartials(args, stream_));
    const Result actual =
        count > 0 ? Result{memory[0]->Get(), memory[1]->Get()} : Result{output.Get(), lse.Get()};
    for (size_t i = 0; i < actual.output.size(); ++i) {
      ASSERT_NEAR(actual.output[i], expected.output[i], 2e-5f) << count << " partials, " << i;
    }
    for (size_t i = 0; i < kQueries; ++i) {
      ASSERT_TRUE(actual.lse[i] == expected.lse[i] ||
                  std::abs(actual.lse[i] - expected.lse[i]) < 5e-5f);
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels::cuda
