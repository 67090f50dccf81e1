// Attention of recorded graphs of several architectures (graphs/, recorded by graphs.cc): which
// nodes are taken, and why others are not; which cells their tokens see, and which sequences
// continue. architectures_test.py compares the recordings with what llama.cpp makes.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "client/engines/llama/attention.h"
#include "client/engines/llama/histories.h"

namespace pqcached::llama {
namespace {

constexpr uint16_t kHiddenCell = 0xfc00;

struct Sees {
  uint32_t stream;
  uint32_t token;
  std::vector<uint32_t> cells;
};

// A recorded node with its operands. They have made-up addresses, which nothing reads, except for
// the mask.
struct RecordedAttention {
  GgmlTensor node{};
  std::map<int, GgmlTensor> operands;
  std::map<int, std::string> roots;  // names
  std::vector<Sees> sees;
  std::vector<uint16_t> mask;
};

struct RecordedRows {
  int index_type = 0;
  std::vector<uint32_t> cells;
};

struct RecordedGraph {
  std::map<std::string, RecordedRows> rows;  // by the tensor that they are written to
  std::vector<std::unique_ptr<RecordedAttention>> attention;
};

std::vector<uint32_t> ReadCells(std::istringstream& words) {
  std::vector<uint32_t> cells;
  for (std::string run; words >> run;) {
    const auto last = static_cast<uint32_t>(std::stoul(run.substr(run.find('-') + 1)));
    for (auto cell = static_cast<uint32_t>(std::stoul(run)); cell <= last; ++cell) {
      cells.push_back(cell);
    }
  }
  return cells;
}

class Recording {
 public:
  explicit Recording(const std::string& name) {
    const char* const folder = std::getenv("PQCACHED_GRAPHS");
    std::ifstream file(std::string(folder == nullptr ? "tests/llama/graphs" : folder) + "/" + name +
                       ".txt");
    for (std::string line; std::getline(file, line);) Read(line);
    for (auto& [graph_name, graph] : graphs_) {
      for (const auto& attention : graph.attention) Complete(attention.get());
    }
  }

  const std::map<std::string, RecordedGraph>& graphs() const { return graphs_; }

 private:
  void Read(const std::string& line) {
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    if (kind == "graph") {
      std::string name;
      words >> name;
      graph_ = &graphs_[name];
    } else if (kind == "rows") {
      std::string tensor;
      words >> tensor;
      RecordedRows& rows = graph_->rows[tensor];
      words >> rows.index_type;
      rows.cells = ReadCells(words);
    } else if (kind == "attention") {
      graph_->attention.push_back(std::make_unique<RecordedAttention>());
    } else if (kind == "parameters") {
      for (int32_t& word : last().node.op_params) {
        uint32_t bits = 0;
        words >> std::hex >> bits;
        word = static_cast<int32_t>(bits);
      }
    } else if (kind == "operand") {
      ReadOperand(words);
    } else if (kind == "sees") {
      Sees sees{};
      words >> sees.stream >> sees.token;
      sees.cells = ReadCells(words);
      last().sees.push_back(sees);
    } else {
      ADD_FAILURE() << "unknown line: " << line;
    }
  }

  void ReadOperand(std::istringstream& words) {
    int index = 0, type = 0;
    words >> index >> type;
    GgmlTensor& tensor = index < 0 ? last().node : last().operands[index];
    tensor.type = static_cast<GgmlType>(type);
    for (int64_t& count : tensor.ne) words >> count;
    for (size_t& stride : tensor.nb) words >> stride;
    std::string root;
    size_t offset = 0;
    words >> root >> offset;
    EXPECT_TRUE(words) << "an operand without all of its words";
    if (index < 0) return;
    const auto [found, is_new] = roots_.try_emplace(root);
    if (is_new) found->second.data = reinterpret_cast<void*>(uintptr_t{roots_.size()} << 40);
    tensor.data = static_cast<std::byte*>(found->second.data) + offset;
    tensor.view_src = &found->second;
    last().roots[index] = root;
  }

