// Build of a graph over keys from samples of the queries that will search it.
//
// Queries and keys of attention have different distributions, so a graph of keys that are near each
// other leads a query astray. This one (RetrievalAttention, RoarGraph) is made of *lists*: the best
// keys of each sample, by exact inner products. A key's neighbours come from the lists that contain
// it; then every key is made reachable from the entries.
//
// A build is a sequence of steps, each of which has independent tasks. Tasks of one step may run on
// any threads, and the graph is the same whatever their order; the caller runs all of them before
// the next step. BuildGraph does this on one thread.
#ifndef PQCACHED_KERNELS_GRAPH_BUILD_H_
#define PQCACHED_KERNELS_GRAPH_BUILD_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"
#include "kernels/graph/graph.h"

namespace pqcached::kernels {

// The rule that makes neighbours of the lists.
enum class GraphProjection : uint8_t {
  // Keys that share the most lists are neighbours: of a key of n lists, a key of m lists that
  // shares s of them has the weight s / sqrt(m).
  kSharedLists,
  // As published: a list belongs to its best key alone, whose neighbours are the list's other keys
  // after pruning. Where the same few keys are the best ones of nearly all queries, as in attention
  // heads, most keys get no neighbours this way.
  kBestKey,
};

inline constexpr uint32_t kMostEntrySamples = (1u << 16u) - 1;

struct GraphBuildOptions {
  GraphProjection projection = GraphProjection::kSharedLists;
  uint32_t list_size = 100;  // N_q >= 1: keys per sample
  uint32_t degree = 35;      // M, 1..127: neighbours by projection; 2 * M in all
  // Beam of the walk that looks for neighbours of each key; 0: no such step.
  uint32_t connect_beam = 32;
  // Entries: keys that many of the last entry_samples lists contain, of different lists, and the
  // key nearest to the mean of all keys. 1..kMaxGraphEntries.
  uint32_t entry_count = 32;
  uint32_t entry_samples = 512;  // at most kMostEntrySamples
  // Of a key that is in more lists, this number of the last ones count, which bounds the work.
  uint32_t lists_per_key = 1024;
};

struct GraphBuildSize {
  uint32_t key_count = 0;     // 0..kMaxGraphNodes
  uint32_t sample_count = 0;  // list_size * sample_count < 2^32
  uint32_t key_dim = 0;       // 8..256, multiple of 8
  GraphBuildOptions options = {};
};

struct GraphBuildArgs {
  GraphBuildSize size = {};
  DType dtype = DType::kF16;
  size_t row_stride_bytes = 0;          // >= key_dim * DTypeBytes(dtype)
  const std::byte* rows = nullptr;      // [key_count], the key is the start of a row
  std::span<const float> samples = {};  // [sample_count, key_dim]: queries, the oldest first
  std::span<std::byte> graph = {};  // GraphBytes(GraphShapeOf(size)), aligned to kGraphAlignment
};

// Returns the shape of the graph that a build makes: key_count nodes of degree 2 * M.
GraphShape GraphShapeOf(const GraphBuildSize& size);

// Scratch of a build: one shared part, and one part per thread. All aligned to kGraphAlignment.
size_t GraphBuildSharedBytes(const GraphBuildSize& size);
size_t GraphBuildThreadBytes(const GraphBuildSize& size);

class GraphBuild {
 public:
  static constexpr uint32_t kStepCount = 9;

  // `args` and the memory to which it refers outlive the build; `shared`: GraphBuildSharedBytes.
  GraphBuild(const Exec& exec, const GraphBuildArgs& args, std::span<std::byte> shared);

  // Returns the number of tasks of a step; 0: the step has nothing to do.
  uint32_t TaskCount(uint32_t step) const;
  // Runs one task. `scratch`: GraphBuildThreadBytes; its contents do not matter.
  void RunTask(uint32_t step, uint32_t task, std::span<std::byte> scratch) const;

 private:
  const Exec exec_;
  const GraphBuildArgs& args_;
  const std::span<std::byte> shared_;
};

// Runs all tasks on this thread. `keep_going` is called before each; after false, returns false and
// the graph is unusable. `scratch`: the shared part and one thread's.
bool BuildGraph(const Exec& exec, const GraphBuildArgs& args, std::span<std::byte> scratch,
                const std::function<bool()>& keep_going = {});

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_GRAPH_BUILD_H_
