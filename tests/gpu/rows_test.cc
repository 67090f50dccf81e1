// LocateRows and GatherRows: what lies at the addresses is the row of the token, from the cache or
// not; ranges around the selection; counts of hits and misses.
#include "kernels/cuda/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/gpu/device_array.h"

namespace pqcached::kernels::cuda {
namespace {

constexpr size_t kRowBytes = 48;

// Every byte of a row tells its lane and position.
std::byte RowByte(uint32_t lane, uint32_t position, size_t i) {
  return static_cast<std::byte>((lane * 131 + position * 7 + i) & 0xFFu);
}

// What the cache holds is told apart from the mapping by its bytes.
std::byte CachedByte(uint32_t lane, uint32_t position, size_t i) {
  return ~RowByte(lane, position, i);
}

struct LaneRows {
  std::vector<DeviceRowSpan> spans;  // rows: offsets until they are on the device
  RowLane lane;
  std::vector<uint32_t> positions;
};

// Lanes of several spans with gaps between them, with a selection and a residency.
class Problem {
 public:
  Problem(uint32_t lane_count, uint32_t seed, bool cached) : random_(seed), cached_(cached) {
    for (uint32_t lane = 0; lane < lane_count; ++lane) AddLane(lane);
    cache_slots_.resize(lanes_.size() * kBlocks, kNotResident);
    if (cached_) FillCache();
  }

  void Check(cudaStream_t stream, size_t address_stride) {
    const auto lane_count = static_cast<uint32_t>(lanes_.size());
    const DeviceArray<std::byte> rows(bytes_);
    const DeviceArray<std::byte> cache(cache_);
    std::vector<DeviceRowSpan> spans = spans_;
    for (size_t i = 0; i < spans.size(); ++i) spans[i].rows = rows.data() + offsets_[i];
    const DeviceArray<DeviceRowSpan> device_spans(spans);
    const DeviceArray<RowLane> device_lanes(lanes_);
    std::vector<uint32_t> positions(lane_count * kStride, 0xFFFFFFFFu);
    std::vector<uint32_t> counts;
    for (uint32_t lane = 0; lane < lane_count; ++lane) {
      counts.push_back(static_cast<uint32_t>(selected_[lane].size()));
      std::copy(selected_[lane].begin(), selected_[lane].end(), positions.begin() + lane * kStride);
    }
    const DeviceArray<uint32_t> device_positions(positions);
    const DeviceArray<uint32_t> device_counts(counts);
    const DeviceArray<uint32_t> cache_slots(cache_slots_);
    DeviceArray<uint32_t> touches(std::vector<uint32_t>(lane_count * kBlocks, 0));
    DeviceArray<unsigned long long> hits(std::vector<unsigned long long>(2, 0));
    DeviceArray<const std::byte*> addresses(lane_count * address_stride);
    DeviceArray<uint32_t> row_counts(lane_count);
    DeviceArray<uint32_t> missed(lane_count * address_stride);
    DeviceArray<uint32_t> missed_counts(std::vector<uint32_t>(lane_count, 0));
    LocateRowsArgs args = {.lane_capacity = lane_count,
                           .lanes = device_lanes.data(),
                           .spans = device_spans.data(),
                           .row_stride_bytes = kRowBytes,
                           .positions = device_positions.data(),
                           .position_stride = kStride,
                           .counts = device_counts.data(),
                           .residency = {},
                           .addresses = addresses.data(),
                           .address_stride = address_stride,
                           .row_counts = row_counts.data(),
                           .missed_rows = missed.data(),
                           .missed_counts = missed_counts.data()};
    if (cached_) {
      args.residency = {.block_capacity = kBlocks,
                        .cache_slots = cache_slots.data(),
                        .slot_capacity = kSlots,
                        .cached_rows = cache.data(),
                        .touches = touches.data(),
                        .hits = hits.data(),
                        .misses = hits.data() + 1};
    }
    ASSERT_EQ(LocateRows(args, stream).cuda_error, 0);
    constexpr size_t kTargetStride = 48;
    DeviceArray<std::byte> target(lane_count * address_stride * kTargetStride);
    ASSERT_EQ(GatherRows({.lane_capacity = lane_count,
                          .addresses = addresses.data(),
                          .address_stride = address_stride,
                          .row_counts = row_counts.data(),
                          .part_begin_bytes = 16,
                          .part_bytes = 32,
                          .target = target.data(),
                          .target_stride_bytes = kTargetStride},
                         stream)
                  .cuda_error,
              0);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CheckResults(target.Get(), kTargetStride, row_counts.Get(), address_stride);
    CheckCounts(hits.Get(), touches.Get(), missed.Get(), missed_counts.Get(), address_stride);
  }

 private:
  static constexpr uint32_t kBlocks = 16;
  static constexpr uint32_t kSlots = 5;
  static constexpr size_t kStride = 1500;

  void AddLane(uint32_t lane_index) {
    RowLane lane = {.span_begin = static_cast<uint32_t>(spans_.size())};
    const auto below = [&](uint32_t limit) { return static_cast<uint32_t>(random_() % limit); };
    uint32_t position = 3 + below(20);
    uint32_t block = 0;
    std::vector<uint32_t> all;
    const uint32_t span_count = lane_index == 1 ? 0 : 1 + below(4);
    for (uint32_t i = 0; i < span_count; ++i) {
      const uint32_t token_count = i == 1 ? 0 : 1 + below(300);
      offsets_.push_back(bytes_.size());
      for (uint32_t token = 0; token < token_count; ++token) {
        all.push_back(position + token);
        for (size_t b = 0; b < kRowBytes; ++b) {
          bytes_.push_back(RowByte(lane_index, position + token, b));
        }
      }
      spans_.push_back({nullptr, token_count, position, block, below(2)});
      position += token_count + below(3);
      block += (token_count + kBlockSlots - 1) / kBlockSlots;
    }
    lane.span_end = static_cast<uint32_t>(spans_.size());
    // Ranges over the first and last positions, gaps among them.
    if (!all.empty()) {
      lane.before = {0, all.front() + below(5)};
      lane.after = {std::max(lane.before.end, all.back() - std::min(all.back(), below(40))),
                    all.back() + 3};
    }
    std::vector<uint32_t> expected;
    std::vector<uint32_t> selected;
    const uint32_t share = 1 + below(4);
    for (const uint32_t token : all) {
      const bool in_range = token < lane.before.end || token >= lane.after.begin;
      if (!in_range && below(share) == 0) selected.push_back(token);
    }
    for (const uint32_t token : all) {
      if (token < lane.before.end) expected.push_back(token);
    }
    expected.insert(expected.end(), selected.begin(), selected.end());
    for (const uint32_t token : all) {
      if (token >= lane.after.begin) expected.push_back(token);
    }
    lanes_.push_back(lane);
    selected_.push_back(selected);
    expected_.push_back(expected);
  }

  // Some blocks of each lane in some slots.
  void FillCache() {
    cache_.resize(lanes_.size() * kSlots * kBlockSlots * kRowBytes);
    for (uint32_t lane = 0; lane < lanes_.size(); ++lane) {
      uint32_t slot = kSlots;
      for (uint32_t i = lanes_[lane].span_begin; i < lanes_[lane].span_end; ++i) {
        const DeviceRowSpan& span = spans_[i];
        for (uint32_t begin = 0; begin < span.token_count && slot > 0; begin += kBlockSlots) {
          if (random_() % 2 == 0) continue;
          cache_slots_[lane * kBlocks + span.first_block + begin / kBlockSlots] = --slot;
          const uint32_t end = std::min(begin + kBlockSlots, span.token_count);
          for (uint32_t token = begin; token < end; ++token) {
            for (size_t b = 0; b < kRowBytes; ++b) {
              cache_[((lane * kSlots + slot) * kBlockSlots + token - begin) * kRowBytes + b] =
                  CachedByte(lane, span.first_position + token, b);
            }
          }
        }
      }
    }
  }

  bool IsHit(uint32_t lane, uint32_t position) const {
    if (!cached_) return false;
    for (uint32_t i = lanes_[lane].span_begin; i < lanes_[lane].span_end; ++i) {
      const uint32_t slot = position - spans_[i].first_position;
      if (slot >= spans_[i].token_count) continue;
      return cache_slots_[lane * kBlocks + spans_[i].first_block + slot / kBlockSlots] !=
             kNotResident;
    }
    return false;
  }

