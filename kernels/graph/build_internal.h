// Parts of a build: private to build.cc and the files of its steps.
#ifndef PQCACHED_KERNELS_GRAPH_BUILD_INTERNAL_H_
#define PQCACHED_KERNELS_GRAPH_BUILD_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/graph/build.h"

namespace pqcached::kernels::internal {

// Edges by their target: the sources of edges to node v are at [begins[v], begins[v + 1]).
struct ReversedEdges {
  std::span<uint32_t> begins;   // [key_count + 1]
  std::span<uint32_t> sources;  // ascending per target

  std::span<const uint32_t> To(uint32_t node) const {
    return sources.subspan(begins[node], begins[node + 1] - begins[node]);
  }
};

// Shared memory of a build, which all tasks see.
struct BuildMemory {
  std::span<uint32_t> lists;      // [sample_count, list size], each by descending score
  ReversedEdges lists_of;         // key -> samples whose lists contain it (or begin with it)
  std::span<float> rarity;        // [key_count]: 1 / sqrt(number of lists)
  std::span<float> norms;         // [key_count]: |key|^2
  ReversedEdges reversed;         // of the projected, then of the additional edges
  std::span<uint32_t> added;      // [key_count, degree + 1]: number and additional neighbours
  std::span<uint32_t> queue;      // [key_count]
  std::span<uint8_t> is_reached;  // [key_count]

  BuildMemory(const GraphBuildSize& size, std::span<std::byte> shared);
};

size_t BuildMemoryBytes(const GraphBuildSize& size);

// Everything that a task needs.
struct BuildTask {
  const Exec& exec;
  const GraphBuildArgs& args;
  BuildMemory memory;
  uint32_t task = 0;
  std::span<std::byte> scratch;

  uint32_t key_count() const { return args.size.key_count; }
  uint32_t degree() const { return args.size.options.degree; }
  const std::byte* KeyRow(uint32_t node) const { return args.rows + node * args.row_stride_bytes; }
  // Row of a node in the graph: degree, neighbours.
  uint32_t* GraphRow(uint32_t node) const;
  GraphView View() const;
};

inline constexpr uint32_t kListTaskSamples = 8;  // samples of one task, scored in one pass
inline constexpr uint32_t kNodeTaskNodes = 64;   // nodes of one task

// Returns the size of lists: all keys where there are fewer than asked for.
uint32_t ListSize(const GraphBuildSize& size);
// Returns the most nodes that a pruning may get.
uint32_t MostPruned(const GraphBuildSize& size);

// Steps, in this order. Each reads what earlier steps wrote and writes parts that no other task of
// the step reads or writes. Bytes: scratch of a task.
void FindLists(const BuildTask& task);
size_t FindListsBytes(const GraphBuildSize& size);
void InvertLists(const BuildTask& task);  // one task; also norms and entries
size_t InvertListsBytes(const GraphBuildSize& size);
void ProjectNodes(const BuildTask& task);
size_t ProjectNodesBytes(const GraphBuildSize& size);
void ReverseProjected(const BuildTask& task);  // one task
void AddReversed(const BuildTask& task);
void ConnectNodes(const BuildTask& task);
size_t ConnectNodesBytes(const GraphBuildSize& size);
void ReverseAdded(const BuildTask& task);  // one task
void AppendAdded(const BuildTask& task);
void ReachAll(const BuildTask& task);  // one task

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_GRAPH_BUILD_INTERNAL_H_
