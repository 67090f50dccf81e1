// Builds of graphs: equal to plain loops on every instruction set and number of threads, with all
// keys reachable.
#include "kernels/graph/build.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "tests/kernels/graph/graph_case.h"

namespace pqcached::kernels {
namespace {

PlainGraph Read(const GraphCase& keys, const GraphBuildOptions& options,
                std::span<const std::byte> bytes) {
  const GraphMemory memory(bytes.size());
  std::copy(bytes.begin(), bytes.end(), memory.span().begin());
  const GraphShape shape = GraphShapeOf(keys.Args(options, {}).size);
  GraphView view;
  const char* wrong = CheckGraph(memory.span(), shape, &view);
  EXPECT_EQ(wrong, nullptr) << (wrong == nullptr ? "" : wrong);
  return wrong == nullptr ? ReadGraph(view) : PlainGraph{};
}

void ExpectEqual(const PlainGraph& found, const PlainGraph& expected) {
  ASSERT_EQ(found.entries, expected.entries);
  ASSERT_EQ(found.neighbours.size(), expected.neighbours.size());
  for (size_t node = 0; node < expected.neighbours.size(); ++node) {
    ASSERT_EQ(found.neighbours[node], expected.neighbours[node]) << "node " << node;
  }
}

TEST(GraphBuildTest, MatchesPlainLoopsAtAllSizes) {
  uint64_t seed = 0;
  for (const GraphProjection projection :
       {GraphProjection::kSharedLists, GraphProjection::kBestKey}) {
    for (const uint32_t keys : {0u, 1u, 2u, 3u, 15u, 63u, 64u, 65u, 200u}) {
      for (const uint32_t samples : {0u, 1u, 7u, 8u, 9u, 40u}) {
        for (const uint32_t connect_beam : {0u, 256u}) {
          const GraphCase data({.keys = keys, .samples = samples, .seed = ++seed});
          const GraphBuildOptions options{.projection = projection,
                                          .list_size = 12,
                                          .degree = 5,
                                          .connect_beam = connect_beam,
                                          .entry_count = 4,
                                          .entry_samples = 6,
                                          .lists_per_key = 10};
          SCOPED_TRACE(testing::Message() << keys << " keys, " << samples << " samples, beam "
                                          << connect_beam << ", rule " << int(projection));
          const std::vector<std::byte> built = data.Build({}, options);
          ExpectEqual(Read(data, options, built), BuildPlain(data, options));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(GraphBuildTest, AllInstructionSetsTypesAndThreadCountsMakeTheSameGraph) {
  for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
    for (const uint32_t dim : {8u, 24u, 40u, 64u}) {
      const GraphCase data({.keys = 700, .samples = 90, .dim = dim, .dtype = dtype, .seed = dim});
      for (const GraphProjection projection :
           {GraphProjection::kSharedLists, GraphProjection::kBestKey}) {
        const GraphBuildOptions options{.projection = projection, .list_size = 40, .degree = 9};
        const std::vector<std::byte> expected = data.Build(Exec{Level::kReference}, options);
        for (const Level level : AvailableLevels()) {
          EXPECT_EQ(data.Build(Exec{level}, options), expected)
              << LevelName(level) << " dim " << dim << " " << DTypeName(dtype);
        }
        for (const uint32_t threads : {2u, 3u, 8u}) {
          EXPECT_EQ(data.Build({}, options, threads), expected) << threads << " threads";
        }
      }
    }
  }
}

TEST(GraphBuildTest, EveryKeyIsReachableFromTheEntries) {
  for (const uint32_t degree : {1u, 2u, 9u}) {
    for (const uint32_t samples : {0u, 1u, 60u}) {
      for (const uint32_t connect_beam : {0u, 16u}) {
        const GraphCase data({.keys = 500, .samples = samples, .seed = degree});
        const GraphBuildOptions options{
            .list_size = 10, .degree = degree, .connect_beam = connect_beam, .entry_count = 3};
        const PlainGraph graph = Read(data, options, data.Build({}, options));
        std::vector<uint32_t> open = graph.entries;
        std::set<uint32_t> reached(open.begin(), open.end());
        while (!open.empty()) {
          const uint32_t node = open.back();
          open.pop_back();
          for (uint32_t next : graph.neighbours[node]) {
            if (reached.insert(next).second) open.push_back(next);
          }
        }
        EXPECT_EQ(reached.size(), 500u) << "degree " << degree << ", " << samples << " samples";
      }
    }
  }
}

TEST(GraphBuildTest, StopsWhereTheCallerSaysSo) {
  const GraphCase data({.keys = 300, .samples = 30});
  const GraphBuildOptions options{.list_size = 10, .degree = 4};
  GraphBuildArgs args = data.Args(options, {});
  const GraphMemory graph(GraphBytes(GraphShapeOf(args.size)));
  args.graph = graph.span();
  const GraphMemory scratch(GraphBuildSharedBytes(args.size) + GraphBuildThreadBytes(args.size));
  uint32_t tasks = 0;
  EXPECT_TRUE(BuildGraph({}, args, scratch.span(), [&] { return ++tasks > 0; }));
  EXPECT_GT(tasks, GraphBuild::kStepCount);
  for (uint32_t allowed = 0; allowed < tasks; allowed += 7) {
    uint32_t asked = 0;
    EXPECT_FALSE(BuildGraph({}, args, scratch.span(), [&] { return asked++ < allowed; }));
    EXPECT_EQ(asked, allowed + 1);
  }
}

TEST(GraphBuildTest, KeysThatAreNotNumbersBreakNothing) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    const GraphCase data({.keys = 200, .samples = 20});
    GraphCase broken = data;
    for (uint32_t key = 0; key < 200; key += 3) {
      StoreElement(DType::kF32, const_cast<std::byte*>(broken.rows()),
                   key * broken.row_stride_bytes() / sizeof(float), bad);
    }
    for (const GraphProjection projection :
         {GraphProjection::kSharedLists, GraphProjection::kBestKey}) {
      const GraphBuildOptions options{.projection = projection, .list_size = 10, .degree = 4};
      const PlainGraph graph = Read(broken, options, broken.Build({}, options));
      EXPECT_EQ(graph.neighbours.size(), 200u);
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels
