// UnpackHeads: every level writes the elements that scalar conversion gives, in any layout of the
// targets, and no other bytes.
#include "kernels/rows/unpack.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels {
namespace {

constexpr std::byte kUntouched{0xa5};

struct Shape {
  uint32_t token_count = 0;
  uint32_t head_count = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
};

// Rows of several heads; the first one is `offset` bytes behind a line.
std::vector<RowData> MakeHeads(DType dtype, const Shape& shape, size_t padding = 0,
                               size_t offset = 0) {
  std::vector<RowData> heads;
  for (uint32_t head = 0; head < shape.head_count; ++head) {
    heads.push_back(MakeRows(dtype, shape.key_dim + shape.value_dim, shape.token_count, 1, head + 1,
                             padding, offset));
  }
  return heads;
}

enum class Layout {
  kTokensHeads,
  kHeadsTokens,
  kHeadsDims,   // [heads, dim, tokens]: transposed
  kDimsTokens,  // [dim, tokens, heads]: no element beside another one of its part
  kReversed,    // [tokens, heads, dim], read from the end
  kWithHoles,   // [tokens, heads, dim] with bytes between the parts
};
constexpr Layout kLayouts[] = {Layout::kTokensHeads, Layout::kHeadsTokens, Layout::kHeadsDims,
                               Layout::kDimsTokens,  Layout::kReversed,    Layout::kWithHoles};

// Keys or values in memory of their own, with untouched bytes around them.
struct Target {
  std::vector<std::byte> bytes;
  UnpackTarget tensor;
  size_t begin = 0;  // of element [0, 0, 0]

  size_t PlaceOf(uint32_t token, uint32_t head, uint32_t index) const {
    return begin +
           static_cast<size_t>(token * tensor.token_stride_bytes + head * tensor.head_stride_bytes +
                               index * tensor.element_stride_bytes);
  }
};

Target MakeTarget(DType dtype, Layout layout, uint32_t tokens, uint32_t heads, uint32_t dim,
                  size_t offset) {
  const auto element = static_cast<ptrdiff_t>(DTypeBytes(dtype));
  const ptrdiff_t hole = layout == Layout::kWithHoles ? 24 : 0;
  const ptrdiff_t token_count = tokens, head_count = heads, dims = dim;
  Target target;
  target.tensor.dtype = dtype;
  target.tensor.token_stride_bytes = head_count * (dims * element + hole);
  target.tensor.head_stride_bytes = dims * element + hole;
  target.tensor.element_stride_bytes = element;
  switch (layout) {
    case Layout::kHeadsTokens:
      target.tensor.token_stride_bytes = dims * element;
      target.tensor.head_stride_bytes = token_count * dims * element;
      break;
    case Layout::kHeadsDims:
      target.tensor.token_stride_bytes = element;
      target.tensor.head_stride_bytes = token_count * dims * element;
      target.tensor.element_stride_bytes = token_count * element;
      break;
    case Layout::kDimsTokens:
      target.tensor.token_stride_bytes = head_count * element;
      target.tensor.head_stride_bytes = element;
      target.tensor.element_stride_bytes = token_count * head_count * element;
      break;
    default:
      break;
  }
  const auto size = static_cast<size_t>(token_count * head_count * (dims * element + hole));
  target.bytes.assign(64 + offset + size + 64, kUntouched);
  target.begin = 64 - reinterpret_cast<uintptr_t>(target.bytes.data()) % 64 + offset;
  if (layout == Layout::kReversed && tokens > 0) {
    target.begin += static_cast<size_t>((token_count - 1) * target.tensor.token_stride_bytes);
    target.tensor.token_stride_bytes = -target.tensor.token_stride_bytes;
  }
  target.tensor.data = target.bytes.data() + target.begin;
  return target;
}

std::vector<std::byte> Expected(std::vector<RowData>& heads, const Target& target, uint32_t begin,
                                uint32_t dim) {
  std::vector<std::byte> bytes(target.bytes.size(), kUntouched);
  for (uint32_t head = 0; head < heads.size(); ++head) {
    for (uint32_t token = 0; token < heads[head].positions.size(); ++token) {
      for (uint32_t i = 0; i < dim; ++i) {
        StoreElement(target.tensor.dtype, bytes.data() + target.PlaceOf(token, head, i), 0,
                     LoadElement(heads[head].dtype, heads[head].Row(token), begin + i));
      }
    }
  }
  return bytes;
}

void ExpectUnpacks(Level level, std::vector<RowData>& heads, const Shape& shape, DType to,
                   Layout key_layout, Layout value_layout, size_t offset, bool stream) {
  Target key =
      MakeTarget(to, key_layout, shape.token_count, shape.head_count, shape.key_dim, offset);
  Target value =
      MakeTarget(to, value_layout, shape.token_count, shape.head_count, shape.value_dim, offset);
  std::vector<const std::byte*> rows;
  for (RowData& head : heads) rows.push_back(head.bytes.data() + head.offset);
  UnpackHeads(Exec{level}, {.token_count = shape.token_count,
                            .key_dim = shape.key_dim,
                            .value_dim = shape.value_dim,
                            .row_dtype = heads.empty() ? to : heads[0].dtype,
                            .row_stride_bytes = heads.empty() ? 2048 : heads[0].stride_bytes,
                            .rows = rows,
                            .key = key.tensor,
                            .value = value.tensor,
                            .stream = stream});
  ASSERT_TRUE(key.bytes == Expected(heads, key, 0, shape.key_dim));
  ASSERT_TRUE(value.bytes == Expected(heads, value, shape.key_dim, shape.value_dim));
}

class UnpackTest : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(AllLevels, UnpackTest, testing::ValuesIn(AvailableLevels()),
                         LevelTestName);

TEST_P(UnpackTest, RowsMayBeValuesAlone) {
  for (const DType from : kAllDTypes) {
    for (const DType to : kAllDTypes) {
      for (const uint32_t value_dim : {32u, 40u, 256u}) {
        const Shape shape{33, 3, 0, value_dim};
        std::vector<RowData> heads = MakeHeads(from, shape);
        for (const Layout layout : kLayouts) {
          ExpectUnpacks(GetParam(), heads, shape, to, Layout::kTokensHeads, layout, 0, true);
        }
      }
    }
  }
}

TEST_P(UnpackTest, ConvertsBetweenAllTypesAtAnyTokenAndHeadCount) {
  for (const DType from : kAllDTypes) {
    for (const uint32_t tokens : {0u, 1u, 7u, 31u, 32u, 33u, 65u}) {
      for (const uint32_t head_count : {0u, 1u, 3u, 8u}) {
        const Shape shape{tokens, head_count, 32, 64};
        std::vector<RowData> heads = MakeHeads(from, shape);
        for (const DType to : kAllDTypes) {
          for (const bool stream : {false, true}) {
            SCOPED_TRACE(testing::Message() << DTypeName(from) << " to " << DTypeName(to) << " "
                                            << tokens << " x " << head_count);
            ASSERT_NO_FATAL_FAILURE(ExpectUnpacks(GetParam(), heads, shape, to,
                                                  Layout::kTokensHeads, Layout::kTokensHeads, 0,
                                                  stream));
          }
        }
      }
    }
  }
}

TEST_P(UnpackTest, EveryDimAndAlignmentWorks) {
  for (uint32_t dim = 8; dim <= 256; dim += 8) {
    const Shape shape{5, 2, dim, 264 - dim};
    for (const size_t offset : {0u, 2u, 16u, 33u}) {
      std::vector<RowData> heads = MakeHeads(DType::kBf16, shape, /*padding=*/offset, offset);
      for (const DType to : {DType::kBf16, DType::kF32}) {
        for (const bool stream : {false, true}) {
          SCOPED_TRACE(testing::Message() << dim << " dims at " << offset);
          ASSERT_NO_FATAL_FAILURE(ExpectUnpacks(GetParam(), heads, shape, to, Layout::kTokensHeads,
                                                Layout::kTokensHeads, offset, stream));
        }
      }
    }
  }
}

TEST_P(UnpackTest, KeysAndValuesHaveAnyLayouts) {
  const Shape shape{33, 3, 40, 64};
  for (const DType from : {DType::kF16, DType::kF32}) {
    std::vector<RowData> heads = MakeHeads(from, shape);
    for (const DType to : {DType::kF16, DType::kF32}) {
      for (const Layout key_layout : kLayouts) {
        for (const Layout value_layout : kLayouts) {
          SCOPED_TRACE(testing::Message()
                       << DTypeName(from) << " to " << DTypeName(to) << " "
                       << static_cast<int>(key_layout) << " " << static_cast<int>(value_layout));
          ASSERT_NO_FATAL_FAILURE(ExpectUnpacks(GetParam(), heads, shape, to, key_layout,
                                                value_layout, 0, /*stream=*/true));
        }
      }
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels
