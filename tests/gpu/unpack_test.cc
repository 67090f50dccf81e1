// UnpackRows against plain loops: layouts, dtypes, sizes.
#include "kernels/cuda/unpack.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "gpu/device.h"
#include "kernels/base/dtype.h"
#include "tests/gpu/device_array.h"
#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels::cuda {
namespace {

enum class Layout {
  kContiguous,  // [tokens, heads, dim]
  kHeadsFirst,  // [heads, tokens, dim]
  kPaged,       // [blocks, block_tokens, heads, dim]
  kTransposed,  // [blocks, heads, dim, block_tokens]
};
constexpr Layout kAllLayouts[] = {Layout::kContiguous, Layout::kHeadsFirst, Layout::kPaged,
                                  Layout::kTransposed};

struct Case {
  DType from = DType::kF16;
  DType to = DType::kF16;
  Layout key_layout = Layout::kContiguous;
  Layout value_layout = Layout::kContiguous;
  uint32_t token_count = 0;
  uint32_t first_token = 0;  // of the block table
  uint32_t head_count = 2;
  uint32_t key_dim = 64;
  uint32_t value_dim = 40;
  uint32_t block_tokens = 16;
  uint32_t padding = 0;  // elements between tokens, so that they are not aligned
};

class UnpackDeviceTest : public DeviceTest {
 protected:
  static constexpr std::byte kUntouched{0x5A};

  // Memory of an engine for K or V, blocks in shuffled order.
  struct Target {
    std::vector<std::byte> expected;
    std::vector<int64_t> offsets;  // of the tokens
    std::unique_ptr<DeviceArray<std::byte>> memory;
    std::unique_ptr<DeviceArray<int64_t>> device_offsets;
    UnpackTensor view;
    bool is_paged = false;

    size_t PlaceOf(uint32_t token, uint32_t head, uint32_t i) const {
      const int64_t begin = is_paged ? offsets[token] : token * view.token_stride;
      return static_cast<size_t>(begin + head * view.head_stride + i * view.dim_stride);
    }
  };

  static Target MakeTarget(const Case& c, Layout layout, uint32_t dim) {
    Target target;
    target.is_paged = layout == Layout::kPaged || layout == Layout::kTransposed;
    const int64_t row = int64_t{c.head_count} * dim + c.padding;
    const uint32_t block_count = (c.first_token + c.token_count) / c.block_tokens + 3;
    const int64_t block_stride = int64_t{c.block_tokens} * row;
    for (uint32_t t = 0; target.is_paged && t < c.token_count; ++t) {
      const uint32_t token = c.first_token + t;
      const uint32_t block = block_count - 1 - token / c.block_tokens;
      const int64_t token_stride = layout == Layout::kPaged ? row : 1;
      target.offsets.push_back(block * block_stride + token % c.block_tokens * token_stride);
    }
    const auto elements =
        static_cast<size_t>(target.is_paged ? block_count * block_stride : c.token_count * row);
    target.expected.assign(elements * DTypeBytes(c.to), kUntouched);
    target.memory = std::make_unique<DeviceArray<std::byte>>(target.expected);
    target.device_offsets = std::make_unique<DeviceArray<int64_t>>(target.offsets);
    target.view = {.data = target.memory->data(), .dtype = c.to};
    if (target.is_paged) target.view.token_offsets = target.device_offsets->data();
    switch (layout) {
      case Layout::kContiguous:
      case Layout::kPaged:
        target.view.token_stride = row;
        target.view.head_stride = dim;
        break;
      case Layout::kHeadsFirst:
        target.view.token_stride = dim;
        target.view.head_stride = int64_t{c.token_count} * dim;
        break;
      case Layout::kTransposed:
        target.view.head_stride = int64_t{dim} * c.block_tokens;
        target.view.dim_stride = c.block_tokens;
        break;
    }
    return target;
  }

  void Check(const Case& c) {
    Target key = MakeTarget(c, c.key_layout, c.key_dim);
    Target value = MakeTarget(c, c.value_layout, c.value_dim);
    const uint32_t dims = c.key_dim + c.value_dim;
    const size_t row_stride = (dims * DTypeBytes(c.from) + 15) / 16 * 16 + 16;
    const size_t head_bytes = c.token_count * row_stride;
    gpu::PinnedBuffer rows;
    ASSERT_TRUE(rows.Allocate(c.head_count * head_bytes + 16).ok());
    auto* const from = static_cast<std::byte*>(rows.data());
    const std::vector<float> numbers =
        RandomFloats(size_t{c.head_count} * c.token_count * dims, 7, 100.0f);
    UnpackRowsArgs args{.token_count = c.token_count,
                        .head_count = c.head_count,
                        .key_dim = c.key_dim,
                        .value_dim = c.value_dim,
                        .row_dtype = c.from,
                        .row_stride_bytes = row_stride,
                        .key = key.view,
                        .value = value.view};
    size_t next = 0;
    for (uint32_t head = 0; head < c.head_count; ++head) {
      args.rows[head] = from + head * head_bytes;
      for (uint32_t token = 0; token < c.token_count; ++token) {
        std::byte* const row = from + head * head_bytes + token * row_stride;
        for (uint32_t i = 0; i < dims; ++i) {
          StoreElement(c.from, row, i, numbers[next++]);
          const bool is_key = i < c.key_dim;
          Target& target = is_key ? key : value;
          const size_t place = target.PlaceOf(token, head, is_key ? i : i - c.key_dim);
          ConvertElements(c.from, row + i * DTypeBytes(c.from), c.to,
                          target.expected.data() + place * DTypeBytes(c.to), 1);
        }
      }
    }
    Finish(UnpackRows(args, stream_));
    ASSERT_TRUE(key.memory->Get() == key.expected) << "keys " << Describe(c);
    ASSERT_TRUE(value.memory->Get() == value.expected) << "values " << Describe(c);
  }

