// PackRows against plain loops: layouts, dtypes, block tables.
#include "kernels/cuda/pack.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <vector>

#include "kernels/base/dtype.h"
#include "tests/gpu/device_array.h"
#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels::cuda {
namespace {

struct Case {
  DType from = DType::kF16;
  DType to = DType::kF16;
  uint32_t token_count = 0;
  uint32_t first_token = 0;
  uint32_t head_count = 2;
  uint32_t key_dim = 64;
  uint32_t value_dim = 64;
  uint32_t block_tokens = 0;  // 0: no block table
  uint32_t padding = 0;       // elements between tokens, so that rows are not aligned
};

class PackDeviceTest : public DeviceTest {
 protected:
  // A tensor with room for all tokens (and blocks in shuffled order).
  struct Tensor {
    std::vector<std::byte> bytes;
    std::unique_ptr<DeviceArray<std::byte>> memory;
    PackTensor view;
  };

  static Tensor MakeTensor(const Case& c, uint32_t dim, uint32_t block_count, uint32_t seed) {
    Tensor tensor;
    const uint32_t tokens =
        c.block_tokens > 0 ? block_count * c.block_tokens : c.first_token + c.token_count;
    const int64_t token_stride = int64_t{c.head_count} * dim + c.padding;
    const auto elements = static_cast<size_t>(tokens * token_stride);
    const std::vector<float> values = RandomFloats(elements, seed, 100.0f);
    tensor.bytes.resize(elements * DTypeBytes(c.from));
    for (size_t i = 0; i < elements; ++i) StoreElement(c.from, tensor.bytes.data(), i, values[i]);
    tensor.memory = std::make_unique<DeviceArray<std::byte>>(tensor.bytes);
    tensor.view = {.data = tensor.memory->data(),
                   .dtype = c.from,
                   .block_stride = c.block_tokens * token_stride,
                   .token_stride = token_stride,
                   .head_stride = dim};
    return tensor;
  }

