// ArrangeLists against ordered sets: lists of any order and length, repetitions, padding, lengths; one list for all
// kv heads; elements that are out of range. ArrangeRanges against plain loops.
#include "kernels/cuda/step/lists.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "tests/gpu/device_array.h"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kKvHeads = 3;
constexpr uint32_t kSeats = 4;
constexpr uint32_t kLanes = kSeats * kKvHeads;
constexpr uint32_t kUntouched = 0xABCDABCDu;

struct Case {
  uint32_t list_count = 1;
  uint32_t capacity = 0;
  uint32_t token_capacity = 0;
  bool has_lengths = false;
  bool repeats = false;
};

class ListsDeviceTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (!WhyNoDevice().empty()) return;
    ASSERT_TRUE(noted_.Allocate(2 * sizeof(unsigned long long)).ok());
    noted(0) = noted(1) = 0;
  }

  unsigned long long& noted(size_t i) { return static_cast<unsigned long long*>(noted_.data())[i]; }

  // Items 1 and 0 in seats 0 and 2, other seats empty; every item reads rows below its own end.
  static std::vector<SeatItem> Seats(uint32_t token_capacity) {
    return {{.item = 1, .query_begin = 1, .row_end = token_capacity},
            {},
            {.item = 0, .query_begin = 0, .row_end = token_capacity - token_capacity / 3},
            {}};
  }

  struct Lists {
    std::vector<int32_t> positions;  // [2, list_count, capacity]
    std::vector<uint32_t> lengths;   // [2, list_count]
  };

  Lists MakeLists(const Case& c, const std::vector<SeatItem>& seats) {
    Lists lists;
    for (uint32_t item = 0; item < 2; ++item) {
      const uint32_t row_end = seats[item == 0 ? 2 : 0].row_end;
      for (uint32_t list = 0; list < c.list_count; ++list) {
        std::vector<int32_t> all(row_end);
        for (uint32_t i = 0; i < row_end; ++i) all[i] = static_cast<int32_t>(i);
        std::shuffle(all.begin(), all.end(), random_);
        uint32_t length = std::min(c.capacity, row_end);
        if (list % 2 == 1 && length > 0) length = static_cast<uint32_t>(random_() % length);
        std::vector<int32_t> positions(all.begin(), all.begin() + length);
        for (uint32_t i = 1; c.repeats && i < length; i += 3) positions[i] = positions[i / 2];
        lists.lengths.push_back(length);
        // Behind the length anything may follow, behind a -1 as well.
        positions.resize(c.capacity, c.has_lengths ? INT32_MAX : -1);
        if (!c.has_lengths && length + 1 < c.capacity) positions[length + 1] = INT32_MAX;
        lists.positions.insert(lists.positions.end(), positions.begin(), positions.end());
      }
    }
    return lists;
  }

  // The reference: positions of each lane, ascending, without those out of range.
  static std::vector<std::set<uint32_t>> Expected(const Case& c, const Lists& lists,
                                                  const std::vector<SeatItem>& seats) {
    std::vector<std::set<uint32_t>> lanes(kLanes);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const SeatItem& seat = seats[lane / kKvHeads];
      if (seat.item == kEmptySeat) continue;
      const size_t list =
          size_t{seat.item} * c.list_count + (c.list_count == 1 ? 0 : lane % kKvHeads);
      for (uint32_t i = 0; i < std::min(lists.lengths[list], c.capacity); ++i) {
        const int32_t position = lists.positions[list * c.capacity + i];
        if (position < 0 || static_cast<uint32_t>(position) >= seat.row_end) continue;
        lanes[lane].insert(static_cast<uint32_t>(position));
      }
    }
    return lanes;
  }

  void Check(const Case& c, const Lists& lists, const std::vector<SeatItem>& seats) {
    const DeviceArray<SeatItem> device_seats(seats);
    const DeviceArray<int32_t> positions(lists.positions);
    const DeviceArray<uint32_t> lengths(lists.lengths);
    const std::vector<uint32_t> no_bits(kLanes * ListBitWords(c.token_capacity), 0);
    const DeviceArray<uint32_t> bits(no_bits);
    const size_t stride = c.capacity + 1;
    const DeviceArray<uint32_t> lane_positions(std::vector<uint32_t>(kLanes * stride, kUntouched));
    const DeviceArray<uint32_t> lane_counts(std::vector<uint32_t>(kLanes, kUntouched));
    // Twice: the second run finds the bits as the first one left them.
    for (int run = 0; run < 2; ++run) {
      Finish(ArrangeLists({.shape = {.seat_capacity = kSeats, .kv_heads = kKvHeads},
                           .seats = device_seats.data(),
                           .lists = positions.data(),
                           .lengths = c.has_lengths ? lengths.data() : nullptr,
                           .list_count = c.list_count,
                           .capacity = c.capacity,
                           .token_capacity = c.token_capacity,
                           .bits = bits.data(),
                           .lane_positions = lane_positions.data(),
                           .lane_stride = stride,
                           .lane_counts = lane_counts.data(),
                           .refused_position = {&noted(0), 5},
                           .refused_length = {&noted(1), 6}},
                          stream_));
      if (HasFatalFailure()) return;
      const std::vector<uint32_t> found = lane_positions.Get();
      const std::vector<uint32_t> counts = lane_counts.Get();
      const std::vector<std::set<uint32_t>> expected = Expected(c, lists, seats);
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        const std::vector<uint32_t> right(expected[lane].begin(), expected[lane].end());
        ASSERT_EQ(counts[lane], right.size()) << "lane " << lane;
        const auto begin = found.begin() + static_cast<ptrdiff_t>(lane * stride);
        const std::vector<uint32_t> lane_found(begin, begin + counts[lane]);
        ASSERT_TRUE(lane_found == right) << "lane " << lane;
        ASSERT_EQ(*(begin + counts[lane]), kUntouched) << "lane " << lane;
      }
      ASSERT_TRUE(bits.Get() == no_bits);
    }
  }

  std::mt19937 random_{11};
  gpu::PinnedBuffer noted_;
};

