#include "tests/kernels/graph/graph_case.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

namespace pqcached::kernels {

GraphMemory::GraphMemory(size_t bytes)
    : bytes_(static_cast<std::byte*>(operator new[](bytes, std::align_val_t{kGraphAlignment}))),
      size_(bytes) {
  // Contents of scratch do not matter, so they are bad ones.
  std::memset(bytes_, 0x5a, bytes);
}

GraphMemory::~GraphMemory() { operator delete[](bytes_, std::align_val_t{kGraphAlignment}); }

GraphCase::GraphCase(const Size& size)
    : size_(size),
      row_stride_bytes_((size.dim + 8) * DTypeBytes(size.dtype)),
      rows_(size.keys * row_stride_bytes_),
      samples_(Draw(size.samples, size.seed + 1, size.seed + 2)) {
  const std::vector<float> keys = Draw(size.keys, size.seed + 3, size.seed + 4);
  for (size_t key = 0; key < size.keys; ++key) {
    for (size_t i = 0; i < size.dim; ++i) {
      StoreElement(size.dtype, rows_.data() + key * row_stride_bytes_, i, keys[key * size.dim + i]);
    }
  }
}

std::vector<float> GraphCase::Draw(uint32_t count, uint64_t clusters_seed, uint64_t seed) const {
  constexpr size_t kClusters = 12;
  std::mt19937_64 random(clusters_seed);
  std::vector<float> centers(kClusters * size_.dim);
  for (float& x : centers) x = static_cast<float>(static_cast<int>(random() % 9) - 4);
  random.seed(seed);
  std::vector<float> values;
  for (uint32_t i = 0; i < count; ++i) {
    const size_t center = random() % kClusters;
    for (size_t j = 0; j < size_.dim; ++j) {
      values.push_back(centers[center * size_.dim + j] +
                       static_cast<float>(static_cast<int>(random() % 5) - 2));
    }
  }
  return values;
}

std::vector<float> GraphCase::Query(uint64_t seed) const {
  return Draw(1, size_.seed + 1, size_.seed + 1000 + seed);
}

float GraphCase::KeyValue(uint32_t key, uint32_t i) const {
  return LoadElement(size_.dtype, rows_.data() + key * row_stride_bytes_, i);
}

float GraphCase::Score(std::span<const float> query, uint32_t key) const {
  float sum = 0;
  for (uint32_t i = 0; i < size_.dim; ++i) sum += query[i] * KeyValue(key, i);
  return sum;
}

float GraphCase::Distance(uint32_t a, uint32_t b) const {
  float sum = 0;
  for (uint32_t i = 0; i < size_.dim; ++i) {
    const float difference = KeyValue(a, i) - KeyValue(b, i);
    sum += difference * difference;
  }
  return sum;
}

GraphBuildArgs GraphCase::Args(const GraphBuildOptions& options, std::span<std::byte> graph) const {
  return {.size = {.key_count = size_.keys,
                   .sample_count = size_.samples,
                   .key_dim = size_.dim,
                   .options = options},
          .dtype = size_.dtype,
          .row_stride_bytes = row_stride_bytes_,
          .rows = rows_.data(),
          .samples = samples_,
          .graph = graph};
}

std::vector<std::byte> GraphCase::Build(const Exec& exec, const GraphBuildOptions& options,
                                        uint32_t threads) const {
  GraphBuildArgs args = Args(options, {});
  const GraphMemory graph(GraphBytes(GraphShapeOf(args.size)));
  args.graph = graph.span();
  const GraphMemory shared(GraphBuildSharedBytes(args.size));
  const GraphBuild build(exec, args, shared.span());
  for (uint32_t step = 0; step < GraphBuild::kStepCount; ++step) {
    // From the last task to the first: the order must not matter.
    std::atomic<uint32_t> left = build.TaskCount(step);
    const auto work = [&] {
      const GraphMemory scratch(GraphBuildThreadBytes(args.size));
      for (;;) {
        uint32_t task = left.load();
        while (task > 0 && !left.compare_exchange_weak(task, task - 1)) {
        }
        if (task == 0) return;
        build.RunTask(step, task - 1, scratch.span());
      }
    };
    std::vector<std::thread> others;
    for (uint32_t i = 1; i < threads; ++i) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
  }
  return {graph.span().begin(), graph.span().end()};
}

PlainGraph ReadGraph(const GraphView& view) {
  PlainGraph graph;
  for (uint32_t i = 0; i < view.entry_count; ++i) graph.entries.push_back(view.Entry(i));
  graph.neighbours.resize(view.shape.node_count);
  for (uint32_t node = 0; node < view.shape.node_count; ++node) {
    for (uint32_t i = 0; i < view.Degree(node); ++i) {
      graph.neighbours[node].push_back(view.Neighbour(node, i));
    }
  }
  return graph;
}

}  // namespace pqcached::kernels