  bool IsHostOnly(uint32_t lane, uint32_t position) const {
    bool host_only = false;
    for (uint32_t i = lanes_[lane].span_begin; i < lanes_[lane].span_end; ++i) {
      const DeviceRowSpan& span = spans_[i];
      if (position >= span.first_position && position < span.first_position + span.token_count) {
        host_only = span.host_only != 0;
      }
    }
    return host_only;
  }

  void CheckResults(const std::vector<std::byte>& target, size_t target_stride,
                    const std::vector<uint32_t>& row_counts, size_t address_stride) const {
    for (uint32_t lane = 0; lane < lanes_.size(); ++lane) {
      ASSERT_EQ(row_counts[lane], std::min(expected_[lane].size(), address_stride));
      for (size_t row = 0; row < row_counts[lane]; ++row) {
        const uint32_t position = expected_[lane][row];
        const bool hit = IsHit(lane, position);
        for (size_t b = 0; b < target_stride; ++b) {
          const std::byte actual = target[(lane * address_stride + row) * target_stride + b];
          const std::byte expected = b >= 32 ? std::byte{0xFF}
                                     : hit   ? CachedByte(lane, position, b + 16)
                                             : RowByte(lane, position, b + 16);
          if (b >= 32 && !kFillsMemory) continue;
          ASSERT_EQ(actual, expected) << "lane " << lane << " row " << row << " byte " << b;
        }
      }
    }
  }

  void CheckCounts(const std::vector<unsigned long long>& hits,
                   const std::vector<uint32_t>& touches, const std::vector<uint32_t>& missed,
                   const std::vector<uint32_t>& missed_counts, size_t address_stride) const {
    unsigned long long hit_count = 0;
    unsigned long long row_count = 0;
    for (uint32_t lane = 0; lane < lanes_.size(); ++lane) {
      std::vector<uint32_t> expected;
      for (uint32_t row = 0; row < std::min(expected_[lane].size(), address_stride); ++row) {
        const uint32_t position = expected_[lane][row];
        if (IsHit(lane, position)) {
          ++hit_count;
        } else if (IsHostOnly(lane, position)) {
          expected.push_back(row);
        }
      }
      const auto begin = missed.begin() + static_cast<ptrdiff_t>(lane * address_stride);
      std::vector<uint32_t> actual(begin, begin + missed_counts[lane]);
      std::sort(actual.begin(), actual.end());
      ASSERT_EQ(actual, expected) << "lane " << lane;
      row_count += std::min(expected_[lane].size(), address_stride);
    }
    if (!cached_) return;
    EXPECT_EQ(hits[0], hit_count);
    EXPECT_EQ(hits[1], row_count - hit_count);
    unsigned long long touch_count = 0;
    for (const uint32_t touch : touches) touch_count += touch;
    EXPECT_GE(touch_count, row_count);
  }

  // Whether fresh device memory has a known content: in the emulation alone.
#if defined(PQCACHED_CUDA_EMULATION)
  static constexpr bool kFillsMemory = true;
#else
  static constexpr bool kFillsMemory = false;
#endif

  std::mt19937 random_;
  bool cached_;
  std::vector<RowLane> lanes_;
  std::vector<DeviceRowSpan> spans_;
  std::vector<size_t> offsets_;
  std::vector<std::byte> bytes_;
  std::vector<std::byte> cache_;
  std::vector<uint32_t> cache_slots_;
  std::vector<std::vector<uint32_t>> selected_;
  std::vector<std::vector<uint32_t>> expected_;
};

class RowsDeviceTest : public DeviceTest {};

TEST_F(RowsDeviceTest, FindsRowsInTheMappingAndInTheCache) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    for (const bool cached : {false, true}) {
      Problem problem(4, seed, cached);
      problem.Check(stream_, 1500);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(RowsDeviceTest, KeepsTheFirstRowsWhereRoomEnds) {
  for (const size_t room : {size_t{1}, size_t{31}, size_t{257}}) {
    Problem problem(3, 99, true);
    problem.Check(stream_, room);
    if (HasFatalFailure()) return;
  }
}

TEST_F(RowsDeviceTest, RefusesWhatIsOutOfRange) {
  EXPECT_FALSE(LocateRows({.lane_capacity = 1, .row_stride_bytes = 24}, stream_).ok());
  EXPECT_FALSE(
      GatherRows({.lane_capacity = 1, .part_bytes = 32, .target_stride_bytes = 16}, stream_).ok());
}

}  // namespace
}  // namespace pqcached::kernels::cuda
