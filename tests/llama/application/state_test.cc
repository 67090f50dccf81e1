// States of sequences in llama.cpp's format: places of their rows, and states that are refused.
#include "client/engines/llama/application/state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace pqcached::llama {
namespace {

using Bytes = std::vector<std::byte>;

constexpr int32_t kF16 = 1;
constexpr size_t kCellsAt = 12;      // number of cells of a state with one stream
constexpr size_t kFirstCellAt = 16;  // position, sequences, sequence

KvShape SmallShape() {
  KvShape shape;
  shape.layers = 2;
  shape.kv_heads = shape.query_heads = 1;
  shape.key_dim = 32;
  shape.value_dim = 40;
  shape.type = kF16;
  shape.element_bytes = 2;
  return shape;
}

// The rows are 0.
Bytes StateOf(uint32_t cells, uint32_t streams = 1) {
  Bytes state(StateBytes(SmallShape(), streams, cells));
  StateRows rows;
  WriteState(SmallShape(), streams, cells, state, &rows);
  return state;
}

template <class Number>
Bytes With(Bytes state, size_t at, Number number) {
  std::memcpy(state.data() + at, &number, sizeof(number));
  return state;
}

TEST(LlamaStateTest, RowsAreWhereTheyWereWritten) {
  for (const uint32_t streams : {1u, 4u}) {
    for (const uint32_t cells : {1u, 5u, 128u}) {
      Bytes state(StateBytes(SmallShape(), streams, cells));
      StateRows written, found;
      WriteState(SmallShape(), streams, cells, state, &written);
      const StateResult result = FindRows(state, SmallShape(), &found);
      ASSERT_EQ(result.status, PQC_OK) << result.message;
      EXPECT_EQ(found.cells, cells);
      EXPECT_EQ(found.keys, written.keys);
      EXPECT_EQ(found.values, written.values);
      EXPECT_TRUE(found.cell_of_position.empty());
      EXPECT_EQ(found.keys[1] - found.keys[0], cells * 64 + 12);
      EXPECT_EQ(found.values[1] + cells * 80 + 4 * (streams - 1), state.size());
    }
  }
}

TEST(LlamaStateTest, CellsMayHaveAnyOrder) {
  Bytes state = StateOf(3);
  for (int32_t cell = 0; cell < 3; ++cell) {
    state = With(state, kFirstCellAt + 12 * static_cast<size_t>(cell), (cell + 2) % 3);
  }
  StateRows rows;
  ASSERT_EQ(FindRows(state, SmallShape(), &rows).status, PQC_OK);
  EXPECT_EQ(rows.cell_of_position, (std::vector<int64_t>{1, 2, 0}));
}

TEST(LlamaStateTest, StreamsOfAnEmptySequence) {
  uint32_t streams = 0;
  const Bytes state = StateOf(1, 4);
  EXPECT_EQ(CountStreams(state, &streams).status, PQC_UNIMPLEMENTED);  // it has a cell
  Bytes empty(state.begin(), state.begin() + 12);
  empty.resize(12 + 4 * 4);
  ASSERT_EQ(CountStreams(empty, &streams).status, PQC_OK);
  EXPECT_EQ(streams, 4u);
  empty.resize(empty.size() + 4);  // as caches of several parts have it
  EXPECT_EQ(CountStreams(empty, &streams).status, PQC_UNIMPLEMENTED);
}

TEST(LlamaStateTest, RefusalsNameTheReason) {
  const Bytes state = StateOf(3);
  const size_t layers_at = kFirstCellAt + 3 * 12;  // whether V is transposed, layers, first layer
  const std::pair<Bytes, std::string> cases[] = {
      {With(state, 0, uint32_t{7}), "its magic number"},
      {With(state, 8, uint32_t{0}), "its streams"},
      {With(state, 8, uint32_t{257}), "its streams"},
      {With(state, kCellsAt, uint32_t{0xffffffff}), "its cells"},
      {With(state, kFirstCellAt + 4, uint32_t{2}), "its cells"},
      {With(state, kFirstCellAt, int32_t{-1}), "position -1 is not one of 0 to n - 1"},
      {With(state, kFirstCellAt, int32_t{3}), "position 3 is not one of 0 to n - 1"},
      {With(state, kFirstCellAt, int32_t{1}), "position 1 is not one of 0 to n - 1"},
      {With(state, layers_at, uint32_t{1}), "V is transposed"},
      {With(state, layers_at + 4, uint32_t{3}), "3 layers have a KV cache, and the model has 2"},
      {With(state, layers_at + 8, int32_t{30}), "K of layer 0 is bf16, and the options say f16"},
      {With(state, layers_at + 8, int32_t{8}), "K of layer 0 has type 8 of ggml"},
      {With(state, layers_at + 12, uint64_t{128}), "K of layer 0 has rows of 128 bytes"},
      {With(state, layers_at + 12, ~uint64_t{0}), "K of layer 0 has rows of"},
  };
  for (const auto& [wrong, reason] : cases) {
    StateRows rows;
    const StateResult result = FindRows(wrong, SmallShape(), &rows);
    EXPECT_NE(result.status, PQC_OK) << reason;
    EXPECT_NE(result.message.find(reason), std::string::npos) << result.message;
  }
}

// A vector of exactly the state's size: a sanitizer sees what reads behind it.
TEST(LlamaStateTest, OtherLengthsAreRefused) {
  const Bytes state = StateOf(3, 2);
  for (size_t bytes = 0; bytes < state.size(); ++bytes) {
    const Bytes cut(state.begin(), state.begin() + static_cast<ptrdiff_t>(bytes));
    StateRows rows;
    EXPECT_NE(FindRows(cut, SmallShape(), &rows).status, PQC_OK) << bytes;
  }
  Bytes longer = state;
  longer.push_back({});
  StateRows rows;
  EXPECT_NE(FindRows(longer, SmallShape(), &rows).status, PQC_OK);
}

TEST(LlamaStateTest, ChangedBytesAreNeverReadOutside) {
  const Bytes state = StateOf(5, 2);
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    Bytes changed = state;
    for (uint32_t changes = 1 + static_cast<uint32_t>(random()) % 3; changes > 0; --changes) {
      changed[random() % std::min<size_t>(changed.size(), 120)] =
          static_cast<std::byte>(random() % 256);
    }
    StateRows rows;
    if (FindRows(changed, SmallShape(), &rows).status != PQC_OK) continue;
    for (uint32_t layer = 0; layer < 2; ++layer) {
      ASSERT_LE(rows.keys[layer] + rows.cells * SmallShape().KeyRowBytes(), state.size());
      ASSERT_LE(rows.values[layer] + rows.cells * SmallShape().ValueRowBytes(), state.size());
    }
  }
}

}  // namespace
}  // namespace pqcached::llama
