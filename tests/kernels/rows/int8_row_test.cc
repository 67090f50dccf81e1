// Int8 rows: every level writes the bits of the definition, names the first offender, and reads
// back what it wrote within half a scale.
#include "kernels/rows/int8_row.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/base/crc32c.h"
#include "kernels/rows/ingest.h"
#include "tests/kernels/rows/row_data.h"
#include "tests/kernels/tensor_data.h"

namespace pqcached::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

IngestResult IngestInt8(Level level, const Tensor& key, const Tensor& value, uint32_t token_count,
                        Target& target, uint32_t seed = 0) {
  return IngestInt8Rows(Exec{level}, {.token_count = token_count,
                                      .key_dim = key.dim,
                                      .value_dim = value.dim,
                                      .key = key.Head(),
                                      .value = value.Head(),
                                      .row_stride_bytes = target.stride,
                                      .rows = std::span(target.bytes).subspan(target.offset),
                                      .crc_seed = seed});
}

Target MakeInt8Target(const Tensor& key, const Tensor& value, uint32_t token_count,
                      size_t padding = 0, size_t offset = 0) {
  return MakeTarget(Int8RowBytes(key.dim, value.dim), token_count, padding, offset);
}

// The definition, written out again.
void QuantizeExpected(Tensor& tensor, uint32_t token, std::byte* to, std::byte* scale_to) {
  float most = 0.0f;
  for (uint32_t i = 0; i < tensor.dim; ++i) {
    most = std::max(most, std::abs(tensor.Get(token, i)));
  }
  const bool zero = most < 0x1p-100f;
  for (uint32_t i = 0; i < tensor.dim; ++i) {
    const float scaled = zero ? 0.0f : tensor.Get(token, i) * (127.0f / most);
    to[i] = static_cast<std::byte>(static_cast<int>(std::rint(scaled)));
  }
  const float scale = zero ? 0.0f : most / 127.0f;
  std::memcpy(scale_to, &scale, sizeof(scale));
}

void ExpectInt8Rows(Tensor& key, Tensor& value, uint32_t token_count, const Target& target,
                    const IngestResult& result, uint32_t seed = 0) {
  ASSERT_TRUE(result.ok());
  std::vector<std::byte> expected(target.bytes.size(), kUntouched);
  std::vector<std::byte> summed;
  for (uint32_t token = 0; token < token_count; ++token) {
    std::byte* row = expected.data() + target.offset + token * target.stride;
    std::byte* scales = row + key.dim + value.dim;
    QuantizeExpected(key, token, row, scales);
    if (value.dim > 0) QuantizeExpected(value, token, row + key.dim, scales + sizeof(float));
    summed.insert(summed.end(), row, row + target.row_bytes);
  }
  ASSERT_TRUE(target.bytes == expected);
  ASSERT_EQ(result.crc, Crc32c(Exec{Level::kReference}, summed, seed));
}

class Int8RowTest : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(AllLevels, Int8RowTest, testing::ValuesIn(AvailableLevels()),
                         LevelTestName);

TEST_P(Int8RowTest, QuantizesAllTypesAtAnyTokenCount) {
  for (const DType from : kAllDTypes) {
    for (const uint32_t count : {0u, 1u, 3u, 4u, 5u, 63u, 64u, 65u, 127u, 128u, 129u, 4097u}) {
      for (const uint32_t head_count : {1u, 3u}) {  // in order, scattered
        SCOPED_TRACE(testing::Message() << DTypeName(from) << " " << count << " " << head_count);
        Tensor key = MakeTensor(from, count, 128, count, 1, 0, head_count);
        Tensor value = MakeTensor(from, count, 128, count + 1, 1, 0, head_count);
        Target target = MakeInt8Target(key, value, count);
        const IngestResult result = IngestInt8(GetParam(), key, value, count, target);
        ExpectInt8Rows(key, value, count, target, result);
      }
    }
  }
}

TEST_P(Int8RowTest, EveryDimAndAlignmentWorks) {
  for (uint32_t dim = 8; dim <= 256; dim += 8) {
    const DType from = kAllDTypes[dim / 8 % 3];
    const uint32_t value_dim = (dim * 5) % 264 / 8 * 8;  // 0 too: keys alone
    SCOPED_TRACE(testing::Message() << dim << " " << value_dim);
    Tensor key = MakeTensor(from, 37, dim, dim, 1, dim % 5);
    Tensor value = MakeTensor(DType::kF32, 37, value_dim, dim + 1, 1, dim % 3);
    Target target = MakeInt8Target(key, value, 37, dim % 7, dim % 61);
    const IngestResult result = IngestInt8(GetParam(), key, value, 37, target, 99);
    ExpectInt8Rows(key, value, 37, target, result, 99);
  }
}

TEST_P(Int8RowTest, KeysAloneAndElementsWithHolesWork) {
  Tensor key = MakeTensor(DType::kF32, 20, 64, 1, /*spread=*/3);
  Tensor none;
  Target target = MakeInt8Target(key, none, 20);
  const IngestResult result = IngestInt8(GetParam(), key, none, 20, target);
  ExpectInt8Rows(key, none, 20, target, result);
}

TEST_P(Int8RowTest, ExtremeMagnitudesQuantize) {
  const float extremes[] = {0.0f,      -0.0f,     0x1p-149f, -0x1p-101f,
                            0x1p-100f, 0x1p-126f, 1e38f,     std::numeric_limits<float>::max()};
  Tensor key = MakeTensor(DType::kF32, 8, 40, 1);
  Tensor value = MakeTensor(DType::kF32, 8, 40, 2);
  for (uint32_t token = 0; token < 8; ++token) {
    for (uint32_t i = 0; i < 40; ++i) {
      key.Set(token, i, i % 2 == 0 ? extremes[token] : -0.37f * extremes[token]);
    }
    value.Set(token, 39, extremes[token]);
  }
  Target target = MakeInt8Target(key, value, 8);
  const IngestResult result = IngestInt8(GetParam(), key, value, 8, target);
  ExpectInt8Rows(key, value, 8, target, result);
}

TEST_P(Int8RowTest, CallsContinueTheChecksum) {
  Tensor key = MakeTensor(DType::kBf16, 300, 128, 1);
  Tensor value = MakeTensor(DType::kBf16, 300, 128, 2);
  Target whole = MakeInt8Target(key, value, 300);
  const IngestResult expected = IngestInt8(GetParam(), key, value, 300, whole);
  Target first = MakeInt8Target(key, value, 111);
  const IngestResult begun = IngestInt8(GetParam(), key, value, 111, first);
  for (Tensor* tensor : {&key, &value}) {
    tensor->head_offset += static_cast<size_t>(111 * tensor->token_stride);
  }
  Target second = MakeInt8Target(key, value, 189);
  EXPECT_EQ(IngestInt8(GetParam(), key, value, 189, second, begun.crc).crc, expected.crc);
}

TEST_P(Int8RowTest, NamesTheFirstBadTokenWhereverItIs) {
  for (const DType from : kAllDTypes) {
    for (const float bad : {kNan, kInfinity, -kInfinity}) {
      for (const uint32_t token : {0u, 1u, 17u, 99u}) {
        for (const uint32_t index : {0u, 16u, 71u}) {
          SCOPED_TRACE(testing::Message()
                       << DTypeName(from) << " " << bad << " at " << token << ", " << index);
          Tensor key = MakeTensor(from, 100, 72, 1);
          Tensor value = MakeTensor(from, 100, 72, 2);
          value.Set(token, index, bad);
          Target target = MakeInt8Target(key, value, 100);
          const IngestResult by_value = IngestInt8(GetParam(), key, value, 100, target);
          ASSERT_EQ(by_value.bad_part, IngestPart::kValue);
          ASSERT_EQ(by_value.bad_token, token);
          key.Set(token, index, bad);
          const IngestResult by_key = IngestInt8(GetParam(), key, value, 100, target);
          ASSERT_EQ(by_key.bad_part, IngestPart::kKey);
          ASSERT_EQ(by_key.bad_token, token);
        }
      }
    }
  }
}

TEST_P(Int8RowTest, RowsReadBackWithinHalfAScaleAtEveryDim) {
  for (uint32_t dim = 8; dim <= 256; dim += 8) {
    const uint32_t value_dim = (dim * 5) % 264 / 8 * 8;
    const uint32_t count = 1 + dim % 9;
    Tensor key = MakeTensor(DType::kF32, count, dim, dim);
    Tensor value = MakeTensor(DType::kF32, count, value_dim, dim + 1);
    Target source = MakeInt8Target(key, value, count, dim % 5, dim % 3);
    ASSERT_TRUE(IngestInt8(GetParam(), key, value, count, source).ok());
    for (const DType to : kAllDTypes) {
      SCOPED_TRACE(testing::Message() << dim << " " << value_dim << " to " << DTypeName(to));
      Target target = MakeTarget(to, count, dim + value_dim, dim % 11, dim % 13);
      Target expected = target;
      DequantizeArgs args{.row_count = count,
                          .key_dim = dim,
                          .value_dim = value_dim,
                          .rows = std::span(source.bytes).subspan(source.offset),
                          .row_stride_bytes = source.stride,
                          .target_dtype = to,
                          .target = std::span(target.bytes).subspan(target.offset),
                          .target_stride_bytes = target.stride};
      DequantizeRows(Exec{GetParam()}, args);
      args.target = std::span(expected.bytes).subspan(expected.offset);
      DequantizeRows(Exec{Level::kReference}, args);
      ASSERT_TRUE(target.bytes == expected.bytes);
      if (to != DType::kF32) continue;
      for (uint32_t token = 0; token < count; ++token) {
        for (uint32_t i = 0; i < dim + value_dim; ++i) {
          Tensor& tensor = i < dim ? key : value;
          float most = 0.0f;
          for (uint32_t j = 0; j < tensor.dim; ++j) {
            most = std::max(most, std::abs(tensor.Get(token, j)));
          }
          const float read =
              LoadElement(to, target.bytes.data() + target.offset + token * target.stride, i);
          ASSERT_NEAR(read, tensor.Get(token, i < dim ? i : i - dim), 0.5001f * most / 127.0f);
        }
      }
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels
