// IngestHeads: every level writes the bytes that scalar conversion gives, over all heads, and names
// the first offender. Whether it goes token by token or head by head shows in no byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/rows/ingest.h"
#include "tests/kernels/rows/row_data.h"
#include "tests/kernels/tensor_data.h"

namespace pqcached::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

enum class Order { kTokensHeads, kHeadsTokens };

struct Shape {
  uint32_t token_count = 0;
  uint32_t head_count = 0;
  uint32_t dim = 0;
};

// Keys or values of all heads, in a buffer that ends with the last element.
struct HeadsTensor {
  DType dtype = DType::kF16;
  Shape shape;
  ptrdiff_t token_stride = 0;
  ptrdiff_t head_stride = 0;
  ptrdiff_t element_stride = 0;
  ptrdiff_t begin = 0;  // of element [0, 0, 0]
  std::vector<std::byte> bytes;

  StridedTensor FirstHead() const {
    return {bytes.empty() ? nullptr : bytes.data() + begin, dtype, token_stride, element_stride};
  }
  std::byte* Element(uint32_t token, uint32_t head, uint32_t index) {
    return bytes.data() + begin + token * token_stride + head * head_stride +
           index * element_stride;
  }
  float Get(uint32_t token, uint32_t head, uint32_t index) {
    return LoadElement(dtype, Element(token, head, index), 0);
  }
  void Set(uint32_t token, uint32_t head, uint32_t index, float value) {
    StoreElement(dtype, Element(token, head, index), 0, value);
  }
  void ReverseTokens() {
    begin += (shape.token_count - 1) * token_stride;
    token_stride = -token_stride;
  }
  void ReverseHeads() {
    begin += (shape.head_count - 1) * head_stride;
    head_stride = -head_stride;
  }
};

// `spread` > 1 leaves holes between elements; `offset` makes everything unaligned.
HeadsTensor MakeHeads(DType dtype, Shape shape, uint32_t seed, Order order = Order::kTokensHeads,
                      uint32_t spread = 1, ptrdiff_t offset = 0) {
  static const std::vector<float> random = RandomFloats(10007, 1, 3.0f);
  HeadsTensor tensor{.dtype = dtype, .shape = shape, .begin = offset, .bytes = {}};
  tensor.element_stride = static_cast<ptrdiff_t>(spread * DTypeBytes(dtype));
  const ptrdiff_t row_bytes = shape.dim * tensor.element_stride;
  const bool tokens_first = order == Order::kTokensHeads;
  tensor.token_stride = tokens_first ? shape.head_count * row_bytes : row_bytes;
  tensor.head_stride = tokens_first ? row_bytes : shape.token_count * row_bytes;
  tensor.bytes.resize(
      static_cast<size_t>(offset + shape.token_count * shape.head_count * row_bytes));
  size_t next = seed * 977;
  for (uint32_t token = 0; token < shape.token_count; ++token) {
    for (uint32_t head = 0; head < shape.head_count; ++head) {
      for (uint32_t i = 0; i < shape.dim; ++i) {
        tensor.Set(token, head, i, random[next++ % random.size()]);
      }
    }
  }
  return tensor;
}

// Rows of all heads, with bytes before, between and behind them that must stay as they are.
struct HeadRows {
  std::vector<std::byte> bytes;
  size_t stride = 0;
  size_t row_bytes = 0;
  std::vector<size_t> begins;  // of each head

  std::vector<std::byte*> Targets() {
    std::vector<std::byte*> targets;
    for (const size_t begin : begins) targets.push_back(bytes.data() + begin);
    return targets;
  }
};

// Rows begin `offset` bytes behind a line.
HeadRows MakeHeadRows(DType dtype, Shape shape, uint32_t row_dim, size_t padding = 0,
                      size_t offset = 0) {
  HeadRows rows;
  rows.row_bytes = row_dim * DTypeBytes(dtype);
  rows.stride = rows.row_bytes + padding;
  const size_t head_bytes = (shape.token_count * rows.stride + offset + 64) / 64 * 64 + 64;
  rows.bytes.assign(64 + head_bytes * shape.head_count + 64, kUntouched);
  const size_t line = 64 - reinterpret_cast<uintptr_t>(rows.bytes.data()) % 64;
  for (uint32_t head = 0; head < shape.head_count; ++head) {
    rows.begins.push_back(line + head * head_bytes + offset);
  }
  return rows;
}

