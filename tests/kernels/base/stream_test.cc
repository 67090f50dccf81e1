// StreamRows: every level packs the rows, and writes nothing else.
#include "kernels/base/stream.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/kernels/rows/row_data.h"
#include "tests/kernels/tensor_data.h"

namespace pqcached::kernels {
namespace {

struct Case {
  size_t row_bytes = 0;
  size_t row_count = 0;
  ptrdiff_t stride = 0;
  size_t source_offset = 0;
  size_t target_offset = 0;  // behind a line
};

// The source ends with the last row, so that a read behind it shows under ASan.
void StreamAndExpect(Level level, const Case& c) {
  SCOPED_TRACE(testing::Message() << c.row_count << " rows of " << c.row_bytes << " stride "
                                  << c.stride << " from " << c.source_offset << " to "
                                  << c.target_offset);
  const size_t step = static_cast<size_t>(c.stride < 0 ? -c.stride : c.stride);
  const size_t between = c.row_count == 0 ? 0 : (c.row_count - 1) * step;
  std::vector<std::byte> source(c.source_offset + between + c.row_bytes);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 167 >> 3);
  const std::byte* first = source.data() + c.source_offset + (c.stride < 0 ? between : 0);

  const size_t packed_bytes = c.row_count * c.row_bytes;
  std::vector<std::byte> target(64 + c.target_offset + packed_bytes + 128, kUntouched);
  const size_t begin = 64 - reinterpret_cast<uintptr_t>(target.data()) % 64 + c.target_offset;
  std::vector<std::byte> expected = target;
  for (size_t i = 0; i < c.row_count; ++i) {
    std::memcpy(expected.data() + begin + i * c.row_bytes,
                first + static_cast<ptrdiff_t>(i) * c.stride, c.row_bytes);
  }
  StreamRows(Exec{level}, {.rows = first,
                           .row_stride_bytes = c.stride,
                           .row_bytes = c.row_bytes,
                           .row_count = c.row_count,
                           .target = std::span(target).subspan(begin, packed_bytes)});
  ASSERT_TRUE(target == expected);
}

class StreamTest : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(AllLevels, StreamTest, testing::ValuesIn(AvailableLevels()),
                         LevelTestName);

TEST_P(StreamTest, PacksRowsOfAnySizeCountAndStride) {
  for (const size_t row_bytes : {1, 2, 31, 63, 64, 65, 128, 200, 2048}) {
    const auto bytes = static_cast<ptrdiff_t>(row_bytes);
    for (const size_t row_count : {0, 1, 2, 3, 17, 257}) {
      for (const ptrdiff_t stride :
           {bytes, bytes + 1, bytes + 64, 3 * bytes, -bytes, -bytes - 7, ptrdiff_t{0}}) {
        ASSERT_NO_FATAL_FAILURE(StreamAndExpect(GetParam(), {row_bytes, row_count, stride, 0, 0}));
      }
    }
  }
}

TEST_P(StreamTest, AnyAlignmentOfSourceAndTargetWorks) {
  for (const size_t row_bytes : {1, 63, 64, 65, 192, 2048}) {
    const auto bytes = static_cast<ptrdiff_t>(row_bytes);
    for (const size_t source_offset : {0, 1, 32, 63}) {
      for (const size_t target_offset : {0, 1, 2, 31, 32, 33, 62, 63}) {
        for (const ptrdiff_t stride : {bytes, bytes + 64, -bytes}) {
          ASSERT_NO_FATAL_FAILURE(
              StreamAndExpect(GetParam(), {row_bytes, 9, stride, source_offset, target_offset}));
        }
      }
    }
  }
}

TEST_P(StreamTest, RowsThatOverlapInTheSourceWork) {
  for (const ptrdiff_t stride : {1, 16, 100, -1, -64}) {
    ASSERT_NO_FATAL_FAILURE(StreamAndExpect(GetParam(), {128, 33, stride, 3, 5}));
  }
}

TEST_P(StreamTest, RowsOfNoBytesAreNoWork) {
  StreamRows(Exec{GetParam()}, {});
  ASSERT_NO_FATAL_FAILURE(StreamAndExpect(GetParam(), {0, 5, 64, 0, 0}));
}

TEST_P(StreamTest, ATargetLargerThanTheRowsKeepsItsRest) {
  const std::vector<std::byte> source(640, std::byte{1});
  std::vector<std::byte> target(1024, kUntouched);
  StreamRows(Exec{GetParam()}, {.rows = source.data(),
                                .row_stride_bytes = 64,
                                .row_bytes = 60,
                                .row_count = 10,
                                .target = target});
  for (size_t i = 0; i < target.size(); ++i) {
    ASSERT_EQ(target[i], i < 600 ? std::byte{1} : kUntouched) << i;
  }
}

}  // namespace
}  // namespace pqcached::kernels
