// PqSelect on the device, judged by brute force over the definition: geometries, rules, sizes around
// threads and chunks, ties, several segments and codebooks, lanes of different lengths at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/select/select.h"
#include "tests/gpu/device_array.h"
#include "tests/kernels/select/pq_case.h"

namespace pqcached::kernels::cuda {
namespace {

struct Lane {
  const PqCase* pq_case;
  uint32_t k;
};

// The lanes' tables, codes and descriptors in device memory.
class DeviceProblem {
 public:
  DeviceProblem(const PqCaseShape& shape, const std::vector<Lane>& lanes, uint32_t unused_chunks)
      : shape_(shape) {
    const size_t floats_per_table = shape.group_size * TableFloats(shape.geometry);
    std::vector<float> tables;
    std::vector<SelectLane> lane_table;
    for (const Lane& lane : lanes) {
      const auto first_table = static_cast<uint32_t>(tables.size() / floats_per_table);
      tables.insert(tables.end(), lane.pq_case->tables().begin(), lane.pq_case->tables().end());
      SelectLane entry = {.chunk_begin = static_cast<uint32_t>(chunks_.size()),
                          .table_begin = first_table,
                          .table_end = static_cast<uint32_t>(tables.size() / floats_per_table),
                          .k = lane.k};
      for (const PqSpan& span : lane.pq_case->spans()) {
        AddSpan(span, first_table, static_cast<uint32_t>(lane_table.size()));
      }
      entry.chunk_end = static_cast<uint32_t>(chunks_.size());
      lane_table.push_back(entry);
      largest_k_ = std::max(largest_k_, lane.k);
    }
    chunks_.resize(chunks_.size() + unused_chunks);
    table_count_ = static_cast<uint32_t>(tables.size() / floats_per_table);
    device_tables_ = std::make_unique<DeviceArray<float>>(tables);
    device_lanes_ = std::make_unique<DeviceArray<SelectLane>>(lane_table);
    device_chunks_ = std::make_unique<DeviceArray<SelectChunk>>(chunks_);
  }

  // Positions of every lane.
  std::vector<std::vector<uint32_t>> Select(cudaStream_t stream) {
    const auto lane_count = static_cast<uint32_t>(device_lanes_->size());
    const size_t stride = largest_k_ + 3;
    DeviceArray<uint32_t> positions(std::vector<uint32_t>(lane_count * stride, 0xFFFFFFFFu));
    DeviceArray<uint32_t> counts(lane_count);
    DeviceArray<std::byte> scratch(
        PqSelectScratchBytes({shape_.geometry, shape_.group_size, lane_count,
                              static_cast<uint32_t>(chunks_.size()), table_count_}));
    const PqSelectArgs args = {
        .geometry = shape_.geometry,
        .group_size = shape_.group_size,
        .rule = shape_.rule,
        .candidates = {.lane_capacity = lane_count,
                       .chunk_capacity = static_cast<uint32_t>(chunks_.size()),
                       .lanes = device_lanes_->data(),
                       .chunks = device_chunks_->data()},
        .table_capacity = table_count_,
        .tables = device_tables_->data(),
        .selection = {positions.data(), stride, counts.data()},
        .scratch = scratch.data(),
        .scratch_bytes = scratch.size()};
    EXPECT_EQ(PqSelect(args, stream).cuda_error, 0);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const std::vector<uint32_t> all = positions.Get();
    const std::vector<uint32_t> lane_counts = counts.Get();
    std::vector<std::vector<uint32_t>> selected;
    for (uint32_t lane = 0; lane < lane_count; ++lane) {
      EXPECT_LE(lane_counts[lane], stride);
      const auto first = all.begin() + static_cast<ptrdiff_t>(lane * stride);
      selected.emplace_back(first, first + lane_counts[lane]);
      for (size_t i = lane_counts[lane]; i < stride; ++i) {
        EXPECT_EQ(first[static_cast<ptrdiff_t>(i)], 0xFFFFFFFFu) << "written beyond the count";
      }
    }
    return selected;
  }

 private:
  void AddSpan(const PqSpan& span, uint32_t first_table, uint32_t lane) {
    const size_t plane_bytes = PlaneCount(shape_.geometry) * span.plane_stride;
    planes_.push_back(std::make_unique<DeviceArray<uint8_t>>(
        std::vector<uint8_t>(span.planes, span.planes + plane_bytes)));
    for (uint32_t begin = span.slot_begin; begin < span.slot_end;) {
      const uint32_t next = (begin / kChunkTokens + 1) * kChunkTokens;
      const uint32_t end = std::min(span.slot_end, next);
      chunks_.push_back({.planes = planes_.back()->data(),
                         .stride = span.plane_stride,
                         .slot_begin = begin,
                         .slot_end = end,
                         .first_position = span.first_position,
                         .table = first_table + span.codebook,
                         .lane = lane});
      begin = end;
    }
  }

  PqCaseShape shape_;
  std::vector<std::unique_ptr<DeviceArray<uint8_t>>> planes_;
  std::vector<SelectChunk> chunks_;
  uint32_t table_count_ = 0;
  uint32_t largest_k_ = 0;
  std::unique_ptr<DeviceArray<float>> device_tables_;
  std::unique_ptr<DeviceArray<SelectLane>> device_lanes_;
  std::unique_ptr<DeviceArray<SelectChunk>> device_chunks_;
};

PqSegment WholeSegment(uint32_t slot_count) {
  return {.slot_count = slot_count, .begin = 0, .end = slot_count};
}

std::string Describe(const PqCaseShape& shape) {
  return "m " + std::to_string(shape.geometry.subspace_count) + " b " +
         std::to_string(shape.geometry.bits) + " G " + std::to_string(shape.group_size) + " rule " +
         std::to_string(static_cast<int>(shape.rule)) + " codes " +
         std::to_string(static_cast<int>(shape.codes)) + " tables " +
         std::to_string(static_cast<int>(shape.tables));
}

class PqSelectDeviceTest : public DeviceTest {
 protected:
  // One lane per case and k, all in one call.
  void ExpectSelects(const PqCaseShape& shape, const std::vector<PqCase>& cases,
                     const std::vector<uint32_t>& counts, uint32_t unused_chunks = 2) {
    std::vector<Lane> lanes;
    for (const PqCase& pq_case : cases) {
      for (const uint32_t k : counts) lanes.push_back({&pq_case, k});
    }
    DeviceProblem problem(shape, lanes, unused_chunks);
    const std::vector<std::vector<uint32_t>> selected = problem.Select(stream_);
    for (size_t lane = 0; lane < lanes.size(); ++lane) {
      const PqCase& pq_case = *lanes[lane].pq_case;
      const std::string where = Describe(shape) + " n " +
                                std::to_string(pq_case.candidate_count()) + " k " +
                                std::to_string(lanes[lane].k);
      ASSERT_EQ(selected[lane].size(), std::min(lanes[lane].k, pq_case.candidate_count())) << where;
      ASSERT_EQ(pq_case.Judge(selected[lane]), "") << where;
    }
  }
};

std::vector<PqGeometry> SomeGeometries() {
  return {{32, 1, 4}, {32, 1, 8}, {32, 2, 4}, {32, 2, 5}, {32, 2, 6},
          {32, 2, 8}, {32, 4, 4}, {32, 4, 8}, {32, 8, 5}, {32, 16, 4}};
}

TEST_F(PqSelectDeviceTest, MatchesBruteForceForGeometriesRulesAndSizes) {
  uint64_t seed = 0;
  for (const PqGeometry& geometry : SomeGeometries()) {
    for (const GroupRule rule : kAllRules) {
      PqCaseShape shape{
          .geometry = geometry, .group_size = 1 + static_cast<uint32_t>(seed % 4), .rule = rule};
      std::vector<PqCase> cases;
      for (const uint32_t size : {0u, 1u, 15u, 16u, 17u, 511u, 513u}) {
        shape.segments = {WholeSegment(size)};
        cases.emplace_back(shape, ++seed);
      }
      ExpectSelects(shape, cases, {static_cast<uint32_t>(seed % 2), 200});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(PqSelectDeviceTest, MatchesBruteForceAroundChunks) {
  for (const PqGeometry geometry : {PqGeometry{32, 2, 6}, PqGeometry{32, 4, 8}}) {
    PqCaseShape shape{.geometry = geometry, .group_size = 2};
    std::vector<PqCase> cases;
    for (const uint32_t size : {kChunkTokens - 1, kChunkTokens, kChunkTokens + 1}) {
      shape.segments = {WholeSegment(size)};
      cases.emplace_back(shape, size);
    }
    shape.segments = {WholeSegment(2 * kChunkTokens + 33)};
    shape.segments[0].begin = 3;
    cases.emplace_back(shape, 9);
    ExpectSelects(shape, cases, {1, 1000, 100'000});
    if (HasFatalFailure()) return;
  }
}

// Where there are many chunks, a block handles several, of one lane or of more.
TEST_F(PqSelectDeviceTest, MatchesBruteForceInRunsOfChunks) {
  for (const PqGeometry geometry : {PqGeometry{32, 2, 6}, PqGeometry{32, 4, 8}}) {
    for (const uint32_t group_size : {1u, 3u}) {
      PqCaseShape shape{.geometry = geometry, .group_size = group_size};
      std::vector<PqCase> cases;
      for (uint32_t lane = 0; lane < 3; ++lane) {
        shape.codebook_count = 1 + lane;
        shape.segments.clear();
        for (uint32_t i = 0; i < 3 + lane; ++i) {
          shape.segments.push_back(WholeSegment(kChunkTokens / 2 + 700 * i));
          shape.segments.back().codebook = i * shape.codebook_count / (3 + lane);
        }
        cases.emplace_back(shape, lane);
      }
      ExpectSelects(shape, cases, {1, 2000}, 12'000);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(PqSelectDeviceTest, BreaksTiesByPositionUnderStrangeTables) {
  uint64_t seed = 1000;
  for (const PqGeometry geometry : {PqGeometry{32, 2, 6}, PqGeometry{32, 4, 5}}) {
    for (const GroupRule rule : kAllRules) {
      for (const TableKind tables : kAllTableKinds) {
        PqCaseShape shape{
            .geometry = geometry, .group_size = 1 + static_cast<uint32_t>(seed % 4), .rule = rule};
        shape.tables = tables;
        shape.codes = kAllCodeKinds[seed % 4];
        shape.segments = {WholeSegment(300)};
        std::vector<PqCase> cases;
        cases.emplace_back(shape, ++seed);
        ExpectSelects(shape, cases, {1, 7, 150, 299, 300});
        if (HasFatalFailure()) return;
      }
    }
  }
}

PqSegment RandomSegment(std::mt19937_64& random, uint32_t codebook_count) {
  const auto below = [&](uint32_t limit) { return static_cast<uint32_t>(random() % limit); };
  PqSegment segment = WholeSegment(1 + below(700));
  if (below(3) == 0) segment.begin = below(segment.slot_count + 1);
  if (below(3) == 0) segment.end = segment.begin + below(segment.slot_count - segment.begin + 1);
  segment.codebook = below(codebook_count);
  if (below(3) == 0 && segment.end > segment.begin) {
    segment.excluded_begin = segment.begin + below(segment.end - segment.begin);
    segment.excluded_end = segment.excluded_begin + 1 + below(segment.end - segment.excluded_begin);
  }
  return segment;
}

TEST_F(PqSelectDeviceTest, MatchesBruteForceForBatchesOfManySpansAndCodebooks) {
  std::mt19937_64 random(42);
  for (uint32_t round = 0; round < 24; ++round) {
    PqCaseShape shape;
    shape.geometry = SomeGeometries()[random() % 10];
    shape.group_size = 1 + static_cast<uint32_t>(random() % 8);
    shape.rule = kAllRules[random() % 4];
    shape.tables = kAllTableKinds[random() % 2];
    std::vector<PqCase> cases;
    for (uint32_t lane = 0; lane < 4; ++lane) {
      shape.codebook_count = 1 + static_cast<uint32_t>(random() % 3);
      shape.segments.clear();
      const auto segment_count = static_cast<uint32_t>(random() % 6);
      for (uint32_t i = 0; i < segment_count; ++i) {
        shape.segments.push_back(RandomSegment(random, shape.codebook_count));
      }
      cases.emplace_back(shape, random());
    }
    ExpectSelects(shape, cases, {1, static_cast<uint32_t>(random() % 300)});
    if (HasFatalFailure()) return;
  }
}

TEST_F(PqSelectDeviceTest, RefusesWhatIsOutOfRange) {
  PqSelectArgs args;
  args.geometry = {32, 2, 6};
  EXPECT_FALSE(PqSelect(args, stream_).ok()) << "a group of none";
  args.group_size = 4;
  args.candidates.lane_capacity = 1;
  args.candidates.chunk_capacity = 1;
  EXPECT_FALSE(PqSelect(args, stream_).ok()) << "no scratch";
  args.geometry.bits = 9;
  EXPECT_FALSE(PqSelect(args, stream_).ok()) << "no such geometry";
}

}  // namespace
}  // namespace pqcached::kernels::cuda