  void Check(const Case& c) {
    std::vector<int32_t> table;
    if (c.block_tokens > 0) {
      const uint32_t last = (c.first_token + c.token_count) / c.block_tokens;
      for (uint32_t block = 0; block <= last; ++block) {
        table.push_back(static_cast<int32_t>((block * 5 + 3) % (last + 7)));
      }
    }
    const auto block_count = static_cast<uint32_t>(table.size()) + 7;
    const Tensor key = MakeTensor(c, c.key_dim, block_count, 1);
    const Tensor value = MakeTensor(c, c.value_dim, block_count, 2);
    const DeviceArray<int32_t> device_table(table);
    const size_t row_bytes = (c.key_dim + c.value_dim) * DTypeBytes(c.to);
    const size_t row_stride = row_bytes + 4;
    const size_t head_stride = c.token_count * row_stride + 8;
    DeviceArray<std::byte> rows(
        std::vector<std::byte>(c.head_count * head_stride, std::byte{0x5A}));
    Finish(PackRows({.token_count = c.token_count,
                     .first_token = c.first_token,
                     .head_count = c.head_count,
                     .key_dim = c.key_dim,
                     .value_dim = c.value_dim,
                     .key = key.view,
                     .value = value.view,
                     .block_table = c.block_tokens > 0 ? device_table.data() : nullptr,
                     .block_tokens = c.block_tokens,
                     .row_dtype = c.to,
                     .rows = rows.data(),
                     .head_stride_bytes = head_stride,
                     .row_stride_bytes = row_stride},
                    stream_));
    std::vector<std::byte> expected(c.head_count * head_stride, std::byte{0x5A});
    for (uint32_t t = 0; t < c.token_count; ++t) {
      for (uint32_t head = 0; head < c.head_count; ++head) {
        std::byte* row = expected.data() + head * head_stride + t * row_stride;
        const uint32_t token = c.first_token + t;
        const auto fill = [&](const Tensor& tensor, uint32_t dim, std::byte* to) {
          int64_t element = head * tensor.view.head_stride;
          if (c.block_tokens > 0) {
            element += table[token / c.block_tokens] * tensor.view.block_stride +
                       token % c.block_tokens * tensor.view.token_stride;
          } else {
            element += token * tensor.view.token_stride;
          }
          const size_t offset = static_cast<size_t>(element) * DTypeBytes(c.from);
          ConvertElements(c.from, tensor.bytes.data() + offset, c.to, to, dim);
        };
        fill(key, c.key_dim, row);
        if (c.value_dim > 0) fill(value, c.value_dim, row + c.key_dim * DTypeBytes(c.to));
      }
    }
    ASSERT_TRUE(rows.Get() == expected)
        << "from " << DTypeName(c.from) << " to " << DTypeName(c.to) << " tokens " << c.token_count
        << " block of " << c.block_tokens << " padding " << c.padding;
  }
};

TEST_F(PackDeviceTest, MatchesPlainLoops) {
  for (const DType from : kAllDTypes) {
    for (const DType to : kAllDTypes) {
      for (const uint32_t tokens : {0u, 1u, 7u, 8u, 9u}) {
        Check({.from = from, .to = to, .token_count = tokens, .first_token = 3});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(PackDeviceTest, FollowsBlockTables) {
  for (const uint32_t block_tokens : {1u, 16u, 17u}) {
    for (const uint32_t first : {0u, 5u, 16u}) {
      Check({.from = DType::kBf16,
             .to = DType::kBf16,
             .token_count = 50,
             .first_token = first,
             .block_tokens = block_tokens});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(PackDeviceTest, TakesUnalignedTokensAndKeysAlone) {
  Check({.token_count = 5, .head_count = 3, .key_dim = 40, .value_dim = 8, .padding = 3});
  if (HasFatalFailure()) return;
  Check({.token_count = 5, .head_count = 1, .key_dim = 64, .value_dim = 0});
}

// Seats in another order than their items; rows of items that the step does not have stay.
TEST_F(PackDeviceTest, PacksTheQueryTokensOfTheStepsItems) {
  constexpr uint32_t kHeads = 2, kDim = 40;
  for (const uint32_t length : {1u, 3u, 8u}) {
    const Case c = {.from = DType::kF32, .to = DType::kBf16, .token_count = 3 * length};
    const Tensor key = MakeTensor({.from = c.from, .token_count = c.token_count}, kDim, 0, 1);
    const Tensor value = MakeTensor({.from = c.from, .token_count = c.token_count}, kDim, 0, 2);
    const DeviceArray<SeatItem> seats(
        std::vector<SeatItem>{{.item = 1, .query_begin = length},
                              {.query_begin = 2 * length},  // of an earlier step
                              {.item = 0, .query_begin = 0}});
    const size_t row_bytes = 2 * kDim * 2;
    const size_t head_stride = c.token_count * row_bytes;
    const std::vector<std::byte> before(kHeads * head_stride, std::byte{0x5A});
    DeviceArray<std::byte> rows(before);
    const DeviceArray<uint32_t> packed(std::vector<uint32_t>{0});
    Finish(PackStepRows({.shape = {.seat_capacity = 3, .kv_heads = kHeads, .query_length = length},
                         .seats = seats.data(),
                         .rows = {.key_dim = kDim,
                                  .value_dim = kDim,
                                  .key = key.view,
                                  .value = value.view,
                                  .row_dtype = c.to,
                                  .rows = rows.data(),
                                  .head_stride_bytes = head_stride,
                                  .row_stride_bytes = row_bytes},
                         .packed = packed.data()},
                        stream_));
    std::vector<std::byte> expected = before;
    for (uint32_t token = 0; token < 2 * length; ++token) {
      for (uint32_t head = 0; head < kHeads; ++head) {
        std::byte* row = expected.data() + head * head_stride + token * row_bytes;
        const size_t first = (token * kHeads + head) * kDim * sizeof(float);
        ConvertElements(c.from, key.bytes.data() + first, c.to, row, kDim);
        ConvertElements(c.from, value.bytes.data() + first, c.to, row + kDim * 2, kDim);
      }
    }
    ASSERT_TRUE(rows.Get() == expected) << length;
    EXPECT_EQ(packed.Get()[0], 1u);
  }
}

TEST_F(PackDeviceTest, NotesNumbersThatAreNotFinite) {
  constexpr uint32_t kDim = 32;
  const DeviceArray<SeatItem> seats(std::vector<SeatItem>{{.item = 0, .query_begin = 0}});
  const DeviceArray<uint32_t> packed(std::vector<uint32_t>{0});
  const auto run = [&](size_t element, float number, bool is_key) {
    std::vector<float> values(3 * kDim, 1.0f), bad = values;
    bad[element] = number;
    const DeviceArray<float> good_memory(values), bad_memory(bad);
    const auto tensor = [&](bool has_bad) {
      return PackTensor{.data = reinterpret_cast<const std::byte*>(has_bad ? bad_memory.data()
                                                                           : good_memory.data()),
                        .dtype = DType::kF32,
                        .token_stride = kDim};
    };
    DeviceArray<std::byte> rows(3 * 2 * kDim * 2);
    const DeviceArray<unsigned long long> noted(std::vector<unsigned long long>{0, 0});
    Finish(PackStepRows({.shape = {.seat_capacity = 1, .kv_heads = 1, .query_length = 3},
                         .seats = seats.data(),
                         .rows = {.key_dim = kDim,
                                  .value_dim = kDim,
                                  .key = tensor(is_key),
                                  .value = tensor(!is_key),
                                  .row_dtype = DType::kF16,
                                  .rows = rows.data(),
                                  .head_stride_bytes = 0,
                                  .row_stride_bytes = 2 * kDim * 2},
                         .packed = packed.data(),
                         .bad_key = {noted.data(), 5},
                         .bad_value = {noted.data() + 1, 6}},
                        stream_));
    return noted.Get();
  };
  using Noted = std::vector<unsigned long long>;
  const auto tagged = [](uint64_t tag, uint64_t token) {
    return (tag << kRefusedTagShift) + token + 1;
  };
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(run(0, 1.0f, true), (Noted{0, 0}));
  EXPECT_EQ(run(0, 65519.0f, true), (Noted{0, 0})) << "rounds to the largest f16";
  EXPECT_EQ(run(3 * kDim - 1, 65520.0f, true), (Noted{tagged(5, 2), 0})) << "rounds to infinity";
  EXPECT_EQ(run(kDim, -infinity, false), (Noted{0, tagged(6, 1)}));
  EXPECT_EQ(run(1, std::numeric_limits<float>::quiet_NaN(), false), (Noted{0, tagged(6, 0)}));
}

TEST_F(PackDeviceTest, RefusesWhatIsOutOfRange) {
  PackRowsArgs args;
  args.key_dim = 12;
  EXPECT_FALSE(PackRows(args, stream_).ok());
  args.key_dim = 64;
  EXPECT_FALSE(PackRows(args, stream_).ok()) << "rows overlap";
}

}  // namespace
}  // namespace pqcached::kernels::cuda
