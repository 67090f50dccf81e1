#include "kernels/graph/build.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/graph/build_internal.h"

namespace pqcached::kernels {
namespace internal {
namespace {

// Numbers of elements in the shared memory.
struct Counts {
  size_t lists;
  size_t lists_of;
  size_t reversed;
  size_t added;

  explicit Counts(const GraphBuildSize& size) {
    lists = size_t{size.sample_count} * ListSize(size);
    const bool shares = size.options.projection == GraphProjection::kSharedLists;
    lists_of = shares ? lists : size.sample_count;
    reversed = size_t{size.key_count} * size.options.degree;
    added = size.options.connect_beam == 0 ? 0 : reversed + size.key_count;
  }
};

}  // namespace

BuildMemory::BuildMemory(const GraphBuildSize& size, std::span<std::byte> shared) {
  const Counts counts(size);
  ScratchCutter cutter(shared);
  lists = cutter.Take<uint32_t>(counts.lists);
  lists_of.begins = cutter.Take<uint32_t>(size_t{size.key_count} + 1);
  lists_of.sources = cutter.Take<uint32_t>(counts.lists_of);
  rarity = cutter.Take<float>(size.key_count);
  norms = cutter.Take<float>(size.key_count);
  reversed.begins = cutter.Take<uint32_t>(size_t{size.key_count} + 1);
  reversed.sources = cutter.Take<uint32_t>(counts.reversed);
  added = cutter.Take<uint32_t>(counts.added);
  queue = cutter.Take<uint32_t>(size.key_count);
  is_reached = cutter.Take<uint8_t>(size.key_count);
}

size_t BuildMemoryBytes(const GraphBuildSize& size) {
  const Counts counts(size);
  const size_t words[] = {
      counts.lists,   size_t{size.key_count} + 1, counts.lists_of, size.key_count,
      size.key_count, size_t{size.key_count} + 1, counts.reversed, counts.added,
      size.key_count};
  size_t bytes = ScratchAligned(size.key_count);
  for (const size_t count : words) bytes += ScratchAligned(count * sizeof(uint32_t));
  return bytes;
}

uint32_t* BuildTask::GraphRow(uint32_t node) const {
  const size_t row_bytes = GraphRowBytes(2 * degree());
  return reinterpret_cast<uint32_t*>(args.graph.data() + sizeof(GraphHeader) + node * row_bytes);
}

GraphView BuildTask::View() const {
  return {.bytes = args.graph.data(),
          .shape = GraphShapeOf(args.size),
          .entry_count = reinterpret_cast<const GraphHeader*>(args.graph.data())->entry_count};
}

uint32_t ListSize(const GraphBuildSize& size) {
  return std::min(size.options.list_size, size.key_count);
}

uint32_t MostPruned(const GraphBuildSize& size) {
  if (size.options.projection == GraphProjection::kBestKey) return size.key_count;
  return std::min(size.options.connect_beam, size.key_count);
}

}  // namespace internal

GraphShape GraphShapeOf(const GraphBuildSize& size) {
  return {.node_count = size.key_count, .max_degree = 2 * size.options.degree};
}

size_t GraphBuildSharedBytes(const GraphBuildSize& size) {
  return internal::BuildMemoryBytes(size);
}

size_t GraphBuildThreadBytes(const GraphBuildSize& size) {
  return std::max({internal::FindListsBytes(size), internal::InvertListsBytes(size),
                   internal::ProjectNodesBytes(size), internal::ConnectNodesBytes(size)});
}

GraphBuild::GraphBuild(const Exec& exec, const GraphBuildArgs& args, std::span<std::byte> shared)
    : exec_(exec), args_(args), shared_(shared) {
  const GraphBuildSize& size = args.size;
  PQC_CHECK(size.key_count <= kMaxGraphNodes);
  PQC_CHECK(size.key_dim > 0 && size.key_dim % 8 == 0);
  PQC_CHECK(args.samples.size() == size_t{size.sample_count} * size.key_dim);
  PQC_CHECK(size.options.list_size >= 1);
  PQC_CHECK(uint64_t{size.options.list_size} * size.sample_count < (uint64_t{1} << 32u));
  PQC_CHECK(size.options.degree >= 1 && 2 * size.options.degree <= kMaxGraphDegree);
  PQC_CHECK(size.options.entry_count >= 1 && size.options.entry_count <= kMaxGraphEntries);
  PQC_CHECK(size.options.entry_samples <= kMostEntrySamples);
  PQC_CHECK(shared.size() >= GraphBuildSharedBytes(size));
  FormatGraph(GraphShapeOf(size), args.graph);
}

namespace {

struct Step {
  void (*run)(const internal::BuildTask& task);
  uint32_t per_task = 0;    // samples or nodes of a task; 0: the step is one task
  bool of_samples = false;  // divided by samples, not by nodes
  bool connects = false;    // skipped without connect_beam
};

constexpr Step kSteps[GraphBuild::kStepCount] = {
    {.run = internal::FindLists, .per_task = internal::kListTaskSamples, .of_samples = true},
    {.run = internal::InvertLists},
    {.run = internal::ProjectNodes, .per_task = internal::kNodeTaskNodes},
    {.run = internal::ReverseProjected},
    {.run = internal::AddReversed, .per_task = internal::kNodeTaskNodes},
    {.run = internal::ConnectNodes, .per_task = internal::kNodeTaskNodes, .connects = true},
    {.run = internal::ReverseAdded, .connects = true},
    {.run = internal::AppendAdded, .per_task = internal::kNodeTaskNodes, .connects = true},
    {.run = internal::ReachAll},
};

}  // namespace

uint32_t GraphBuild::TaskCount(uint32_t step) const {
  const GraphBuildSize& size = args_.size;
  const Step& found = kSteps[step];
  if (size.key_count == 0) return 0;
  if (found.connects && size.options.connect_beam == 0) return 0;
  if (found.per_task == 0) return 1;
  const uint32_t count = found.of_samples ? size.sample_count : size.key_count;
  return (count + found.per_task - 1) / found.per_task;
}

void GraphBuild::RunTask(uint32_t step, uint32_t task, std::span<std::byte> scratch) const {
  PQC_CHECK(step < kStepCount && task < TaskCount(step));
  PQC_CHECK(scratch.size() >= GraphBuildThreadBytes(args_.size));
  kSteps[step].run({.exec = exec_,
                    .args = args_,
                    .memory = internal::BuildMemory(args_.size, shared_),
                    .task = task,
                    .scratch = scratch});
}

bool BuildGraph(const Exec& exec, const GraphBuildArgs& args, std::span<std::byte> scratch,
                const std::function<bool()>& keep_going) {
  const size_t shared_bytes = GraphBuildSharedBytes(args.size);
  PQC_CHECK(scratch.size() >= shared_bytes);
  const GraphBuild build(exec, args, scratch.first(shared_bytes));
  for (uint32_t step = 0; step < GraphBuild::kStepCount; ++step) {
    const uint32_t tasks = build.TaskCount(step);
    for (uint32_t task = 0; task < tasks; ++task) {
      if (keep_going && !keep_going()) return false;
      build.RunTask(step, task, scratch.subspan(shared_bytes));
    }
  }
  return true;
}

}  // namespace pqcached::kernels