  static std::string Describe(const Case& c) {
    return std::string(DTypeName(c.from)) + " to " + std::string(DTypeName(c.to)) + ", layouts " +
           std::to_string(static_cast<int>(c.key_layout)) + " and " +
           std::to_string(static_cast<int>(c.value_layout)) + ", tokens " +
           std::to_string(c.token_count) + " from " + std::to_string(c.first_token) + ", dims " +
           std::to_string(c.key_dim) + " and " + std::to_string(c.value_dim);
  }
};

// The number of tokens of a thread block is 8.
TEST_F(UnpackDeviceTest, MatchesPlainLoopsInAllDTypesAndLayouts) {
  for (const DType from : kAllDTypes) {
    for (const DType to : kAllDTypes) {
      for (const Layout layout : kAllLayouts) {
        for (const uint32_t tokens : {0u, 1u, 7u, 8u, 9u, 15u, 16u, 17u}) {
          Check({.from = from,
                 .to = to,
                 .key_layout = layout,
                 .value_layout = layout,
                 .token_count = tokens});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// A vector is 16 bytes: 8 elements, or 4 of f32; a warp reads 32 vectors at once.
TEST_F(UnpackDeviceTest, TakesEveryDim) {
  for (const DType dtype : kAllDTypes) {
    for (const uint32_t dim : {8u, 16u, 56u, 64u, 72u, 120u, 128u, 136u, 248u, 256u}) {
      Check({.from = dtype, .to = dtype, .token_count = 3, .key_dim = dim, .value_dim = 8});
      Check({.from = dtype, .to = dtype, .token_count = 3, .key_dim = 8, .value_dim = dim});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(UnpackDeviceTest, TakesLayoutsOfKAndVApartFromInsideABlock) {
  for (const uint32_t block_tokens : {1u, 16u, 17u}) {
    for (const uint32_t first : {0u, 5u, 15u, 16u}) {
      for (const Layout key_layout : kAllLayouts) {
        for (const Layout value_layout : kAllLayouts) {
          Check({.from = DType::kBf16,
                 .to = DType::kBf16,
                 .key_layout = key_layout,
                 .value_layout = value_layout,
                 .token_count = 50,
                 .first_token = first,
                 .block_tokens = block_tokens});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(UnpackDeviceTest, WritesTokensThatAreNotAligned) {
  for (const DType dtype : kAllDTypes) {
    Check({.from = dtype, .to = dtype, .token_count = 5, .head_count = 3, .padding = 3});
    if (HasFatalFailure()) return;
  }
}

TEST_F(UnpackDeviceTest, KeepsTheBitsOfANan) {
  const std::vector<uint16_t> row(16, 0x7D01);  // a signalling one
  const DeviceArray<uint16_t> rows(row), target(row.size());
  UnpackRowsArgs args{
      .token_count = 1,
      .head_count = 1,
      .key_dim = 8,
      .value_dim = 8,
      .row_stride_bytes = 32,
      .key = {.data = reinterpret_cast<std::byte*>(target.data()), .dim_stride = 2},
      .value = {.data = reinterpret_cast<std::byte*>(target.data() + 1), .dim_stride = 2}};
  args.rows[0] = reinterpret_cast<const std::byte*>(rows.data());
  Finish(UnpackRows(args, stream_));
  EXPECT_EQ(target.Get(), row);
}

TEST_F(UnpackDeviceTest, RefusesWhatIsOutOfRange) {
  const DeviceArray<std::byte> memory(64);
  UnpackRowsArgs good{.token_count = 1,
                      .head_count = 1,
                      .key_dim = 8,
                      .value_dim = 8,
                      .row_stride_bytes = 32,
                      .key = {.data = memory.data()},
                      .value = {.data = memory.data() + 16}};
  good.rows[0] = memory.data() + 32;
  EXPECT_TRUE(UnpackRows(good, stream_).ok());
  const auto refused = [&](auto change) {
    UnpackRowsArgs args = good;
    change(args);
    return !UnpackRows(args, stream_).ok();
  };
  EXPECT_TRUE(refused([](UnpackRowsArgs& args) { args.key_dim = 12; }));
  EXPECT_TRUE(refused([](UnpackRowsArgs& args) { args.value_dim = 0; }));
  EXPECT_TRUE(refused([](UnpackRowsArgs& args) { args.value_dim = 264; }));
  EXPECT_TRUE(refused([](UnpackRowsArgs& args) { args.head_count = kMaxUnpackHeads + 1; }));
  EXPECT_TRUE(refused([](UnpackRowsArgs& args) { args.token_count = (1u << 30) + 1; }));
  EXPECT_TRUE(refused([](UnpackRowsArgs& args) { args.row_stride_bytes = 16; })) << "rows overlap";
  EXPECT_TRUE(refused([](UnpackRowsArgs& args) { args.row_stride_bytes = 40; }));
  EXPECT_TRUE(refused([](UnpackRowsArgs& args) { args.rows[0] += 8; }));
  EXPECT_TRUE(refused([](UnpackRowsArgs& args) { args.key.data += 1; }));
  EXPECT_TRUE(refused([](UnpackRowsArgs& args) { args.value.data += 1; }));
}

}  // namespace
}  // namespace pqcached::kernels::cuda
