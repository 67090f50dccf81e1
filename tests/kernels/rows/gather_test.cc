// GatherRows: every level copies exactly the bytes asked for and touches no others.
#include "kernels/rows/gather.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels {
namespace {

constexpr std::byte kUntouched{0xa5};

void ExpectGathers(Level level, RowData& rows, const std::vector<uint32_t>& tokens,
                   size_t part_begin, size_t part_bytes, size_t target_stride,
                   size_t target_offset) {
  std::vector<uint32_t> positions;
  for (const uint32_t token : tokens) positions.push_back(rows.positions[token]);
  const size_t used = tokens.empty() ? 0 : (tokens.size() - 1) * target_stride + part_bytes;
  std::vector<std::byte> target(target_offset + used, kUntouched);
  GatherRows(Exec{level}, {.row_stride_bytes = rows.stride_bytes,
                           .part_begin_bytes = part_begin,
                           .part_bytes = part_bytes,
                           .spans = rows.spans,
                           .positions = positions,
                           .target_stride_bytes = target_stride,
                           .target = std::span(target).subspan(target_offset)});
  std::vector<std::byte> expected(target.size(), kUntouched);
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::memcpy(expected.data() + target_offset + i * target_stride,
                rows.Row(tokens[i]) + part_begin, part_bytes);
  }
  ASSERT_TRUE(target == expected);
}

class GatherTest : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(AllLevels, GatherTest, testing::ValuesIn(AvailableLevels()),
                         LevelTestName);

TEST_P(GatherTest, CopiesAnyNumberOfRowsFromSeveralSpans) {
  for (const uint32_t count : {0u, 1u, 31u, 32u, 33u, 63u, 64u, 65u, 127u, 128u, 129u, 4097u}) {
    SCOPED_TRACE(count);
    RowData rows = MakeRows(DType::kF16, 64, count, 5, count);
    ExpectGathers(GetParam(), rows, AllTokens(count), 0, 128, 128, 0);
    ExpectGathers(GetParam(), rows, RandomTokens(count, 0.1, 3), 0, 128, 128, 0);
  }
}

TEST_P(GatherTest, CopiesWholeRowsKeysAndValues) {
  for (const uint32_t key_dim : {32u, 40u, 72u, 128u, 136u, 256u}) {
    const size_t key_bytes = key_dim * 2;
    RowData rows = MakeRows(DType::kBf16, key_dim + 64, 200, 3, key_dim);
    const std::vector<uint32_t> tokens = RandomTokens(200, 0.4, key_dim);
    ExpectGathers(GetParam(), rows, tokens, 0, key_bytes + 128, key_bytes + 128, 0);
    ExpectGathers(GetParam(), rows, tokens, 0, key_bytes, key_bytes, 0);
    ExpectGathers(GetParam(), rows, tokens, key_bytes, 128, 128, 0);
  }
}

TEST_P(GatherTest, AnyAlignmentAndSizeOfSourceAndTargetWorks) {
  RowData rows = MakeRows(DType::kF16, 256, 100, 2, 9, /*padding_bytes=*/13, /*offset=*/3);
  const std::vector<uint32_t> tokens = RandomTokens(100, 0.7, 5);
  for (const size_t bytes : {1u, 8u, 63u, 64u, 65u, 100u, 129u, 500u}) {
    for (const size_t offset : {0u, 1u, 17u, 64u}) {
      SCOPED_TRACE(testing::Message() << bytes << " bytes at " << offset);
      ExpectGathers(GetParam(), rows, tokens, 5, bytes, bytes, offset);
      ExpectGathers(GetParam(), rows, tokens, 5, bytes, bytes + 11, offset);
    }
  }
}

TEST_P(GatherTest, RepeatedPositionsAreCopiedEachTime) {
  RowData rows = MakeRows(DType::kF32, 64, 10, 2, 9);
  ExpectGathers(GetParam(), rows, {0, 0, 3, 3, 3, 9}, 0, 256, 256, 0);
}

}  // namespace
}  // namespace pqcached::kernels
