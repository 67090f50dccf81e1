// IngestRows: every level writes the bytes that scalar conversion gives, sums them up, and names
// the first offender.
#include "kernels/rows/ingest.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/base/crc32c.h"
#include "tests/kernels/rows/row_data.h"
#include "tests/kernels/tensor_data.h"

namespace pqcached::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

IngestResult Ingest(Level level, const Tensor& key, const Tensor& value, uint32_t token_count,
                    DType row_dtype, Target& target, uint32_t seed = 0, bool with_crc = true) {
  return IngestRows(Exec{level}, {.token_count = token_count,
                                  .key_dim = key.dim,
                                  .value_dim = value.dim,
                                  .key = key.Head(),
                                  .value = value.Head(),
                                  .row_dtype = row_dtype,
                                  .row_stride_bytes = target.stride,
                                  .rows = std::span(target.bytes).subspan(target.offset),
                                  .crc_seed = seed,
                                  .with_crc = with_crc});
}

void ExpectRows(Tensor& key, Tensor& value, uint32_t token_count, DType row_dtype,
                const Target& target, uint32_t seed, uint32_t crc) {
  std::vector<std::byte> expected(target.bytes.size(), kUntouched);
  std::vector<std::byte> summed;
  for (uint32_t token = 0; token < token_count; ++token) {
    std::byte* row = expected.data() + target.offset + token * target.stride;
    for (uint32_t i = 0; i < key.dim; ++i) StoreElement(row_dtype, row, i, key.Get(token, i));
    for (uint32_t i = 0; i < value.dim; ++i) {
      StoreElement(row_dtype, row, key.dim + i, value.Get(token, i));
    }
    summed.insert(summed.end(), row, row + target.row_bytes);
  }
  ASSERT_TRUE(target.bytes == expected);
  ASSERT_EQ(crc, Crc32c(Exec{Level::kReference}, summed, seed));
}

class IngestTest : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(AllLevels, IngestTest, testing::ValuesIn(AvailableLevels()),
                         LevelTestName);

TEST_P(IngestTest, ConvertsBetweenAllTypesAtAnyTokenCount) {
  for (const DType from : kAllDTypes) {
    for (const DType to : kAllDTypes) {
      for (const uint32_t count : {0u, 1u, 7u, 8u, 9u, 63u, 64u, 65u, 127u, 128u, 129u}) {
        SCOPED_TRACE(testing::Message()
                     << DTypeName(from) << " to " << DTypeName(to) << " " << count);
        Tensor key = MakeTensor(from, count, 128, count);
        Tensor value = MakeTensor(from, count, 128, count + 1);
        Target target = MakeTarget(to, count, 256, 0, 0);
        const IngestResult result = Ingest(GetParam(), key, value, count, to, target);
        ASSERT_TRUE(result.ok());
        ExpectRows(key, value, count, to, target, 0, result.crc);
      }
    }
  }
}

TEST_P(IngestTest, EveryDimAndAlignmentWorks) {
  for (uint32_t dim = 32; dim <= 256; dim += 8) {
    for (const DType to : kAllDTypes) {
      const DType from = kAllDTypes[dim / 8 % 3];
      const uint32_t value_dim = 32 + (dim * 5) % 232 / 8 * 8;
      SCOPED_TRACE(testing::Message() << dim << " " << value_dim << " to " << DTypeName(to));
      Tensor key = MakeTensor(from, 37, dim, dim, 1, dim % 5);
      Tensor value = MakeTensor(DType::kF32, 37, value_dim, dim + 1, 1, dim % 3);
      Target target = MakeTarget(to, 37, dim + value_dim, dim % 7, dim % 61);
      const IngestResult result = Ingest(GetParam(), key, value, 37, to, target, 99);
      ASSERT_TRUE(result.ok());
      ExpectRows(key, value, 37, to, target, 99, result.crc);
    }
  }
}

TEST_P(IngestTest, TensorsOfOneHeadWork) {
  for (const DType from : kAllDTypes) {
    for (const uint32_t count : {1u, 8u, 31u, 32u, 33u, 129u}) {
      SCOPED_TRACE(testing::Message() << DTypeName(from) << " " << count);
      Tensor key = MakeTensor(from, count, 136, count, 1, 0, 1);
      Tensor value = MakeTensor(from, count, 72, count + 1, 1, 2, 1);
      for (const DType to : kAllDTypes) {
        Target target = MakeTarget(to, count, 208, 0, 0);
        const IngestResult result = Ingest(GetParam(), key, value, count, to, target);
        ASSERT_TRUE(result.ok());
        ExpectRows(key, value, count, to, target, 0, result.crc);
      }
    }
  }
}

TEST_P(IngestTest, ScatteredElementsWork) {
  Tensor key = MakeTensor(DType::kF32, 20, 64, 1, /*spread=*/3);
  Tensor value = MakeTensor(DType::kF16, 20, 40, 2);
  Target target = MakeTarget(DType::kBf16, 20, 104, 0, 0);
  const IngestResult result = Ingest(GetParam(), key, value, 20, DType::kBf16, target);
  ASSERT_TRUE(result.ok());
  ExpectRows(key, value, 20, DType::kBf16, target, 0, result.crc);
}

TEST_P(IngestTest, KeysAloneWork) {
  Tensor key = MakeTensor(DType::kF16, 50, 72, 1);
  Tensor none;
  Target target = MakeTarget(DType::kF16, 50, 72, 0, 0);
  const IngestResult result = Ingest(GetParam(), key, none, 50, DType::kF16, target);
  ASSERT_TRUE(result.ok());
  ExpectRows(key, none, 50, DType::kF16, target, 0, result.crc);
}

TEST_P(IngestTest, ReversedTokensWork) {
  Tensor key = MakeTensor(DType::kF16, 40, 64, 1);
  Tensor value = MakeTensor(DType::kF16, 40, 64, 2);
  for (Tensor* tensor : {&key, &value}) {
    tensor->head_offset += static_cast<size_t>(39 * tensor->token_stride);
    tensor->token_stride = -tensor->token_stride;
  }
  Target target = MakeTarget(DType::kF16, 40, 128, 0, 0);
  const IngestResult result = Ingest(GetParam(), key, value, 40, DType::kF16, target);
  ASSERT_TRUE(result.ok());
  ExpectRows(key, value, 40, DType::kF16, target, 0, result.crc);
}

TEST_P(IngestTest, CallsContinueTheChecksum) {
  Tensor key = MakeTensor(DType::kF16, 300, 128, 1);
  Tensor value = MakeTensor(DType::kF16, 300, 128, 2);
  Target whole = MakeTarget(DType::kF16, 300, 256, 0, 0);
  const IngestResult expected = Ingest(GetParam(), key, value, 300, DType::kF16, whole);
  Target first = MakeTarget(DType::kF16, 111, 256, 0, 0);
  const IngestResult begun = Ingest(GetParam(), key, value, 111, DType::kF16, first);
  for (Tensor* tensor : {&key, &value}) {
    tensor->head_offset += static_cast<size_t>(111 * tensor->token_stride);
  }
  Target second = MakeTarget(DType::kF16, 189, 256, 0, 0);
  EXPECT_EQ(Ingest(GetParam(), key, value, 189, DType::kF16, second, begun.crc).crc, expected.crc);
}

TEST_P(IngestTest, WithoutAChecksumTheRowsAreTheSame) {
  const Tensor key = MakeTensor(DType::kF32, 77, 64, 1);
  const Tensor value = MakeTensor(DType::kF32, 77, 40, 2);
  for (const DType to : {DType::kF16, DType::kF32}) {
    Target with = MakeTarget(to, 77, 104, 0, 0);
    Target without = MakeTarget(to, 77, 104, 0, 0);
    ASSERT_NE(Ingest(GetParam(), key, value, 77, to, with).crc, 0u);
    EXPECT_EQ(Ingest(GetParam(), key, value, 77, to, without, 99, false).crc, 0u);
    EXPECT_TRUE(with.bytes == without.bytes);
  }
}

TEST_P(IngestTest, DenormalsAndExtremesConvertLikeScalars) {
  const float extremes[] = {0.0f,       -0.0f,    0x1p-149f, 0x1p-126f, 0x1.8p-25f,   0x1p-24f,
                            0x1.8p-24f, 65504.0f, -65504.0f, 65519.0f,  0x1.fffp-15f, 1.0009765f};
  for (const DType to : kAllDTypes) {
    Tensor key = MakeTensor(DType::kF32, 20, 40, 1);
    Tensor value = MakeTensor(DType::kF32, 20, 40, 2);
    for (uint32_t i = 0; i < 12; ++i) {
      key.Set(i, i * 3, extremes[i]);
      value.Set(i, 39 - i, extremes[i]);
    }
    Target target = MakeTarget(to, 20, 80, 0, 0);
    const IngestResult result = Ingest(GetParam(), key, value, 20, to, target);
    ASSERT_TRUE(result.ok());
    ExpectRows(key, value, 20, to, target, 0, result.crc);
  }
}

TEST_P(IngestTest, NamesTheFirstBadTokenWhereverItIs) {
  for (const DType from : kAllDTypes) {
    for (const DType to : kAllDTypes) {
      for (const float bad : {kNan, kInfinity, -kInfinity}) {
        for (const uint32_t token : {0u, 1u, 8u, 17u, 63u, 99u}) {
          for (const uint32_t index : {0u, 15u, 16u, 71u}) {
            SCOPED_TRACE(testing::Message() << DTypeName(from) << " to " << DTypeName(to) << " "
                                            << bad << " at " << token << ", " << index);
            Tensor key = MakeTensor(from, 100, 72, 1);
            Tensor value = MakeTensor(from, 100, 72, 2);
            value.Set(token, index, bad);
            Target target = MakeTarget(to, 100, 144, 0, 0);
            const IngestResult by_value = Ingest(GetParam(), key, value, 100, to, target);
            ASSERT_EQ(by_value.bad_part, IngestPart::kValue);
            ASSERT_EQ(by_value.bad_token, token);
            key.Set(token, index, bad);
            const IngestResult by_key = Ingest(GetParam(), key, value, 100, to, target);
            ASSERT_EQ(by_key.bad_part, IngestPart::kKey);
            ASSERT_EQ(by_key.bad_token, token);
            if (token > 0) {  // an earlier value comes before a later key
              value.Set(token - 1, index, bad);
              const IngestResult earlier = Ingest(GetParam(), key, value, 100, to, target);
              ASSERT_EQ(earlier.bad_part, IngestPart::kValue);
              ASSERT_EQ(earlier.bad_token, token - 1);
            }
          }
        }
      }
    }
  }
}

TEST_P(IngestTest, ValuesThatTheRowTypeCannotHoldAreBad) {
  const struct {
    DType from;
    DType to;
    float good;
    float bad;
  } cases[] = {{DType::kF32, DType::kF16, 65519.99f, 65520.0f},
               {DType::kBf16, DType::kF16, 65280.0f, -65536.0f},
               {DType::kF32, DType::kBf16, 0x1.fefffep127f, 0x1.ffp127f}};
  for (const auto& c : cases) {
    SCOPED_TRACE(testing::Message() << DTypeName(c.from) << " to " << DTypeName(c.to));
    Tensor key = MakeTensor(c.from, 10, 64, 1);
    Tensor value = MakeTensor(c.from, 10, 64, 2);
    Target target = MakeTarget(c.to, 10, 128, 0, 0);
    key.Set(4, 63, c.good);
    EXPECT_TRUE(Ingest(GetParam(), key, value, 10, c.to, target).ok());
    key.Set(4, 63, c.bad);
    const IngestResult result = Ingest(GetParam(), key, value, 10, c.to, target);
    EXPECT_EQ(result.bad_part, IngestPart::kKey);
    EXPECT_EQ(result.bad_token, 4u);
  }
}

}  // namespace
}  // namespace pqcached::kernels
