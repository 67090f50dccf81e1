// Searches of graphs: exact where no limit ends them, and within bounds whatever the memory holds.
#include "kernels/graph/search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/kernels/graph/graph_case.h"

namespace pqcached::kernels {
namespace {

constexpr GraphBuildOptions kOptions{
    .list_size = 30, .degree = 8, .connect_beam = 16, .entry_count = 4};

struct Outcome {
  std::vector<uint32_t> nodes;
  std::vector<float> scores;
  uint32_t scanned = 0;
  bool operator==(const Outcome&) const = default;
};

// A graph in memory of its exact size, and its searches.
class Searcher {
 public:
  explicit Searcher(const GraphCase& keys, const GraphBuildOptions& options = kOptions)
      : keys_(keys),
        shape_(GraphShapeOf(keys.Args(options, {}).size)),
        memory_(GraphBytes(shape_)) {
    const std::vector<std::byte> built = keys.Build({}, options);
    std::copy(built.begin(), built.end(), memory_.span().begin());
    EXPECT_EQ(CheckGraph(memory_.span(), shape_, &view), nullptr);
  }

  std::span<std::byte> memory() const { return memory_.span(); }
  const GraphShape& shape() const { return shape_; }
  uint32_t* Row(uint32_t node) const { return const_cast<uint32_t*>(view.Row(node)); }

  GraphPart Part() const { return {.graph = view, .rows = keys_.rows()}; }

  // Searches the nodes in `range`, [begin, end).
  Outcome Search(GraphSearchArgs args, uint32_t k, const Exec& exec = {},
                 std::pair<uint32_t, uint32_t> range = {0, kMaxGraphNodes}) const {
    GraphPart part = Part();
    std::tie(part.begin, part.end) = range;
    args.parts = {&part, 1};
    return SearchParts(args, k, exec);
  }

  // Searches args.parts, whose keys are like those of this one.
  Outcome SearchParts(GraphSearchArgs args, uint32_t k, const Exec& exec = {}) const {
    uint32_t node_count = 0;
    for (const GraphPart& part : args.parts) node_count += part.graph.shape.node_count;
    Outcome outcome{.nodes = std::vector<uint32_t>(k), .scores = std::vector<float>(k)};
    const GraphMemory scratch(GraphSearchScratchBytes(node_count, keys_.size().dim, args.beam_size,
                                                      k, args.parts.size()));
    args.dtype = keys_.size().dtype;
    args.key_dim = keys_.size().dim;
    args.row_stride_bytes = keys_.row_stride_bytes();
    args.nodes = outcome.nodes;
    args.scores = outcome.scores;
    args.scratch = scratch.span();
    const GraphSearchResult result = SearchGraph(exec, args);
    EXPECT_LE(result.found_count, k);
    outcome.nodes.resize(result.found_count);
    outcome.scores.resize(result.found_count);
    outcome.scanned = result.scanned_count;
    return outcome;
  }

  GraphView view;

 private:
  const GraphCase& keys_;
  const GraphShape shape_;
  const GraphMemory memory_;
};

Outcome Exact(const GraphCase& keys, std::span<const float> query, uint32_t begin, uint32_t end,
              uint32_t k) {
  std::vector<uint32_t> nodes(std::min(end, keys.size().keys) - begin);
  std::iota(nodes.begin(), nodes.end(), begin);
  std::sort(nodes.begin(), nodes.end(), [&](uint32_t a, uint32_t b) {
    const float left = keys.Score(query, a), right = keys.Score(query, b);
    return left > right || (left == right && a < b);
  });
  nodes.resize(std::min<size_t>(nodes.size(), k));
  Outcome outcome{.nodes = nodes, .scores = {}, .scanned = keys.size().keys};
  for (uint32_t node : nodes) outcome.scores.push_back(keys.Score(query, node));
  return outcome;
}

TEST(GraphSearchTest, IsExactWithABeamOfAllKeys) {
  for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
    for (const uint32_t keys : {0u, 1u, 2u, 15u, 16u, 17u, 63u, 64u, 65u, 333u}) {
      const GraphCase data({.keys = keys, .samples = 20, .dim = 40, .dtype = dtype, .seed = keys});
      const Searcher searcher(data);
      for (const uint32_t k : {0u, 1u, 10u, 400u}) {
        const std::vector<float> query = data.Query(k);
        const Outcome expected = Exact(data, query, 0, keys, k);
        for (const Level level : AvailableLevels()) {
          EXPECT_EQ(searcher.Search({.query = query, .beam_size = keys}, k, Exec{level}), expected)
              << LevelName(level) << " " << keys << " keys, k " << k;
        }
      }
    }
  }
}

TEST(GraphSearchTest, ReturnsOnlyTheRangeAndGoesThroughTheRest) {
  const GraphCase data({.keys = 300, .samples = 40});
  const Searcher searcher(data);
  const std::vector<float> query = data.Query(1);
  for (const auto& [begin, end] : std::vector<std::pair<uint32_t, uint32_t>>{
           {0, 300}, {0, 299}, {1, 300}, {20, 250}, {299, 300}, {7, 7}, {20, kMaxGraphNodes}}) {
    const Outcome expected = Exact(data, query, begin, end, 25);
    EXPECT_EQ(searcher.Search({.query = query, .beam_size = 300}, 25, {}, {begin, end}), expected)
        << begin << " to " << end;
  }
}

// The graphs of several segments; the second one has no nodes.
TEST(GraphSearchTest, GraphsAreSearchedAsOne) {
  std::vector<std::unique_ptr<GraphCase>> cases;
  std::vector<std::unique_ptr<Searcher>> searchers;
  std::vector<GraphPart> parts;
  for (const uint32_t keys : {130u, 0u, 300u, 65u}) {
    cases.push_back(std::make_unique<GraphCase>(
        GraphCase::Size{.keys = keys, .samples = 30, .seed = 1 + keys}));
    searchers.push_back(std::make_unique<Searcher>(*cases.back()));
    parts.push_back(searchers.back()->Part());
  }
  parts[0].begin = 100;
  parts[2].end = 200;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const std::vector<float> query = cases[0]->Query(seed);
    std::vector<std::pair<float, uint32_t>> best;  // less the score, and the node
    uint32_t first = 0;
    for (size_t part = 0; part < parts.size(); ++part) {
      const uint32_t end = std::min(parts[part].end, cases[part]->size().keys);
      for (uint32_t key = parts[part].begin; key < end; ++key) {
        best.emplace_back(-cases[part]->Score(query, key), first + key);
      }
      first += cases[part]->size().keys;
    }
    std::sort(best.begin(), best.end());
    const Outcome found =
        searchers[0]->SearchParts({.parts = parts, .query = query, .beam_size = 495}, 40);
    EXPECT_EQ(found.scanned, 495u);
    ASSERT_EQ(found.nodes.size(), 40u);
    for (size_t i = 0; i < 40; ++i) {
      EXPECT_EQ(found.nodes[i], best[i].second);
      EXPECT_EQ(found.scores[i], -best[i].first);
    }
    // A seed in each graph, and one behind the last node.
    const std::vector<uint32_t> seeds = {129, 130, 429, 430, 494, 495};
    EXPECT_EQ(
        searchers[0]
            ->SearchParts(
                {.parts = parts, .query = query, .beam_size = 495, .scan_limit = 5, .seeds = seeds},
                5)
            .scanned,
        5u);
  }
}

// A graph whose keys are all worse than those of another costs its entries alone.
TEST(GraphSearchTest, AGraphWithoutGoodKeysIsLeft) {
  const GraphCase good({.keys = 1000, .samples = 60});
  GraphCase bad({.keys = 1000, .samples = 60});
  const Searcher searcher(good), worse(bad);
  const std::vector<float> query = good.Query(3);
  for (uint32_t key = 0; key < 1000; ++key) {
    for (uint32_t i = 0; i < bad.size().dim; ++i) {
      StoreElement(DType::kF32, const_cast<std::byte*>(bad.rows()),
                   key * bad.row_stride_bytes() / sizeof(float) + i, query[i] > 0 ? -9e3f : 9e3f);
    }
  }
  const uint32_t alone = searcher.Search({.query = query, .beam_size = 20}, 10).scanned;
  const GraphPart parts[] = {searcher.Part(), worse.Part()};
  const Outcome both = searcher.SearchParts({.parts = parts, .query = query, .beam_size = 20}, 10);
  EXPECT_LE(both.scanned, alone + kOptions.entry_count);
}

TEST(GraphSearchTest, AllInstructionSetsWalkAlike) {
  for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
    const GraphCase data({.keys = 1000, .samples = 100, .dim = 72, .dtype = dtype});
    const Searcher searcher(data);
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const std::vector<float> query = data.Query(seed);
      const GraphSearchArgs args{.query = query, .beam_size = 20, .scan_limit = 150};
      const Outcome expected = searcher.Search(args, 20, Exec{Level::kReference});
      for (const Level level : AvailableLevels()) {
        EXPECT_EQ(searcher.Search(args, 20, Exec{level}), expected) << LevelName(level);
      }
    }
  }
}

TEST(GraphSearchTest, ScoresNoMoreKeysThanAllowedAndScalesThem) {
  const GraphCase data({.keys = 600, .samples = 60});
  const Searcher searcher(data);
  const std::vector<float> query = data.Query(3);
  for (const uint32_t limit : {1u, 2u, 15u, 16u, 17u, 100u, 599u, 600u, 9999u}) {
    const Outcome found =
        searcher.Search({.scale = 0.5f, .query = query, .beam_size = 600, .scan_limit = limit}, 10);
    EXPECT_LE(found.scanned, limit);
    EXPECT_EQ(found.scanned, std::min(limit, 600u));
    EXPECT_EQ(found.nodes.size(), std::min(limit, 10u));
    for (size_t i = 0; i < found.nodes.size(); ++i) {
      EXPECT_EQ(found.scores[i], 0.5f * data.Score(query, found.nodes[i]));
    }
  }
}

TEST(GraphSearchTest, FindsMostOfTheBestAmongFewKeys) {
  const GraphCase data({.keys = 2000, .samples = 400});
  const Searcher searcher(data, {.list_size = 50, .degree = 16});
  double hits = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const std::vector<float> query = data.Query(seed);
    const Outcome found = searcher.Search({.query = query, .beam_size = 64, .scan_limit = 300}, 10);
    const Outcome expected = Exact(data, query, 0, 2000, 10);
    const std::set<uint32_t> nodes(found.nodes.begin(), found.nodes.end());
    for (uint32_t node : expected.nodes) hits += static_cast<double>(nodes.count(node));
  }
  EXPECT_GE(hits / 500, 0.9);
}

TEST(GraphSearchTest, PatienceEndsEarlyAndSeedsAreScoredFirst) {
  const GraphCase data({.keys = 2000, .samples = 200});
  const Searcher searcher(data);
  const std::vector<float> query = data.Query(5);
  const Outcome whole = searcher.Search({.query = query, .beam_size = 200}, 10);
  const Outcome hasty = searcher.Search({.query = query, .beam_size = 200, .patience = 4}, 10);
  EXPECT_LT(hasty.scanned, whole.scanned);
  const Outcome best = Exact(data, query, 0, 2000, 10);
  std::vector<uint32_t> seeds = best.nodes;
  seeds.push_back(2000);
  seeds.push_back(~0u);
  seeds.push_back(seeds[0]);
  const Outcome seeded =
      searcher.Search({.query = query, .beam_size = 200, .scan_limit = 10, .seeds = seeds}, 10);
  EXPECT_EQ(seeded.nodes, best.nodes);
  EXPECT_EQ(seeded.scanned, 10u);
  // Without entries, an empty list of seeds leads nowhere.
  EXPECT_EQ(searcher.Search({.query = query, .entry_limit = 0}, 10).scanned, 0u);
}

TEST(GraphSearchTest, ScoresThatAreNotNumbersComeLast) {
  GraphCase data({.keys = 100, .samples = 20});
  const Searcher searcher(data);
  const std::vector<float> query = data.Query(1);
  for (uint32_t key = 0; key < 100; key += 2) {
    StoreElement(DType::kF32, const_cast<std::byte*>(data.rows()),
                 key * data.row_stride_bytes() / sizeof(float), NAN);
  }
  const Outcome found = searcher.Search({.query = query, .beam_size = 100}, 100);
  ASSERT_EQ(found.nodes.size(), 100u);
  for (size_t i = 0; i < 100; ++i) EXPECT_EQ(found.nodes[i] % 2, i < 50 ? 1u : 0u);
  EXPECT_EQ(found.scores[99], -INFINITY);
}

// The memory of a graph that a reader has checked, changed afterwards.
TEST(GraphSearchTest, EndsInsideTheRowsWhateverTheMemoryHolds) {
  const GraphCase data({.keys = 500, .samples = 50});
  const std::vector<float> query = data.Query(1);
  const Searcher searcher(data);
  const std::span<std::byte> memory = searcher.memory();
  const std::vector<std::byte> good(memory.begin(), memory.end());
  std::mt19937_64 random(7);
  for (uint32_t round = 0; round < 200; ++round) {
    std::copy(good.begin(), good.end(), memory.begin());
    if (round % 2 == 0) {
      for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
    } else {
      for (uint32_t i = 0; i < 200; ++i) {
        const size_t at = random() % (memory.size() / 4) * 4;
        const auto value = static_cast<uint32_t>(random() >> (random() % 64));
        std::memcpy(memory.data() + at, &value, sizeof(value));
      }
    }
    const Outcome found = searcher.Search({.query = query, .beam_size = 64}, 64);
    EXPECT_LE(found.scanned, 500u);
    const std::set<uint32_t> nodes(found.nodes.begin(), found.nodes.end());
    EXPECT_EQ(nodes.size(), found.nodes.size()) << "a node was returned twice";
    for (uint32_t node : nodes) EXPECT_LT(node, 500u);
  }
}

TEST(GraphSearchTest, EndsInGraphsThatPassTheCheckAndAreCycles) {
  const GraphCase data({.keys = 400, .samples = 30});
  const std::vector<float> query = data.Query(1);
  const Searcher searcher(data);
  const uint32_t degree = searcher.shape().max_degree;
  const auto search = [&] {
    GraphView view;
    EXPECT_EQ(CheckGraph(searcher.memory(), searcher.shape(), &view), nullptr);
    return searcher.Search({.query = query, .beam_size = 400}, 400);
  };
  // Every node is its own neighbour, many times.
  for (uint32_t node = 0; node < 400; ++node) {
    searcher.Row(node)[0] = degree;
    std::fill_n(searcher.Row(node) + 1, degree, node);
  }
  EXPECT_LE(search().scanned, kMaxGraphEntries);
  // One ring.
  for (uint32_t node = 0; node < 400; ++node) {
    std::fill_n(searcher.Row(node) + 1, degree, (node + 1) % 400);
  }
  EXPECT_EQ(search().scanned, 400u);
  // Pairs of nodes that lead to each other only.
  for (uint32_t node = 0; node < 400; ++node) {
    std::fill_n(searcher.Row(node) + 1, degree, node ^ 1u);
  }
  EXPECT_LE(search().scanned, 2 * kMaxGraphEntries);
}

// A ring whose nodes reach the next one through their last neighbour only, at every degree.
TEST(GraphSearchTest, LooksAtAllNeighboursOfANode) {
  const GraphCase data({.keys = 100, .samples = 10});
  const std::vector<float> query = data.Query(1);
  const Searcher searcher(data);
  for (uint32_t degree = 1; degree <= searcher.shape().max_degree; ++degree) {
    for (uint32_t node = 0; node < 100; ++node) {
      searcher.Row(node)[0] = degree;
      std::fill_n(searcher.Row(node) + 1, degree, node);
      searcher.Row(node)[degree] = (node + 1) % 100;
    }
    EXPECT_EQ(searcher.Search({.query = query, .beam_size = 100}, 10).scanned, 100u) << degree;
  }
}

}  // namespace
}  // namespace pqcached::kernels