IngestResult Ingest(Level level, const HeadsTensor& key, const HeadsTensor& value, DType row_dtype,
                    HeadRows& rows) {
  const std::vector<std::byte*> targets = rows.Targets();
  return IngestHeads(Exec{level}, {.token_count = key.shape.token_count,
                                   .key_dim = key.shape.dim,
                                   .value_dim = value.shape.dim,
                                   .key = key.FirstHead(),
                                   .key_head_stride_bytes = key.head_stride,
                                   .value = value.FirstHead(),
                                   .value_head_stride_bytes = value.head_stride,
                                   .row_dtype = row_dtype,
                                   .row_stride_bytes = rows.stride,
                                   .rows = targets});
}

// By the definition: false when an element of the part is not finite.
bool ConvertPart(HeadsTensor& tensor, uint32_t token, uint32_t head, DType row_dtype,
                 std::byte* to) {
  bool finite = true;
  for (uint32_t i = 0; i < tensor.shape.dim; ++i) {
    StoreElement(row_dtype, to, i, tensor.Get(token, head, i));
    finite = finite && std::isfinite(LoadElement(row_dtype, to, i));
  }
  return finite;
}

// The result, all rows before a bad token, and every byte outside of rows.
void ExpectRows(HeadsTensor& key, HeadsTensor& value, DType row_dtype, const HeadRows& rows,
                const IngestResult& result) {
  std::vector<std::byte> expected(rows.bytes.size(), kUntouched);
  const size_t value_begin = key.shape.dim * DTypeBytes(row_dtype);
  IngestResult first_bad;
  for (uint32_t token = 0; token < key.shape.token_count; ++token) {
    for (uint32_t head = 0; head < key.shape.head_count; ++head) {
      const size_t begin = rows.begins[head] + token * rows.stride;
      std::byte* row = expected.data() + begin;
      const bool key_good = ConvertPart(key, token, head, row_dtype, row);
      const bool value_good =
          value.shape.dim == 0 || ConvertPart(value, token, head, row_dtype, row + value_begin);
      if (first_bad.ok() && !(key_good && value_good)) {
        first_bad = {key_good ? IngestPart::kValue : IngestPart::kKey, token, 0};
      }
    }
    if (first_bad.ok()) continue;
    for (uint32_t head = 0; head < key.shape.head_count; ++head) {  // unspecified
      const size_t begin = rows.begins[head] + token * rows.stride;
      std::copy_n(rows.bytes.begin() + static_cast<ptrdiff_t>(begin), rows.row_bytes,
                  expected.begin() + static_cast<ptrdiff_t>(begin));
    }
  }
  ASSERT_EQ(result.bad_part, first_bad.bad_part);
  ASSERT_EQ(result.bad_token, first_bad.bad_token);
  ASSERT_EQ(result.crc, 0u);
  ASSERT_TRUE(rows.bytes == expected);
}

void IngestAndExpect(Level level, HeadsTensor& key, HeadsTensor& value, DType row_dtype,
                     size_t padding = 0, size_t offset = 0) {
  const uint32_t row_dim = key.shape.dim + value.shape.dim;
  HeadRows rows = MakeHeadRows(row_dtype, key.shape, row_dim, padding, offset);
  const IngestResult result = Ingest(level, key, value, row_dtype, rows);
  ExpectRows(key, value, row_dtype, rows, result);
}

class IngestHeadsTest : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(AllLevels, IngestHeadsTest, testing::ValuesIn(AvailableLevels()),
                         LevelTestName);

TEST_P(IngestHeadsTest, ConvertsBetweenAllTypesAtAnyTokenAndHeadCount) {
  for (const DType from : kAllDTypes) {
    for (const DType to : kAllDTypes) {
      for (const uint32_t count : {0u, 1u, 7u, 8u, 9u, 63u, 64u, 65u, 127u, 128u, 129u}) {
        for (const uint32_t heads : {1u, 2u, 3u, 8u}) {
          SCOPED_TRACE(testing::Message() << DTypeName(from) << " to " << DTypeName(to) << " "
                                          << count << " x " << heads);
          HeadsTensor key = MakeHeads(from, {count, heads, 32}, count);
          HeadsTensor value = MakeHeads(from, {count, heads, 32}, count + 1);
          ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, to));
          ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, to, 6, 2));
        }
      }
    }
  }
}