  // Sets what depends on all lines of a node: its sources, and the mask's values.
  static void Complete(RecordedAttention* recorded) {
    for (auto& [index, operand] : recorded->operands) recorded->node.src[index] = &operand;
    GgmlTensor& mask = recorded->operands.at(3);
    recorded->mask.assign(mask.nb[3] / 2 * static_cast<size_t>(mask.ne[3]), kHiddenCell);
    mask.data = recorded->mask.data();
    for (const Sees& sees : recorded->sees) {
      for (const uint32_t cell : sees.cells) {
        recorded->mask[(sees.stream * mask.nb[3] + sees.token * mask.nb[1]) / 2 + cell] = 0;
      }
    }
  }

  RecordedAttention& last() { return *graph_->attention.back(); }

  std::map<std::string, RecordedGraph> graphs_;
  std::map<std::string, GgmlTensor> roots_;
  RecordedGraph* graph_ = nullptr;
};

// What is expected of an architecture.
struct Expected {
  const char* name = "";
  size_t nodes = 0;          // of attention, in each graph
  const char* refusal = "";  // of all nodes; empty: all are taken
  uint32_t group_size = 0;
  bool has_sinks = false;
  uint32_t window = 0;      // tokens that nodes with a window see
  size_t window_nodes = 0;  // of `nodes`
  bool has_cache = true;    // K and V are rows of the cache
};

const Expected kExpected[] = {
    {.name = "llama", .nodes = 2, .group_size = 2},
    {.name = "qwen3", .nodes = 2, .group_size = 2},
    {.name = "gemma3", .nodes = 6, .group_size = 2, .window = 64, .window_nodes = 5},
    {.name = "gpt-oss",
     .nodes = 2,
     .group_size = 2,
     .has_sinks = true,
     .window = 64,
     .window_nodes = 1},
    {.name = "phi3", .nodes = 2, .group_size = 2},
    {.name = "deepseek2", .nodes = 2, .refusal = "V that is a part of K (MLA)"},
    {.name = "falcon-h1", .nodes = 2, .group_size = 2},
    {.name = "bloom", .nodes = 2, .refusal = "ALiBi"},
    // Attention to the encoder's output. The decoder's own has a bias, and is no such node.
    {.name = "t5", .nodes = 2, .group_size = 1, .has_cache = false},
};

class LlamaGraphsTest : public testing::TestWithParam<Expected> {};

INSTANTIATE_TEST_SUITE_P(Architectures, LlamaGraphsTest, testing::ValuesIn(kExpected),
                         [](const auto& each) {
                           std::string name = each.param.name;
                           std::erase(name, '-');
                           return name;
                         });

TEST_P(LlamaGraphsTest, NodesAreTakenOrRefused) {
  const Recording recording(GetParam().name);
  ASSERT_EQ(recording.graphs().size(), 3u);
  for (const auto& [name, graph] : recording.graphs()) {
    EXPECT_EQ(graph.attention.size(), GetParam().nodes) << name;
    for (const auto& each : graph.attention) {
      Attention attention;
      const char* const refusal = Describe(each->node, &attention);
      EXPECT_STREQ(refusal == nullptr ? "" : refusal, GetParam().refusal) << name;
      if (refusal != nullptr) continue;
      EXPECT_EQ(attention.tokens, name == "prefill" ? 48u : name == "decode" ? 1u : 5u);
      EXPECT_LE(attention.tokens, kMostTokens);
      EXPECT_EQ(attention.key_dim, 32u);
      EXPECT_EQ(attention.value_dim, 32u);
      EXPECT_EQ(attention.group_size, GetParam().group_size);
      EXPECT_EQ(each->node.src[4] != nullptr, GetParam().has_sinks);
      const bool is_decoded_twice = name == "decode" && GetParam().has_cache;
      EXPECT_EQ(attention.streams, is_decoded_twice ? 2u : 1u) << name;
    }
  }
}

// Selections need to know the rows that a graph writes, and their cells.
TEST_P(LlamaGraphsTest, RowsOfTakenNodesAreSeenWhenTheyAreWritten) {
  const Recording recording(GetParam().name);
  for (const auto& [name, graph] : recording.graphs()) {
    for (const auto& each : graph.attention) {
      for (const int operand : {1, 2}) {
        const auto found = graph.rows.find(each->roots.at(operand));
        EXPECT_EQ(found != graph.rows.end(), GetParam().has_cache) << each->roots.at(operand);
        if (found == graph.rows.end()) continue;
        EXPECT_EQ(found->second.index_type, kGgmlI64);
        EXPECT_EQ(found->second.cells.size(), name == "prefill" ? 48u : name == "decode" ? 2u : 5u);
      }
    }
  }
}

TEST_P(LlamaGraphsTest, TokensSeeTheCellsOfTheMask) {
  if (*GetParam().refusal != '\0') return;
  const Recording recording(GetParam().name);
  for (const auto& [name, graph] : recording.graphs()) {
    size_t window_nodes = 0;
    for (const auto& each : graph.attention) {
      Attention attention;
      ASSERT_EQ(Describe(each->node, &attention), nullptr);
      ASSERT_FALSE(each->sees.empty());
      window_nodes += each->sees.back().cells.size() == GetParam().window ? 1 : 0;
      for (const Sees& sees : each->sees) {
        std::vector<CellRun> runs;
        ASSERT_TRUE(ReadMask(attention, sees.stream, {}, &runs));
        std::vector<uint32_t> cells;
        for (const CellRun& run : runs) {
          if ((run.seen_by >> sees.token & 1) == 0) continue;
          for (uint32_t cell = run.begin; cell < run.end; ++cell) cells.push_back(cell);
        }
        EXPECT_EQ(cells, sees.cells) << name;
      }
    }
    EXPECT_EQ(window_nodes, GetParam().window_nodes) << name;
  }
}

// The tokens before those of a graph, as the layers without a window see them.
class Sequences {
 public:
  explicit Sequences(const Attention& attention)
      : histories_(attention.stream_cells * 2), seen_(attention.stream_cells * 2) {}

  std::vector<std::shared_ptr<History>> Find(const RecordedAttention& recorded,
                                             const std::vector<uint32_t>& written) {
    Attention attention;
    EXPECT_EQ(Describe(recorded.node, &attention), nullptr);
    const auto shorten = [](const auto& history, uint32_t keep) {
      Histories::Shorten(history.get(), keep);
    };
    histories_.Write(written, shorten);
    std::vector<std::shared_ptr<History>> found;
    for (const Sees& sees : recorded.sees) {
      if (sees.token != 0) continue;
      seen_.Clear();
      for (const uint32_t cell : sees.cells) {
        seen_.Add(attention.first_cell + sees.stream * attention.stream_cells + cell);
      }
      for (const uint32_t cell : written) seen_.Remove(cell);
      found.push_back(histories_.Continue(seen_, found, &Print, nullptr, shorten));
    }
    return found;
  }

 private:
  static uint64_t Print(const void*, uint32_t cell) { return cell; }

  Histories histories_;
  CellSet seen_;
};

TEST_P(LlamaGraphsTest, SequencesContinue) {
  if (*GetParam().refusal != '\0' || !GetParam().has_cache) return;  // there are no rows to store
  const Recording recording(GetParam().name);
  // The last layer has no window in any of these models.
  const auto last_of = [&](const char* graph) -> const RecordedAttention& {
    return *recording.graphs().at(graph).attention.back();
  };
  Attention attention;
  ASSERT_EQ(Describe(last_of("decode").node, &attention), nullptr);
  Sequences sequences(attention);
  const auto find = [&](const char* graph) {
    const RecordedAttention& last = last_of(graph);
    return sequences.Find(last, recording.graphs().at(graph).rows.at(last.roots.at(1)).cells);
  };
  const auto prefilled = find("prefill");
  ASSERT_EQ(prefilled.size(), 1u);
  EXPECT_EQ(prefilled[0]->size(), 240u) << "tokens before the last batch";
  const auto decoded = find("decode");
  ASSERT_EQ(decoded.size(), 2u);
  EXPECT_EQ(decoded[0], prefilled[0]);
  EXPECT_EQ(decoded[0]->size(), 288u);
  EXPECT_NE(decoded[1], decoded[0]);
  EXPECT_EQ(decoded[1]->size(), 144u);
  const auto drafted = find("draft");
  ASSERT_EQ(drafted.size(), 1u);
  EXPECT_EQ(drafted[0], decoded[0]);
  EXPECT_EQ(drafted[0]->size(), 288u + 24u);
}

}  // namespace
}  // namespace pqcached::llama
