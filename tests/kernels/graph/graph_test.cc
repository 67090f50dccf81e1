// The layout of graphs: what CheckGraph accepts, and the name of each thing that it refuses.
#include "kernels/graph/graph.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels/graph/graph_case.h"

namespace pqcached::kernels {
namespace {

constexpr GraphShape kShape{.node_count = 40, .max_degree = 6};

class GraphTest : public testing::Test {
 protected:
  GraphTest() : memory_(GraphBytes(kShape)) {
    FormatGraph(kShape, memory_.span());
    header()->entry_count = 1;
  }

  GraphHeader* header() const { return reinterpret_cast<GraphHeader*>(memory_.span().data()); }
  uint32_t* Row(uint32_t node) const {
    return reinterpret_cast<uint32_t*>(memory_.span().data() + sizeof(GraphHeader) +
                                       node * GraphRowBytes(kShape.max_degree));
  }
  std::string Wrong(const GraphShape& shape = kShape) const {
    GraphView view;
    const char* wrong = CheckGraph(memory_.span(), shape, &view);
    return wrong == nullptr ? "" : wrong;
  }

  const GraphMemory memory_;
};

TEST_F(GraphTest, AcceptsWhatFormatWrites) {
  EXPECT_EQ(Wrong(), "");
  for (const GraphShape& shape : {GraphShape{0, 1}, GraphShape{1, kMaxGraphDegree}}) {
    const GraphMemory memory(GraphBytes(shape));
    FormatGraph(shape, memory.span());
    reinterpret_cast<GraphHeader*>(memory.span().data())->entry_count = shape.node_count;
    GraphView view;
    EXPECT_EQ(CheckGraph(memory.span(), shape, &view), nullptr);
    EXPECT_EQ(view.shape.node_count, shape.node_count);
  }
}

TEST_F(GraphTest, NamesTheWrongPartOfTheHeader) {
  const GraphHeader good = *header();
  const auto with = [&](uint32_t GraphHeader::*field, uint32_t value) {
    *header() = good;
    header()->*field = value;
    return Wrong();
  };
  EXPECT_EQ(with(&GraphHeader::format, 0), "format");
  EXPECT_EQ(with(&GraphHeader::node_count, 39), "node_count");
  EXPECT_EQ(with(&GraphHeader::max_degree, 7), "max_degree");
  EXPECT_EQ(with(&GraphHeader::entry_count, 0), "entry_count");
  EXPECT_EQ(with(&GraphHeader::entry_count, kMaxGraphEntries + 1), "entry_count");
  *header() = good;
  header()->entries[0] = 40;
  EXPECT_EQ(Wrong(), "entries");
  header()->entries[0] = 39;
  EXPECT_EQ(Wrong(), "");
}

TEST_F(GraphTest, NamesRowsThatAreOutOfRange) {
  Row(39)[0] = 7;
  EXPECT_EQ(Wrong(), "degree");
  Row(39)[0] = 6;
  EXPECT_EQ(Wrong(), "");
  Row(39)[6] = 40;
  EXPECT_EQ(Wrong(), "neighbour");
  Row(39)[6] = 39;
  EXPECT_EQ(Wrong(), "");
}

TEST_F(GraphTest, RefusesShapesThatDoNotFitTheMemory) {
  EXPECT_EQ(Wrong({.node_count = 41, .max_degree = 6}), "size");
  EXPECT_EQ(Wrong({.node_count = 40, .max_degree = 16}), "size");
  EXPECT_EQ(Wrong({.node_count = 40, .max_degree = 0}), "shape");
  EXPECT_EQ(Wrong({.node_count = 40, .max_degree = kMaxGraphDegree + 1}), "shape");
  EXPECT_EQ(Wrong({.node_count = kMaxGraphNodes + 1, .max_degree = 6}), "shape");
  GraphView view;
  EXPECT_STREQ(CheckGraph(memory_.span().subspan(4), {.node_count = 1, .max_degree = 6}, &view),
               "alignment");
}

TEST_F(GraphTest, RefusesRandomBytes) {
  std::mt19937_64 random(3);
  const GraphHeader good = *header();
  for (uint32_t round = 0; round < 1000; ++round) {
    for (std::byte& byte : memory_.span()) byte = static_cast<std::byte>(random());
    EXPECT_NE(Wrong(), "");
    // With a good header, one bad row is enough.
    *header() = good;
    EXPECT_NE(Wrong(), "");
  }
}

}  // namespace
}  // namespace pqcached::kernels