TEST_P(IngestHeadsTest, RowsMayBeValuesAlone) {
  for (const DType from : kAllDTypes) {
    for (const DType to : kAllDTypes) {
      for (const uint32_t dim : {8u, 40u, 64u}) {
        HeadsTensor no_key = MakeHeads(from, {65, 3, 0}, 1);
        HeadsTensor value = MakeHeads(from, {65, 3, dim}, dim);
        ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), no_key, value, to, 6, 2));
        value.Set(64, 1, 7, kNan);
        ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), no_key, value, to));
      }
    }
  }
}

TEST_P(IngestHeadsTest, EveryDimAndAlignmentWorks) {
  for (uint32_t dim = 8; dim <= 256; dim += 8) {
    for (const DType to : kAllDTypes) {
      for (const DType from : kAllDTypes) {
        const uint32_t value_dim = (dim * 5) % 256 + 8;
        SCOPED_TRACE(testing::Message() << dim << " " << value_dim << " " << DTypeName(from)
                                        << " to " << DTypeName(to));
        HeadsTensor key = MakeHeads(from, {7, 3, dim}, dim, Order::kTokensHeads, 1, dim % 5);
        HeadsTensor value = MakeHeads(to, {7, 3, value_dim}, dim + 1, Order::kTokensHeads, 1,
                                      dim % 3);  // a copy, the key perhaps not
        ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, to));
        ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), value, key, to));
        ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, to, 64, 0));
        ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, to, dim % 7, dim % 61));
      }
    }
  }
}

TEST_P(IngestHeadsTest, KeysAndValuesOfDifferentTypesWork) {
  for (const DType key_dtype : kAllDTypes) {
    for (const DType value_dtype : kAllDTypes) {
      for (const DType to : kAllDTypes) {
        SCOPED_TRACE(testing::Message() << DTypeName(key_dtype) << ", " << DTypeName(value_dtype)
                                        << " to " << DTypeName(to));
        HeadsTensor key = MakeHeads(key_dtype, {33, 3, 128}, 1);
        HeadsTensor value = MakeHeads(value_dtype, {33, 3, 96}, 2);
        ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, to));
        ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, to, 10, 30));
      }
    }
  }
}

TEST_P(IngestHeadsTest, KeysAloneWork) {
  for (const DType to : kAllDTypes) {
    for (const uint32_t dim : {72u, 128u}) {
      HeadsTensor key = MakeHeads(DType::kF16, {50, 4, dim}, 1);
      HeadsTensor none;
      ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, none, to));
      key.Set(31, 2, dim - 1, kNan);
      ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, none, to));
    }
  }
}

TEST_P(IngestHeadsTest, NoHeadsAndNoTokensAreNoWork) {
  EXPECT_TRUE(IngestHeads(Exec{GetParam()}, {}).ok());
  std::byte* const rows[] = {nullptr, nullptr};
  EXPECT_TRUE(IngestHeads(Exec{GetParam()}, {.token_count = 0,
                                             .key_dim = 64,
                                             .value_dim = 64,
                                             .key = {},
                                             .key_head_stride_bytes = 128,
                                             .value = {},
                                             .value_head_stride_bytes = 128,
                                             .row_dtype = DType::kF16,
                                             .row_stride_bytes = 256,
                                             .rows = rows})
                  .ok());
}

TEST_P(IngestHeadsTest, AnyOrderInMemoryWorks) {
  for (const Order key_order : {Order::kTokensHeads, Order::kHeadsTokens}) {
    for (const Order value_order : {Order::kTokensHeads, Order::kHeadsTokens}) {
      for (const DType from : kAllDTypes) {
        for (uint32_t reversed = 0; reversed < 16; ++reversed) {
          SCOPED_TRACE(testing::Message()
                       << DTypeName(from) << " orders " << static_cast<int>(key_order) << ", "
                       << static_cast<int>(value_order) << " reversed " << reversed);
          HeadsTensor key = MakeHeads(from, {21, 3, 64}, 1, key_order);
          HeadsTensor value = MakeHeads(from, {21, 3, 40}, 2, value_order);
          if (reversed & 1) key.ReverseTokens();
          if (reversed & 2) value.ReverseTokens();
          if (reversed & 4) key.ReverseHeads();
          if (reversed & 8) value.ReverseHeads();
          ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, DType::kF16));
          value.Set(13, 1, 39, kNan);
          key.Set(13, 2, 0, kInfinity);
          ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, DType::kF16));
        }
      }
    }
  }
}

TEST_P(IngestHeadsTest, ScatteredElementsWork) {
  for (const uint32_t key_spread : {1u, 3u}) {
    for (const DType to : kAllDTypes) {
      HeadsTensor key = MakeHeads(DType::kF32, {20, 3, 64}, 1, Order::kTokensHeads, key_spread);
      HeadsTensor value =
          MakeHeads(DType::kF16, {20, 3, 40}, 2, Order::kTokensHeads, 4 - key_spread);
      ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, to));
      value.Set(9, 2, 7, kNan);
      key.Set(11, 0, 7, kNan);
      ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, to));
    }
  }
}

TEST_P(IngestHeadsTest, StridesOfZeroRepeatWhatTheyStandOn) {
  for (const uint32_t token_count : {1u, 5u}) {
    for (uint32_t zeros = 0; zeros < 16; ++zeros) {
      SCOPED_TRACE(testing::Message() << token_count << " tokens, zeros " << zeros);
      HeadsTensor key = MakeHeads(DType::kBf16, {token_count, 4, 64}, 1);
      HeadsTensor value = MakeHeads(DType::kF16, {token_count, 4, 32}, 2);
      if (zeros & 1) key.token_stride = 0;
      if (zeros & 2) key.head_stride = 0;
      if (zeros & 4) value.token_stride = 0;
      if (zeros & 8) value.head_stride = 0;
      for (const DType to : kAllDTypes) {
        ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, to));
      }
    }
  }
}

TEST_P(IngestHeadsTest, DenormalsAndExtremesConvertLikeScalars) {
  const float extremes[] = {0.0f,       -0.0f,    0x1p-149f, 0x1p-126f, 0x1.8p-25f,   0x1p-24f,
                            0x1.8p-24f, 65504.0f, -65504.0f, 65519.0f,  0x1.fffp-15f, 1.0009765f};
  for (const DType from : kAllDTypes) {
    for (const DType to : kAllDTypes) {
      HeadsTensor key = MakeHeads(from, {12, 2, 64}, 1);
      HeadsTensor value = MakeHeads(from, {12, 2, 40}, 2);
      for (uint32_t i = 0; i < 12; ++i) {
        // In bf16 65519 is 65536, beyond fp16.
        const float extreme = from == DType::kF32 ? extremes[i] : std::min(extremes[i], 65280.0f);
        key.Set(i, i % 2, i * 3, extreme);
        value.Set(i, 1, 39 - i, extreme);
      }
      key.Set(8, 0, 24, from == DType::kBf16 ? -65280.0f : -65504.0f);
      value.Set(8, 1, 31, from == DType::kBf16 ? -65280.0f : -65504.0f);
      HeadRows rows = MakeHeadRows(to, key.shape, 104);
      const IngestResult result = Ingest(GetParam(), key, value, to, rows);
      ASSERT_TRUE(result.ok());
      ASSERT_NO_FATAL_FAILURE(ExpectRows(key, value, to, rows, result));
    }
  }
}

TEST_P(IngestHeadsTest, NamesTheFirstBadTokenWhereverItIs) {
  for (const DType from : kAllDTypes) {
    for (const DType to : kAllDTypes) {
      for (const float bad : {kNan, kInfinity, -kInfinity}) {
        for (const uint32_t token : {0u, 1u, 8u, 19u}) {
          for (const uint32_t head : {0u, 1u, 2u}) {
            for (const uint32_t index : {0u, 15u, 16u, 71u}) {
              SCOPED_TRACE(testing::Message()
                           << DTypeName(from) << " to " << DTypeName(to) << " " << bad << " at "
                           << token << ", " << head << ", " << index);
              HeadsTensor key = MakeHeads(from, {20, 3, 96}, 1);
              HeadsTensor value = MakeHeads(from, {20, 3, 72}, 2);
              value.Set(token, head, index, bad);
              HeadRows rows = MakeHeadRows(to, key.shape, 168);
              const IngestResult result = Ingest(GetParam(), key, value, to, rows);
              ASSERT_EQ(result.bad_part, IngestPart::kValue);
              ASSERT_EQ(result.bad_token, token);
              ASSERT_NO_FATAL_FAILURE(ExpectRows(key, value, to, rows, result));
              key.Set(token, head, index + 24, bad);
              const IngestResult by_key = Ingest(GetParam(), key, value, to, rows);
              ASSERT_EQ(by_key.bad_part, IngestPart::kKey);
              ASSERT_EQ(by_key.bad_token, token);
            }
          }
        }
      }
    }
  }
}

TEST_P(IngestHeadsTest, TheLowestHeadOfTheFirstBadTokenDecides) {
  for (const Order order : {Order::kTokensHeads, Order::kHeadsTokens}) {
    HeadsTensor key = MakeHeads(DType::kF16, {30, 4, 64}, 1, order);
    HeadsTensor value = MakeHeads(DType::kF16, {30, 4, 64}, 2, order);
    HeadRows rows = MakeHeadRows(DType::kF16, key.shape, 128);
    key.Set(25, 0, 1, kNan);
    key.Set(20, 3, 1, kNan);
    EXPECT_EQ(Ingest(GetParam(), key, value, DType::kF16, rows).bad_token, 20u);
    value.Set(20, 2, 63, kNan);  // a value of a lower head comes before the key of a higher one
    const IngestResult value_first = Ingest(GetParam(), key, value, DType::kF16, rows);
    EXPECT_EQ(value_first.bad_token, 20u);
    EXPECT_EQ(value_first.bad_part, IngestPart::kValue);
    key.Set(20, 2, 0, kNan);
    EXPECT_EQ(Ingest(GetParam(), key, value, DType::kF16, rows).bad_part, IngestPart::kKey);
    value.Set(19, 3, 5, kNan);
    const IngestResult earlier = Ingest(GetParam(), key, value, DType::kF16, rows);
    EXPECT_EQ(earlier.bad_token, 19u);
    EXPECT_EQ(earlier.bad_part, IngestPart::kValue);
  }
}

TEST_P(IngestHeadsTest, ScatteredOffendersGiveWhatTheDefinitionGives) {
  std::mt19937 generator(7);
  const auto below = [&](uint32_t limit) { return static_cast<uint32_t>(generator() % limit); };
  constexpr float kBad[] = {kNan, -kNan, kInfinity, -kInfinity, 65520.0f, -1e30f, 0x1.ffp127f};
  for (int round = 0; round < 400; ++round) {
    SCOPED_TRACE(round);
    const Shape shape{1 + below(20), 1 + below(8), 8 + 8 * below(16)};
    const Shape value_shape{shape.token_count, shape.head_count, 8 + 8 * below(16)};
    const Order order = below(4) == 0 ? Order::kHeadsTokens : Order::kTokensHeads;
    HeadsTensor key = MakeHeads(kAllDTypes[below(3)], shape, below(100), order);
    HeadsTensor value = MakeHeads(kAllDTypes[below(3)], value_shape, below(100));
    for (uint32_t i = below(6); i > 0; --i) {
      HeadsTensor& tensor = below(2) == 0 ? key : value;
      tensor.Set(below(shape.token_count), below(shape.head_count), below(tensor.shape.dim),
                 kBad[below(std::size(kBad))]);
    }
    const bool aligned = below(2) == 0;
    ASSERT_NO_FATAL_FAILURE(IngestAndExpect(GetParam(), key, value, kAllDTypes[below(3)],
                                            aligned ? 0 : below(70), aligned ? 0 : below(64)));
  }
}

TEST_P(IngestHeadsTest, ValuesThatTheRowTypeCannotHoldAreBad) {
  const struct {
    DType from;
    DType to;
    float good;
    float bad;
  } cases[] = {{DType::kF32, DType::kF16, 65519.99f, 65520.0f},
               {DType::kBf16, DType::kF16, 65280.0f, -65536.0f},
               {DType::kF32, DType::kBf16, 0x1.fefffep127f, 0x1.ffp127f}};
  for (const auto& c : cases) {
    for (const uint32_t dim : {40u, 64u}) {
      SCOPED_TRACE(testing::Message() << DTypeName(c.from) << " to " << DTypeName(c.to));
      HeadsTensor key = MakeHeads(c.from, {10, 3, dim}, 1);
      HeadsTensor value = MakeHeads(c.from, {10, 3, dim}, 2);
      HeadRows rows = MakeHeadRows(c.to, key.shape, 2 * dim);
      key.Set(4, 1, dim - 1, c.good);
      EXPECT_TRUE(Ingest(GetParam(), key, value, c.to, rows).ok());
      key.Set(4, 1, dim - 1, c.bad);
      const IngestResult result = Ingest(GetParam(), key, value, c.to, rows);
      EXPECT_EQ(result.bad_part, IngestPart::kKey);
      EXPECT_EQ(result.bad_token, 4u);
      ASSERT_NO_FATAL_FAILURE(ExpectRows(key, value, c.to, rows, result));
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels
