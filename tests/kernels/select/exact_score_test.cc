// ExactScores: every level against double precision. ExactScoresAt: against ExactScores of the same
// rows, one after the other.
#include "kernels/select/exact/exact_score.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels {
namespace {

constexpr float kUntouched = -12345.0f;

void ExpectMatchesDouble(Level level, const RowData& rows, uint32_t key_dim, uint32_t group_size,
                         uint32_t token_count, size_t score_stride) {
  const std::vector<float> queries = RandomFloats(size_t{group_size} * key_dim, 77);
  std::vector<float> scores(group_size * score_stride, kUntouched);
  std::vector<std::byte> scratch(ExactScoreScratchBytes(group_size, key_dim) + 1);
  ExactScores(Exec{level}, {.dtype = rows.dtype,
                            .key_dim = key_dim,
                            .row_stride_bytes = rows.stride_bytes,
                            .group_size = group_size,
                            .token_count = token_count,
                            .scale = 0.3f,
                            .queries = queries,
                            .rows = rows.bytes.data() + rows.offset,
                            .score_stride = score_stride,
                            .scores = scores,
                            .scratch = std::span(scratch).subspan(1)});
  for (size_t head = 0; head < group_size; ++head) {
    for (size_t token = 0; token < score_stride; ++token) {
      const float actual = scores[head * score_stride + token];
      if (token >= token_count) {
        ASSERT_EQ(actual, kUntouched) << "head " << head << " behind the end";
        continue;
      }
      double expected = 0.0;
      double query_norm = 0.0;
      double key_norm = 0.0;
      for (uint32_t i = 0; i < key_dim; ++i) {
        const double q = static_cast<double>(queries[head * key_dim + i]);
        const double k = rows.Values(token)[i];
        expected += q * k;
        query_norm += q * q;
        key_norm += k * k;
      }
      const bool bf16 = level == Level::kAvx512Bf16 && rows.dtype == DType::kBf16;
      const double allowed = (bf16 ? 3e-5 : 1e-5) * 0.3 * std::sqrt(query_norm * key_norm);
      ASSERT_NEAR(static_cast<double>(actual), expected * static_cast<double>(0.3f), allowed)
          << "head " << head << " token " << token;
    }
  }
}

class ExactScoreTest : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(AllLevels, ExactScoreTest, testing::ValuesIn(AvailableLevels()),
                         LevelTestName);

TEST_P(ExactScoreTest, MatchesDoublePrecisionAroundBlockBoundaries) {
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t tokens : {0u, 1u, 15u, 16u, 17u, 63u, 64u, 65u, 127u, 128u, 129u, 4097u}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " tokens " << tokens);
      const RowData rows = MakeRows(dtype, 256, tokens, 1, tokens);
      ExpectMatchesDouble(GetParam(), rows, 128, 4, tokens, tokens + 3);
    }
  }
}

TEST_P(ExactScoreTest, MatchesAtEveryDim) {
  for (const DType dtype : kAllDTypes) {
    for (uint32_t dim = 32; dim <= 256; dim += 8) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " dim " << dim);
      const RowData rows = MakeRows(dtype, dim, 67, 1, dim);
      ExpectMatchesDouble(GetParam(), rows, dim, 4, 67, 67);
    }
  }
}

TEST_P(ExactScoreTest, MatchesForEveryGroupSizeAndUnalignedRows) {
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t group_size : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 13u}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " group " << group_size);
      const RowData rows =
          MakeRows(dtype, 88, 133, 1, group_size, /*padding_bytes=*/7, /*offset=*/5);
      ExpectMatchesDouble(GetParam(), rows, 72, group_size, 133, 140);
    }
  }
}

// Every third token, and runs of neighbours, of rows that lie in three spans with gaps between their
// positions.
struct Scattered {
  RowData rows;
  std::vector<RowSpan> spans;
  std::vector<uint32_t> positions;
  std::vector<std::byte> packed;  // the rows of the positions

  Scattered(DType dtype, uint32_t columns, uint32_t count, size_t padding_bytes, size_t offset)
      : rows(MakeRows(dtype, columns, 4 * count + 3, 1, count + 1, padding_bytes, offset)) {
    const uint32_t tokens = 4 * count + 3, third = tokens / 3;
    for (uint32_t i = 0; i < 3; ++i) {
      const uint32_t begin = i * third, end = i == 2 ? tokens : begin + third;
      spans.push_back(
          {.rows = Row(begin), .token_count = end - begin, .first_position = begin + 10 * i});
    }
    for (uint32_t token = 2; positions.size() < count; token += token % 5 == 0 ? 1 : 3) {
      const uint32_t span = std::min(token / third, 2u);
      positions.push_back(token + 10 * span);
      packed.insert(packed.end(), Row(token), Row(token) + rows.stride_bytes);
    }
  }
  const std::byte* Row(uint32_t token) const {
    return rows.bytes.data() + rows.offset + token * rows.stride_bytes;
  }
};

void ExpectSameAt(Level level, const Scattered& scattered, uint32_t key_dim, uint32_t group_size) {
  const auto count = static_cast<uint32_t>(scattered.positions.size());
  const std::vector<float> queries = RandomFloats(size_t{group_size} * key_dim, 78);
  std::vector<float> packed(size_t{group_size} * (count + 3), kUntouched), scores = packed;
  std::vector<std::byte> scratch(ExactScoreScratchBytes(group_size, key_dim));
  ExactScoreArgs args{.dtype = scattered.rows.dtype,
                      .key_dim = key_dim,
                      .row_stride_bytes = scattered.rows.stride_bytes,
                      .group_size = group_size,
                      .token_count = count,
                      .scale = 0.3f,
                      .queries = queries,
                      .rows = scattered.packed.data(),
                      .score_stride = count + 3,
                      .scores = packed,
                      .scratch = scratch};
  ExactScores(Exec{level}, args);
  args.rows = nullptr;
  args.spans = scattered.spans;
  args.positions = scattered.positions;
  args.scores = scores;
  ExactScoresAt(Exec{level}, args);
  ASSERT_EQ(scores, packed);
}

TEST_P(ExactScoreTest, ReadsChosenTokensInPlace) {
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t count :
         {0u, 1u, 2u, 15u, 16u, 17u, 63u, 64u, 65u, 127u, 128u, 129u, 1000u}) {
      for (const uint32_t group_size : {1u, 4u, 7u}) {
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << " tokens " << count << " group " << group_size);
        ExpectSameAt(GetParam(), Scattered(dtype, 256, count, 0, 0), 128, group_size);
        ExpectSameAt(GetParam(), Scattered(dtype, 88, count, 7, 5), 72, group_size);
      }
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels
