// Offload attributes the query tokens of graphs to sequences by positions and cells.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "client/engines/llama/offload.h"

namespace pqcached::llama {
namespace {

constexpr uint32_t kCells = 128;
constexpr int32_t kRope = 40;
constexpr uint16_t kSeen = 0, kHidden = 0xfc00;

struct QueryToken {
  int32_t position;
  uint32_t written;              // its cell
  std::vector<uint32_t> before;  // cells that it sees, besides its own
};

uint64_t PrintOf(const void*, uint32_t cell) { return cell; }

class FollowTest : public testing::Test {
 protected:
  FollowTest() {
    settings_.min_tokens = 0;
    offload_ =
        std::make_unique<Offload>(settings_, &histories_, &PrintOf, nullptr, kRope,
                                  [](const std::shared_ptr<History>& history, uint32_t keep) {
                                    Histories::Shorten(history.get(), keep);
                                  });
  }

  bool Follow(const std::vector<QueryToken>& tokens) {
    std::vector<uint16_t> seen(tokens.size() * kCells, kHidden);
    std::vector<int32_t> at;
    std::vector<uint32_t> written;
    for (size_t i = 0; i < tokens.size(); ++i) {
      at.push_back(tokens[i].position);
      written.push_back(tokens[i].written);
      seen[i * kCells + tokens[i].written] = kSeen;
      for (const uint32_t cell : tokens[i].before) seen[i * kCells + cell] = kSeen;
    }
    GgmlTensor node{}, q{}, k{}, v{}, mask{}, positions{};
    q.op = kRope;
    q.src[1] = &positions;
    positions.type = kGgmlI32;
    positions.ne[0] = static_cast<int64_t>(at.size());
    positions.data = at.data();
    mask.ne[0] = kCells;
    mask.ne[3] = 1;
    mask.nb[1] = kCells * sizeof(uint16_t);
    mask.data = seen.data();
    node.src[0] = &q;
    node.src[1] = &k;
    node.src[2] = &v;
    node.src[3] = &mask;
    Attention attention;
    attention.tokens = static_cast<uint32_t>(tokens.size());
    attention.streams = 1;
    attention.cells = attention.stream_cells = kCells;
    attention.node = &node;
    const bool follows = offload_->Follow(attention, written, nullptr, nullptr);
    offload_->EndGraph();
    return follows;
  }

  Settings settings_;
  Histories histories_{kCells};
  std::unique_ptr<Offload> offload_;
};

TEST_F(FollowTest, TokensOfASequenceAreOneGroup) {
  ASSERT_TRUE(Follow({{0, 10, {}}, {1, 11, {10}}, {2, 3, {10, 11}}}));
  ASSERT_EQ(offload_->rows().size(), 1u);
  EXPECT_EQ(offload_->rows()[0].count, 3u);
  const History& history = *offload_->rows()[0].history;
  EXPECT_TRUE(history.is_ordered);
  EXPECT_EQ(history.cells, (std::vector<uint32_t>{10, 11, 3})) << "in the order of positions";
}

TEST_F(FollowTest, ATokenIsNotAttributedByTheNumberOfItsCells) {
  ASSERT_TRUE(Follow({{0, 0, {}}, {1, 1, {0}}, {2, 2, {0, 1}}}));  // P X X
  ASSERT_TRUE(Follow({{1, 11, {0}}, {2, 12, {0, 11}}}));           // P Y Y, of a copy
  // The first token is one of both sequences, and the second of the copy alone.
  ASSERT_TRUE(Follow({{3, 20, {0, 1, 2}}, {4, 21, {0, 11, 12, 20}}}));
  for (const FollowedRows& rows : offload_->rows()) EXPECT_EQ(rows.count, 1u);
}

TEST_F(FollowTest, ShiftedPositionsBeginANewHistory) {
  ASSERT_TRUE(Follow({{0, 0, {}}, {1, 1, {0}}, {2, 2, {0, 1}}}));
  const auto before = offload_->rows()[0].history;
  ASSERT_TRUE(Follow({{9, 3, {0, 1, 2}}}));
  ASSERT_EQ(offload_->rows().size(), 1u);
  EXPECT_EQ(before->size(), 0u) << "its rows are not those of the shifted positions";
  EXPECT_FALSE(offload_->rows()[0].history->is_ordered);
}

TEST_F(FollowTest, WithoutPositionsNothingIsFollowed) {
  GgmlTensor node{}, q{};
  node.src[0] = &q;
  Attention attention;
  attention.tokens = attention.streams = 1;
  attention.node = &node;
  EXPECT_TRUE(offload_->Follow(attention, std::vector<uint32_t>{0}, nullptr, nullptr));
  EXPECT_FALSE(offload_->is_usable());
}

}  // namespace
}  // namespace pqcached::llama
