// Keys and queries for tests of graphs. Their values are small whole numbers, so that inner
// products and distances are exact on every instruction set.
#ifndef PQCACHED_TESTS_KERNELS_GRAPH_GRAPH_CASE_H_
#define PQCACHED_TESTS_KERNELS_GRAPH_GRAPH_CASE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/graph/build.h"
#include "kernels/graph/search.h"

namespace pqcached::kernels {

// 64-byte aligned memory without bytes behind it, which the address sanitizer watches.
class GraphMemory {
 public:
  explicit GraphMemory(size_t bytes);
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;
  std::span<std::byte> span() const { return {bytes_, size_}; }

 private:
  std::byte* bytes_;
  size_t size_;
};

class GraphCase {
 public:
  struct Size {
    uint32_t keys = 0;
    uint32_t samples = 0;
    uint32_t dim = 32;
    DType dtype = DType::kF32;
    uint64_t seed = 1;
  };

  // Queries and keys have clusters of their own, as in attention.
  explicit GraphCase(const Size& size);

  const Size& size() const { return size_; }
  const std::byte* rows() const { return rows_.data(); }
  size_t row_stride_bytes() const { return row_stride_bytes_; }
  const std::vector<float>& samples() const { return samples_; }
  std::vector<float> Query(uint64_t seed) const;
  float Score(std::span<const float> query, uint32_t key) const;
  float Distance(uint32_t a, uint32_t b) const;  // squared
  float KeyValue(uint32_t key, uint32_t i) const;

  GraphBuildArgs Args(const GraphBuildOptions& options, std::span<std::byte> graph) const;
  // Runs all tasks of a build, each step on this number of threads.
  std::vector<std::byte> Build(const Exec& exec, const GraphBuildOptions& options,
                               uint32_t threads = 1) const;

 private:
  std::vector<float> Draw(uint32_t count, uint64_t clusters_seed, uint64_t seed) const;

  Size size_;
  size_t row_stride_bytes_ = 0;
  std::vector<std::byte> rows_;
  std::vector<float> samples_;
};

// The neighbours of each node, and the entries, in plain containers.
struct PlainGraph {
  std::vector<uint32_t> entries;
  std::vector<std::vector<uint32_t>> neighbours;
};

// Reads a graph that CheckGraph accepts.
PlainGraph ReadGraph(const GraphView& view);

// Builds as the header of kernels/graph/build.h describes it: plain loops, the specification.
PlainGraph BuildPlain(const GraphCase& keys, const GraphBuildOptions& options);

}  // namespace pqcached::kernels

#endif  // PQCACHED_TESTS_KERNELS_GRAPH_GRAPH_CASE_H_
