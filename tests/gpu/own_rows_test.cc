// Rows of sink and window against plain loops: positions, the ranges of the query tokens, and the
// addresses of rows that are not stored.
#include "kernels/cuda/step/own_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/gpu/device_array.h"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kKvHeads = 3;
constexpr uint32_t kSeats = 3;
constexpr uint32_t kLanes = kSeats * kKvHeads;
constexpr uint32_t kUntouched = 0xABCDABCDu;
constexpr uint32_t kRecent = 20;
constexpr size_t kRowBytes = 48;

struct Case {
  OwnItem items[2];  // of items 1 and 0, in seats 0 and 2
  uint32_t query_length = 1;
  uint32_t first_token = 0;
  uint32_t window_tokens = 0;
  std::vector<OwnRange> excluded = {};
};

// The reference: positions that one query token attends to.
std::vector<uint32_t> Seen(const Case& c, const OwnItem& item, uint32_t token) {
  std::vector<uint32_t> seen;
  const uint32_t end = item.query_position + c.first_token + token + 1;
  for (uint32_t position = 0; position < end; ++position) {
    const bool is_own = c.window_tokens > 0
                            ? position + c.window_tokens >= end
                            : position < item.sink_end || position >= item.window_begin;
    const bool is_excluded = std::any_of(c.excluded.begin(), c.excluded.end(), [&](OwnRange gap) {
      return position >= gap.begin && position < gap.end;
    });
    if (is_own && !is_excluded) seen.push_back(position);
  }
  return seen;
}

class OwnRowsDeviceTest : public DeviceTest {
 protected:
  void Check(const Case& c, size_t stride = 1200) {
    const std::vector<SeatItem> seats = {
        {.item = 1, .query_begin = c.query_length}, {}, {.item = 0, .query_begin = 0}};
    const std::vector<OwnItem> items = {c.items[0], {}, c.items[1]};
    const DeviceArray<SeatItem> device_seats(seats);
    const DeviceArray<OwnItem> device_items(items);
    const DeviceArray<OwnRange> excluded(c.excluded);
    const DeviceArray<uint32_t> positions(std::vector<uint32_t>(kLanes * stride, kUntouched));
    const DeviceArray<uint32_t> counts(kLanes), own_counts(kLanes), row_counts(kLanes);
    const DeviceArray<uint32_t> ranges(kLanes * c.query_length * 2);
    const SeatShape shape = {
        .seat_capacity = kSeats, .kv_heads = kKvHeads, .query_length = c.query_length};
    Finish(ArrangeOwnRows({.shape = shape,
                           .seats = device_seats.data(),
                           .items = device_items.data(),
                           .excluded = excluded.data(),
                           .excluded_capacity = static_cast<uint32_t>(c.excluded.size()),
                           .first_token = c.first_token,
                           .window_tokens = c.window_tokens,
                           .lane_positions = positions.data(),
                           .lane_stride = stride,
                           .lane_counts = counts.data(),
                           .own_counts = own_counts.data(),
                           .row_ranges = ranges.data()},
                          stream_));
    // Addresses of stored rows are those of LocateRows, and stay.
    const DeviceArray<std::byte> memory(1);
    const std::byte* const stored = memory.data();
    const std::byte* const recent = stored + 1000000;
    const std::byte* const present = stored + 9000000;
    const uint32_t token_capacity = 2 * (c.query_length + c.first_token);
    const DeviceArray<const std::byte*> addresses(
        std::vector<const std::byte*>(kLanes * stride, stored));
    Finish(AppendOwnRows({.shape = shape,
                          .seats = device_seats.data(),
                          .items = device_items.data(),
                          .lane_positions = positions.data(),
                          .lane_stride = stride,
                          .lane_counts = counts.data(),
                          .own_counts = own_counts.data(),
                          .recent = recent,
                          .recent_capacity = kRecent,
                          .step_rows = present,
                          .token_capacity = token_capacity,
                          .row_stride_bytes = kRowBytes,
                          .addresses = addresses.data(),
                          .row_counts = row_counts.data()},
                         stream_));
    const std::vector<uint32_t> found = positions.Get(), found_ranges = ranges.Get();
    const std::vector<const std::byte*> found_addresses = addresses.Get();
    EXPECT_EQ(row_counts.Get(), own_counts.Get());
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const SeatItem& seat = seats[lane / kKvHeads];
      const OwnItem& item = items[lane / kKvHeads];
      const uint32_t count = own_counts.Get()[lane];
      const size_t first = lane * stride;
      uint32_t stored_count = 0;
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t position = found[first + i];
        const std::byte* right = stored;
        if (position < item.stored_end) {
          ++stored_count;
        } else if (position < item.query_position) {
          right = recent + (lane * kRecent + position - item.stored_end) * kRowBytes;
        } else {
          right = present + ((lane % kKvHeads) * token_capacity + seat.query_begin + position -
                             item.query_position) *
                                kRowBytes;
        }
        ASSERT_EQ(found_addresses[first + i], right) << "lane " << lane << " at " << position;
      }
      ASSERT_EQ(counts.Get()[lane], stored_count) << "lane " << lane;
      ASSERT_TRUE(count == stride || found[first + count] == kUntouched) << "lane " << lane;
      for (uint32_t token = 0; token < c.query_length; ++token) {
        const size_t at = (size_t{lane} * c.query_length + token) * 2;
        std::vector<uint32_t> right;
        if (seat.item != kEmptySeat) right = Seen(c, item, token);
        const auto begin = found.begin() + static_cast<ptrdiff_t>(first);
        const std::vector<uint32_t> seen(begin + found_ranges[at], begin + found_ranges[at + 1]);
        if (stride < 1200) {
          ASSERT_LE(found_ranges[at + 1], stride);
          continue;
        }
        ASSERT_EQ(seen, right) << "lane " << lane << " token " << token;
      }
    }
  }
};

TEST_F(OwnRowsDeviceTest, TokensSeeSinkAndWindow) {
  for (const uint32_t length : {1u, 2u, 3u, 8u}) {
    for (const uint32_t window : {1u, 2u, 20u, 255u, 256u, 257u, 600u}) {
      const uint32_t position = 700;
      const uint32_t begin = position + 1 - window;
      Case c = {.items = {{position, position - 5, 4, begin}, {position, position, 0, begin}},
                .query_length = length};
      Check(c);
      c.items[1] = {0, 0, 0, 0};  // nothing before the first token
      c.items[0].sink_end = begin;
      c.excluded = {{2, 3}, {90, 101}, {680, 697}, {702, 703}, {}, {}};
      Check(c);
      c.excluded = {{0, 2000}};
      Check(c);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(OwnRowsDeviceTest, TokensSeeTheWindowOfTheirLayer) {
  for (const uint32_t length : {1u, 3u, 8u}) {
    for (const uint32_t window : {1u, 2u, 31u, 257u, 1000u}) {
      for (const uint32_t first : {0u, 2u}) {
        Case c = {.items = {{700, 690, 4, 650}, {3, 0, 1, 2}},
                  .query_length = length,
                  .first_token = first,
                  .window_tokens = window};
        Check(c);
        c.excluded = {{1, 2}, {640, 670}, {695, 699}};
        Check(c);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(OwnRowsDeviceTest, PositionsBeyondTheirRoomAreLeftOut) {
  Check({.items = {{700, 690, 4, 650}, {20, 10, 0, 0}}, .query_length = 3}, 30);
  Check({.items = {{700, 690, 4, 650}, {20, 10, 0, 0}}, .query_length = 3}, 1);
}

TEST_F(OwnRowsDeviceTest, RefusesWhatIsOutOfRange) {
  EXPECT_FALSE(ArrangeOwnRows({.shape = {65536, 2}}, stream_).ok());
  EXPECT_FALSE(ArrangeOwnRows({.shape = {1, 1, 1, 9}}, stream_).ok());
  EXPECT_FALSE(ArrangeOwnRows({.shape = {1, 1}, .first_token = 8}, stream_).ok());
  EXPECT_TRUE(ArrangeOwnRows({.shape = {0, 2}}, stream_).ok());
  EXPECT_FALSE(AppendOwnRows({.shape = {65536, 2}, .row_stride_bytes = 16}, stream_).ok());
  EXPECT_FALSE(AppendOwnRows({.shape = {1, 1}, .row_stride_bytes = 8}, stream_).ok());
  EXPECT_TRUE(AppendOwnRows({.shape = {0, 2}, .row_stride_bytes = 16}, stream_).ok());
}

}  // namespace
}  // namespace pqcached::kernels::cuda
