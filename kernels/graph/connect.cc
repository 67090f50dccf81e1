// Steps of a build: reversal of edges, more neighbours by walks, and edges to what no walk reaches.
#include <algorithm>

#include "kernels/base/scratch_cutter.h"
#include "kernels/graph/build_internal.h"
#include "kernels/graph/prune.h"
#include "kernels/graph/search.h"

namespace pqcached::kernels::internal {
namespace {

// Most neighbours before the last step, which needs room for one per node.
uint32_t MostNeighbours(const BuildTask& task) { return 2 * task.degree() - 1; }

bool RowContains(const uint32_t* row, uint32_t node) {
  return std::find(row + 1, row + 1 + row[0], node) != row + 1 + row[0];
}

uint32_t* AddedRow(const BuildTask& task, uint32_t node) {
  return task.memory.added.data() + size_t{node} * (task.degree() + 1);
}

// Makes `reversed` of the rows that row_of(node) returns: a counting sort by target.
template <class RowOf>
void Reverse(const BuildTask& task, const RowOf& row_of) {
  const std::span<uint32_t> begins = task.memory.reversed.begins;
  std::fill(begins.begin(), begins.end(), 0);
  for (uint32_t node = 0; node < task.key_count(); ++node) {
    const uint32_t* row = row_of(node);
    for (uint32_t i = 1; i <= row[0]; ++i) ++begins[row[i]];
  }
  uint32_t sum = 0;
  for (uint32_t& begin : begins) sum = begin += sum;
  for (uint32_t node = task.key_count(); node-- > 0;) {
    const uint32_t* row = row_of(node);
    for (uint32_t i = 1; i <= row[0]; ++i) task.memory.reversed.sources[--begins[row[i]]] = node;
  }
}

// The walk of one key as a query, in the graph as projected.
class KeyWalk {
 public:
  KeyWalk(const BuildTask& task, ScratchCutter* cutter) : task_(task) {
    const GraphBuildSize& size = task.args.size;
    const uint32_t beam = BeamOf(size);
    query_ = cutter->Take<float>(size.key_dim);
    nodes_ = cutter->Take<uint32_t>(beam);
    scores_ = cutter->Take<float>(beam);
    scratch_ =
        cutter->Take<std::byte>(GraphSearchScratchBytes(size.key_count, size.key_dim, beam, beam));
  }

  static uint32_t BeamOf(const GraphBuildSize& size) {
    return std::min(size.options.connect_beam, size.key_count);
  }
  static size_t ScratchBytes(const GraphBuildSize& size) {
    const uint32_t beam = BeamOf(size);
    return ScratchAligned(size.key_dim * sizeof(float)) +
           2 * ScratchAligned(beam * sizeof(uint32_t)) +
           ScratchAligned(GraphSearchScratchBytes(size.key_count, size.key_dim, beam, beam));
  }

  std::span<const uint32_t> Run(uint32_t key) {
    const GraphBuildArgs& args = task_.args;
    ConvertElements(args.dtype, task_.KeyRow(key), DType::kF32,
                    reinterpret_cast<std::byte*>(query_.data()), query_.size());
    const GraphPart part{.graph = task_.View(), .rows = args.rows};
    const GraphSearchResult result =
        SearchGraph(task_.exec, {.parts = {&part, 1},
                                 .dtype = args.dtype,
                                 .key_dim = args.size.key_dim,
                                 .row_stride_bytes = args.row_stride_bytes,
                                 .query = query_,
                                 .beam_size = BeamOf(args.size),
                                 .nodes = nodes_,
                                 .scores = scores_,
                                 .scratch = scratch_});
    return nodes_.first(result.found_count);
  }

 private:
  const BuildTask& task_;
  std::span<float> query_;
  std::span<uint32_t> nodes_;
  std::span<float> scores_;
  std::span<std::byte> scratch_;
};

void AppendTo(const BuildTask& task, uint32_t* row, std::span<const uint32_t> nodes) {
  for (const uint32_t node : nodes) {
    if (row[0] >= MostNeighbours(task)) return;
    if (!RowContains(row, node)) row[++row[0]] = node;
  }
}

// Goes on with a breadth-first traversal: queue[*done, size) were reached but not gone through.
// Returns the new size.
uint32_t Traverse(const BuildTask& task, uint32_t* done, uint32_t size) {
  for (; *done < size; ++*done) {
    const uint32_t* row = task.GraphRow(task.memory.queue[*done]);
    for (uint32_t i = 1; i <= row[0]; ++i) {
      uint8_t& is_reached = task.memory.is_reached[row[i]];
      if (is_reached == 0) task.memory.queue[size++] = row[i];
      is_reached = 1;
    }
  }
  return size;
}

}  // namespace

void ReverseProjected(const BuildTask& task) {
  Reverse(task, [&task](uint32_t node) { return task.GraphRow(node); });
}

void ConnectNodes(const BuildTask& task) {
  ScratchCutter cutter(task.scratch);
  KeyWalk walk(task, &cutter);
  Pruner pruner(task, &cutter);
  const uint32_t first = task.task * kNodeTaskNodes;
  const uint32_t end = std::min(first + kNodeTaskNodes, task.key_count());
  for (uint32_t key = first; key < end; ++key) {
    uint32_t count = 0;
    for (const uint32_t node : walk.Run(key)) {
      if (node != key) pruner.candidates()[count++] = node;
    }
    const std::span<const uint32_t> chosen = pruner.Choose(key, count, task.degree(), false);
    uint32_t* row = AddedRow(task, key);
    row[0] = static_cast<uint32_t>(chosen.size());
    std::copy(chosen.begin(), chosen.end(), row + 1);
  }
}

size_t ConnectNodesBytes(const GraphBuildSize& size) {
  return KeyWalk::ScratchBytes(size) + Pruner::ScratchBytes(size);
}

void ReverseAdded(const BuildTask& task) {
  Reverse(task, [&task](uint32_t node) { return AddedRow(task, node); });
}

void AppendAdded(const BuildTask& task) {
  const uint32_t first = task.task * kNodeTaskNodes;
  const uint32_t end = std::min(first + kNodeTaskNodes, task.key_count());
  for (uint32_t key = first; key < end; ++key) {
    const uint32_t* added = AddedRow(task, key);
    AppendTo(task, task.GraphRow(key), {added + 1, added[0]});
    AppendTo(task, task.GraphRow(key), task.memory.reversed.To(key));
  }
}

void ReachAll(const BuildTask& task) {
  std::fill(task.memory.is_reached.begin(), task.memory.is_reached.end(), 0);
  const GraphView view = task.View();
  uint32_t size = 0;
  for (uint32_t i = 0; i < view.entry_count; ++i) {
    task.memory.is_reached[view.Entry(i)] = 1;
    task.memory.queue[size++] = view.Entry(i);
  }
  uint32_t done = 0;
  uint32_t parent = 0;  // in the queue; earlier nodes have no room
  for (uint32_t node = 0; node < task.key_count(); ++node) {
    size = Traverse(task, &done, size);
    if (task.memory.is_reached[node] != 0) continue;
    while (task.GraphRow(task.memory.queue[parent])[0] >= 2 * task.degree()) ++parent;
    uint32_t* row = task.GraphRow(task.memory.queue[parent]);
    row[++row[0]] = node;
    task.memory.is_reached[node] = 1;
    task.memory.queue[size++] = node;
  }
}

}  // namespace pqcached::kernels::internal
