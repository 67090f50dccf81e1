// CopyRanges: every byte of every range and no other, whatever the alignment of both ends; unused ranges.
#include "kernels/cuda/copy.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/gpu/device_array.h"

namespace pqcached::kernels::cuda {
namespace {

class CopyDeviceTest : public DeviceTest {};

TEST_F(CopyDeviceTest, CopiesAllBytesOfAllRangesAndNoOther) {
  constexpr size_t kRoom = 9000;
  for (const uint32_t blocks : {1u, 3u}) {
    std::vector<std::byte> source(32 * kRoom);
    for (size_t i = 0; i < source.size(); ++i) {
      source[i] = static_cast<std::byte>(1 + (i * 7 + i / 255) % 255);  // never 0
    }
    const DeviceArray<std::byte> from(source);
    std::vector<std::byte> expected(source.size(), std::byte{0});
    DeviceArray<std::byte> to(expected);
    std::vector<ByteRange> ranges;
    for (size_t i = 0; i < 32; ++i) {
      const size_t from_begin = i * kRoom + i % 17;
      const size_t to_begin = i * kRoom + (i < 16 ? i % 17 : i / 3);
      const size_t bytes = i % 5 == 4 ? 0 : i % 5 == 3 ? i / 2 : 4500 + 31 * i;
      ranges.push_back({from.data() + from_begin, to.data() + to_begin, bytes});
      for (size_t b = 0; b < bytes; ++b) expected[to_begin + b] = source[from_begin + b];
    }
    ranges.push_back({});
    const DeviceArray<ByteRange> table(ranges);
    Finish(CopyRanges({.range_capacity = static_cast<uint32_t>(ranges.size()),
                       .blocks_per_range = blocks,
                       .ranges = table.data()},
                      stream_));
    ASSERT_TRUE(to.Get() == expected);
  }
}

TEST_F(CopyDeviceTest, RefusesWhatIsOutOfRange) {
  EXPECT_FALSE(CopyRanges({.range_capacity = 65536}, stream_).ok());
  EXPECT_FALSE(CopyRanges({.range_capacity = 1, .blocks_per_range = 0}, stream_).ok());
  EXPECT_FALSE(CopyRanges({.range_capacity = 1, .blocks_per_range = 1025}, stream_).ok());
}

}  // namespace
}  // namespace pqcached::kernels::cuda
