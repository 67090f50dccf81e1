// Search of graphs: the keys with the largest scores for one query.
//
// The keys of several graphs, one for each segment, are searched by one walk: it goes on wherever
// keys are good, so a graph without good keys costs little more than its entries.
//
// A walk keeps the best keys it has scored, the *beam*. It starts with the entries and, where the
// caller has some, *seeds*: keys that were good for an earlier query. Then it repeatedly takes the
// most promising keys of the beam and scores a few of their neighbours that were not scored before.
// It ends when all neighbours of the whole beam are scored, or at a limit of the arguments.
//
// Stateless; thread-safe as long as outputs and scratch are not shared. Does not allocate. The
// graph may change during a search, or contain anything: the search stays inside `graph` and the
// rows of its nodes, scores each key at most once, and ends.
#ifndef PQCACHED_KERNELS_GRAPH_SEARCH_H_
#define PQCACHED_KERNELS_GRAPH_SEARCH_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"
#include "kernels/graph/graph.h"

namespace pqcached::kernels {

// One of the graphs of a search. Nodes are numbered over all of them: those of the first graph
// begin at 0, and those of each later graph follow.
struct GraphPart {
  GraphView graph = {};
  const std::byte* rows = nullptr;  // row of node 0, any alignment
  // Only nodes in [begin, end) are returned; the walk goes through all.
  uint32_t begin = 0;
  uint32_t end = kMaxGraphNodes;
};

struct GraphSearchArgs {
  std::span<const GraphPart> parts = {};  // at most kMaxGraphNodes nodes and parts in all
  DType dtype = DType::kF16;
  uint32_t key_dim = 0;         // 8..256, multiple of 8
  size_t row_stride_bytes = 0;  // >= key_dim * DTypeBytes(dtype): the key is the start of a row
  float scale = 1.0f;
  std::span<const float> query = {};  // [key_dim]
  uint32_t beam_size = 128;           // raised to the number of positions asked for
  uint32_t scan_limit = 0;            // most keys to score; 0: no limit
  uint32_t patience = 0;              // steps without a new result that end the walk; 0: no limit
  std::span<const uint32_t> seeds = {};     // scored first; those out of range are ignored
  uint32_t entry_limit = kMaxGraphEntries;  // most entries of a graph to score
  // The best nodes, by descending score (ties: the lower node), and their scores.
  std::span<uint32_t> nodes = {};     // [k]
  std::span<float> scores = {};       // [k]
  std::span<std::byte> scratch = {};  // GraphSearchScratchBytes, aligned to kGraphAlignment
};

struct GraphSearchResult {
  uint32_t found_count = 0;    // nodes written, at most k
  uint32_t scanned_count = 0;  // keys scored
};

// `node_count`: of all parts.
size_t GraphSearchScratchBytes(uint32_t node_count, uint32_t key_dim, uint32_t beam_size,
                               uint32_t k, size_t part_count = 1);

// Searches. Scores are as exact as those of ExactScores; a NaN counts as -infinity.
GraphSearchResult SearchGraph(const Exec& exec, const GraphSearchArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_GRAPH_SEARCH_H_