TEST_F(ListsDeviceTest, LanesGetAscendingPositionsOnce) {
  // Around the threads of a block, the bits of a word and of a quad, and several rounds of quads.
  for (const uint32_t capacity :
       {0u, 1u, 2u, 31u, 33u, 127u, 128u, 129u, 255u, 256u, 257u, 1000u}) {
    for (const uint32_t token_capacity : {1u, 127u, 128u, 129u, 1500u, 40000u}) {
      for (const uint32_t list_count : {1u, kKvHeads}) {
        const Case c = {.list_count = list_count,
                        .capacity = capacity,
                        .token_capacity = token_capacity,
                        .has_lengths = capacity % 2 == 1,
                        .repeats = token_capacity % 2 == 1};
        const std::vector<SeatItem> seats = Seats(token_capacity);
        Check(c, MakeLists(c, seats), seats);
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_EQ(noted(0), 0u);
  EXPECT_EQ(noted(1), 0u);
}

TEST_F(ListsDeviceTest, ElementsOutOfRangeAreLeftOutAndNoted) {
  const Case c = {.list_count = 1, .capacity = 5, .token_capacity = 30, .has_lengths = true};
  const std::vector<SeatItem> seats = Seats(30);  // item 0 reads below 20, item 1 below 30
  const auto expect = [&](const Lists& lists, size_t i, unsigned long long right) {
    noted(0) = noted(1) = 0;
    Check(c, lists, seats);
    EXPECT_EQ(noted(i), right);
    EXPECT_EQ(noted(1 - i), 0u);
  };
  const auto tagged = [](uint64_t tag, uint64_t element) {
    return (tag << kRefusedTagShift) + element + 1;
  };
  expect({{19, 1, 20, 3, 4, 29, 0, 1, 2, 3}, {5, 5}}, 0, tagged(5, 2));
  expect({{19, 1, 2, 3, 4, 29, 0, 30, 2, 3}, {5, 5}}, 0, tagged(5, 7));
  expect({{-2, 1, 2, 3, 4, 29, 0, 1, 2, 3}, {5, 5}}, 0, tagged(5, 0));
  expect({{INT32_MIN, 1, 2, 3, 4, 29, 0, 1, 2, 3}, {5, 5}}, 0, tagged(5, 0));
  expect({{0, 1, 2, 3, 4, 29, 0, 1, 2, 3}, {5, 6}}, 1, tagged(6, 1));
  expect({{0, 1, 2, 3, 20, 29, 0, 1, 2, 30}, {4, 4}}, 0, 0);
}

// Ranges of two items, some of them empty, and what their lanes get of them.
TEST_F(ListsDeviceTest, LanesGetAPartOfTheirRanges) {
  const std::vector<SeatItem> seats = Seats(900);  // item 0 reads below 600, item 1 below 900
  const DeviceArray<SeatItem> device_seats(seats);
  const std::vector<uint64_t> cases[] = {
      {5, 5, 0, 1},                                          // [2 items, 1 range]
      {0, 600, 899, 900},                                    //
      {17, 274, 100, 355},                                   // around the threads of a block
      {3, 3, 7, 263, 600, 600, 0, 1, 1, 2, 800, 900},        // [2 items, 3 ranges]
      {0, 255, 256, 257, 300, 600, 2, 2, 900, 900, 5, 900},  //
  };
  for (const std::vector<uint64_t>& ranges : cases) {
    const DeviceArray<uint64_t> device_ranges(ranges);
    const size_t per_item = ranges.size() / 4;
    std::vector<uint32_t> all[2];
    for (size_t i = 0; i < ranges.size(); i += 2) {
      for (uint64_t k = ranges[i]; k < ranges[i + 1]; ++k) {
        all[i / 2 / per_item].push_back(static_cast<uint32_t>(k));
      }
    }
    for (const size_t stride : {size_t{1}, size_t{255}, size_t{256}, size_t{257}, size_t{1000}}) {
      for (const uint64_t first : {uint64_t{0}, uint64_t{1}, uint64_t{stride}, uint64_t{5000}}) {
        const DeviceArray<uint32_t> positions(std::vector<uint32_t>(kLanes * stride, kUntouched));
        const DeviceArray<uint32_t> counts(std::vector<uint32_t>(kLanes, kUntouched));
        Finish(ArrangeRanges({.shape = {.seat_capacity = kSeats, .kv_heads = kKvHeads},
                              .seats = device_seats.data(),
                              .ranges = device_ranges.data(),
                              .ranges_per_item = static_cast<uint32_t>(per_item),
                              .first = first,
                              .lane_positions = positions.data(),
                              .lane_stride = stride,
                              .lane_counts = counts.data(),
                              .refused_range = {&noted(0), 5}},
                             stream_));
        const std::vector<uint32_t> found = positions.Get(), found_counts = counts.Get();
        for (uint32_t lane = 0; lane < kLanes; ++lane) {
          const uint32_t item = seats[lane / kKvHeads].item;
          std::vector<uint32_t> right;
          for (uint64_t k = first; item != kEmptySeat && k < all[item].size(); ++k) {
            if (right.size() < stride) right.push_back(all[item][k]);
          }
          ASSERT_EQ(found_counts[lane], right.size()) << "lane " << lane << " from " << first;
          const auto begin = found.begin() + static_cast<ptrdiff_t>(lane * stride);
          ASSERT_TRUE(std::equal(right.begin(), right.end(), begin)) << "lane " << lane;
          ASSERT_TRUE(right.size() == stride ||
                      begin[static_cast<ptrdiff_t>(right.size())] == kUntouched);
        }
      }
    }
  }
  EXPECT_EQ(noted(0), 0u);
}

TEST_F(ListsDeviceTest, RangesOutOfRangeAreSkippedAndNoted) {
  const DeviceArray<SeatItem> seats(Seats(30));  // item 0 reads below 20, item 1 below 30
  for (const auto& [ranges, element] : {std::pair{std::vector<uint64_t>{0, 21, 0, 30}, 0u},
                                        {{0, 20, 4, 3}, 1u},
                                        {{0, 20, 0, uint64_t{1} << 32}, 1u},
                                        {{UINT64_MAX, 0, 29, 30}, 0u}}) {
    noted(0) = 0;
    const DeviceArray<uint64_t> device_ranges(ranges);
    const DeviceArray<uint32_t> positions(kLanes * 40), counts(kLanes);
    Finish(ArrangeRanges({.shape = {.seat_capacity = kSeats, .kv_heads = kKvHeads},
                          .seats = seats.data(),
                          .ranges = device_ranges.data(),
                          .lane_positions = positions.data(),
                          .lane_stride = 40,
                          .lane_counts = counts.data(),
                          .refused_range = {&noted(0), 7}},
                         stream_));
    EXPECT_EQ(noted(0), (uint64_t{7} << kRefusedTagShift) + element + 1);
    // Item 1 is in seat 0, item 0 in seat 2.
    EXPECT_EQ(counts.Get()[element == 0 ? 2 * kKvHeads : 0], 0u);
    EXPECT_EQ(counts.Get()[element == 0 ? 0 : 2 * kKvHeads],
              element == 0 ? ranges[3] - ranges[2] : ranges[1] - ranges[0]);
  }
}

TEST_F(ListsDeviceTest, RefusesWhatIsOutOfRange) {
  EXPECT_FALSE(ArrangeRanges({.shape = {65536, 2}, .lane_stride = 8}, stream_).ok());
  EXPECT_FALSE(ArrangeRanges({.shape = {1, 2}, .lane_stride = size_t{1} << 32}, stream_).ok());
  EXPECT_TRUE(ArrangeRanges({.shape = {0, 2}, .lane_stride = 8}, stream_).ok());
  EXPECT_FALSE(ArrangeLists({.shape = {1, 2}, .list_count = 3, .lane_stride = 8}, stream_).ok());
  EXPECT_FALSE(ArrangeLists({.shape = {1, 2}, .capacity = 9, .lane_stride = 8}, stream_).ok());
  EXPECT_FALSE(ArrangeLists({.shape = {65536, 2}, .capacity = 8, .lane_stride = 8}, stream_).ok());
  EXPECT_TRUE(ArrangeLists({.shape = {0, 2}, .capacity = 8, .lane_stride = 8}, stream_).ok());
}

}  // namespace
}  // namespace pqcached::kernels::cuda
