// Steps of a build: neighbours by projection of the lists, and the edges back.
#include <algorithm>

#include "kernels/base/scratch_cutter.h"
#include "kernels/graph/build_internal.h"
#include "kernels/graph/prune.h"
#include "kernels/graph/top_picker.h"

namespace pqcached::kernels::internal {
namespace {

// Numbers of shared lists with one key, of which only those above zero are gone through.
struct SharedCounts {
  std::span<uint32_t> counts;  // [key_count], zeros between two keys
  std::span<uint32_t> keys;    // [key_count]: those with counts above zero
  uint32_t size = 0;

  SharedCounts(uint32_t key_count, ScratchCutter* cutter)
      : counts(cutter->Take<uint32_t>(key_count)), keys(cutter->Take<uint32_t>(key_count)) {
    std::fill(counts.begin(), counts.end(), 0);
  }

  void Add(uint32_t key) {
    if (counts[key]++ == 0) keys[size++] = key;
  }
  void Clear() {
    for (uint32_t i = 0; i < size; ++i) counts[keys[i]] = 0;
    size = 0;
  }
};

std::span<const uint32_t> ListOf(const BuildTask& task, uint32_t sample) {
  const uint32_t list_size = ListSize(task.args.size);
  return task.memory.lists.subspan(size_t{sample} * list_size, list_size);
}

void WriteRow(uint32_t* row, std::span<const uint32_t> neighbours) {
  row[0] = static_cast<uint32_t>(neighbours.size());
  std::copy(neighbours.begin(), neighbours.end(), row + 1);
}

void CountShared(const BuildTask& task, uint32_t key, SharedCounts* shared) {
  std::span<const uint32_t> samples = task.memory.lists_of.To(key);
  const size_t most = task.args.size.options.lists_per_key;
  if (samples.size() > most) samples = samples.last(most);
  for (const uint32_t sample : samples) {
    for (const uint32_t other : ListOf(task, sample)) shared->Add(other);
  }
}

void ProjectShared(const BuildTask& task, uint32_t key, const SharedCounts& shared,
                   std::span<uint64_t> picked) {
  TopPicker picker(task.degree(), picked);
  for (uint32_t i = 0; i < shared.size; ++i) {
    const uint32_t other = shared.keys[i];
    if (other == key) continue;
    picker.Add(static_cast<float>(shared.counts[other]) * task.memory.rarity[other], other);
  }
  uint32_t* row = task.GraphRow(key);
  row[0] = 0;
  for (const uint64_t neighbour : picker.Finish()) row[++row[0]] = RankId(neighbour);
}

void ProjectBest(const BuildTask& task, uint32_t key, const SharedCounts& shared, Pruner* pruner) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < shared.size; ++i) {
    if (shared.keys[i] != key) pruner->candidates()[count++] = shared.keys[i];
  }
  WriteRow(task.GraphRow(key), pruner->Choose(key, count, task.degree(), true));
}

// Adds the edges back to the row of `key`, up to M in all. Under kBestKey, all are pruned together.
void AddReversedTo(const BuildTask& task, uint32_t key, Pruner* pruner) {
  uint32_t* row = task.GraphRow(key);
  const uint32_t projected = row[0];
  const bool prunes = task.args.size.options.projection == GraphProjection::kBestKey;
  uint32_t count = 0;
  for (uint32_t i = 0; prunes && i < projected; ++i) pruner->candidates()[count++] = row[1 + i];
  for (const uint32_t source : task.memory.reversed.To(key)) {
    const bool is_known = std::find(row + 1, row + 1 + projected, source) != row + 1 + projected;
    if (is_known) continue;
    if (prunes) {
      pruner->candidates()[count++] = source;
    } else if (row[0] < task.degree()) {
      row[++row[0]] = source;
    }
  }
  if (prunes && count > projected) {
    WriteRow(row, pruner->Choose(key, count, task.degree(), true));
  }
}

}  // namespace

void ProjectNodes(const BuildTask& task) {
  ScratchCutter cutter(task.scratch);
  SharedCounts shared(task.key_count(), &cutter);
  const std::span<uint64_t> picked = cutter.Take<uint64_t>(TopPicker::MemoryCount(task.degree()));
  Pruner pruner(task, &cutter);
  const bool shares = task.args.size.options.projection == GraphProjection::kSharedLists;
  const uint32_t first = task.task * kNodeTaskNodes;
  const uint32_t end = std::min(first + kNodeTaskNodes, task.key_count());
  for (uint32_t key = first; key < end; ++key) {
    CountShared(task, key, &shared);
    if (shares) {
      ProjectShared(task, key, shared, picked);
    } else {
      ProjectBest(task, key, shared, &pruner);
    }
    shared.Clear();
  }
}

size_t ProjectNodesBytes(const GraphBuildSize& size) {
  return 2 * ScratchAligned(size.key_count * sizeof(uint32_t)) +
         ScratchAligned(TopPicker::MemoryCount(size.options.degree) * sizeof(uint64_t)) +
         Pruner::ScratchBytes(size);
}

void AddReversed(const BuildTask& task) {
  ScratchCutter cutter(task.scratch);
  Pruner pruner(task, &cutter);
  const uint32_t first = task.task * kNodeTaskNodes;
  const uint32_t end = std::min(first + kNodeTaskNodes, task.key_count());
  for (uint32_t key = first; key < end; ++key) AddReversedTo(task, key, &pruner);
}

}  // namespace pqcached::kernels::internal
