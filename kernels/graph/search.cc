#include "kernels/graph/search.h"

#include <algorithm>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/graph/ranked_nodes.h"
#include "kernels/graph/score_rows.h"

namespace pqcached::kernels {
namespace {

// Neighbours of a key that are looked at in one step. They are ordered by usefulness, so the first
// ones of the next keys are more useful than the last ones of this key: with all neighbours in one
// step, SmolLM2's recall@100 at 2 % of its keys is 0.52 instead of 0.54 (8192 tokens, 2026-11-28).
constexpr uint32_t kStepEdges = 8;
// A key whose neighbours were looked at once competes as if it ranked this much lower.
constexpr uint32_t kStepRanks = 8;
// Keys whose neighbours are scored in one step, and most keys that are scored together, so that
// their cache misses overlap.
constexpr uint32_t kStepKeys = 4;
constexpr uint32_t kBatch = kStepKeys * kStepEdges;

constexpr uint32_t kLineBytes = 64;

uint64_t NodeCount(std::span<const GraphPart> parts) {
  uint64_t count = 0;
  for (const GraphPart& part : parts) count += part.graph.shape.node_count;
  return count;
}

size_t VisitedWords(uint64_t node_count) { return static_cast<size_t>(node_count + 63) / 64; }

class Walk {
 public:
  Walk(const Exec& exec, const GraphSearchArgs& args)
      : args_(args), scorer_(RowScorerFor(exec, args.dtype)) {
    const auto k = static_cast<uint32_t>(args.nodes.size());
    ScratchCutter cutter(args.scratch);
    query_ = cutter.Take<float>(ScoreRowsQueryFloats(args.key_dim));
    visited_ = cutter.Take<uint64_t>(VisitedWords(NodeCount(args.parts)));
    beam_ = RankedNodes(cutter.Take<RankedNode>(std::max(args.beam_size, k)));
    results_ = RankedNodes(cutter.Take<RankedNode>(k));
    first_nodes_ = cutter.Take<uint32_t>(args.parts.size());
    std::fill(visited_.begin(), visited_.end(), 0);
    scorer_.prepare(args.query.data(), args.key_dim, args.scale, query_.data());
    for (size_t part = 0; part < args.parts.size(); ++part) {
      const GraphPart& of = args.parts[part];
      first_nodes_[part] = node_count_;
      node_count_ += of.graph.shape.node_count;
      returns_all_ &= of.begin == 0 && of.end >= of.graph.shape.node_count;
    }
    scan_limit_ = args.scan_limit == 0 ? node_count_ : std::min(args.scan_limit, node_count_);
  }

  GraphSearchResult Run() {
    for (const uint32_t seed : args_.seeds) AddSeed(seed);
    for (uint32_t part = 0; part < args_.parts.size(); ++part) {
      const GraphView& graph = args_.parts[part].graph;
      const uint32_t entries = std::min(graph.entry_count, args_.entry_limit);
      for (uint32_t i = 0; i < entries; ++i) Add(part, graph.Entry(i));
    }
    Score();
    uint32_t idle_steps = 0;
    while (scanned_ < scan_limit_) {
      improved_ = false;
      if (!LookAtBest()) break;
      Score();
      idle_steps = improved_ ? 0 : idle_steps + 1;
      if (args_.patience > 0 && idle_steps >= args_.patience) break;
    }
    return Write();
  }

 private:
  // Looks at neighbours of a few keys of the beam. Returns whether there were any.
  bool LookAtBest() {
    uint32_t count = 0;
    for (; count < kStepKeys; ++count) {
      RankedNode* const next = Pick();
      if (next == nullptr) break;
      LookAt(*next);
    }
    return count > 0;
  }

  // Returns the most promising entry of the beam with neighbours left, or null. Ends after few
  // entries, because an entry of rank i competes with at least i.
  RankedNode* Pick() {
    while (first_open_ < beam_.size() && beam_[first_open_].next_edge == kAllEdges) ++first_open_;
    RankedNode* best = nullptr;
    uint32_t least = std::numeric_limits<uint32_t>::max();
    for (uint32_t rank = first_open_; rank < beam_.size() && rank < least; ++rank) {
      RankedNode& entry = beam_[rank];
      if (entry.next_edge == kAllEdges) continue;
      const uint32_t cost = rank + entry.next_edge / kStepEdges * kStepRanks;
      if (cost >= least) continue;
      least = cost;
      best = &entry;
    }
    return best;
  }

  void LookAt(RankedNode& entry) {
    const uint32_t part = entry.part;
    const GraphView& graph = args_.parts[part].graph;
    const uint32_t node = entry.node() - first_nodes_[part];
    const uint32_t degree = graph.Degree(node);
    const uint32_t begin = std::min(entry.next_edge, degree);
    const uint32_t end = std::min(begin + kStepEdges, degree);
    entry.next_edge = end == degree ? kAllEdges : end;
    if (end < degree) __builtin_prefetch(graph.Row(node) + end + kStepEdges);
    // `entry` moves when keys are added.
    for (uint32_t i = begin; i < end; ++i) Add(part, graph.Neighbour(node, i));
  }

  void AddSeed(uint32_t seed) {
    if (seed >= node_count_) return;
    const auto after = std::upper_bound(first_nodes_.begin(), first_nodes_.end(), seed);
    const auto part = static_cast<uint32_t>(after - first_nodes_.begin() - 1);
    Add(part, seed - first_nodes_[part]);
  }

  // Queues a node of a graph to be scored, unless it was queued before or is none.
  void Add(uint32_t part, uint32_t node_of_part) {
    const GraphPart& from = args_.parts[part];
    if (node_of_part >= from.graph.shape.node_count) return;
    const uint32_t node = first_nodes_[part] + node_of_part;
    const uint64_t bit = uint64_t{1} << node % 64;
    if ((visited_[node / 64] & bit) != 0) return;
    if (scanned_ + batch_size_ >= scan_limit_) return;
    visited_[node / 64] |= bit;
    const std::byte* row = from.rows + node_of_part * args_.row_stride_bytes;
    const size_t key_bytes = args_.key_dim * DTypeBytes(args_.dtype);
    for (size_t at = 0; at < key_bytes; at += kLineBytes) __builtin_prefetch(row + at);
    batch_nodes_[batch_size_] = node;
    batch_parts_[batch_size_] = part;
    batch_rows_[batch_size_++] = row;
    if (batch_size_ == kBatch) Score();
  }

  // Scores the queued nodes and adds them to the beam.
  void Score() {
    if (batch_size_ == 0) return;
    float scores[kBatch];
    scorer_.score({.key_dim = args_.key_dim,
                   .query = query_.data(),
                   .rows = batch_rows_,
                   .count = batch_size_,
                   .scores = scores});
    scanned_ += batch_size_;
    for (uint32_t i = 0; i < batch_size_; ++i) {
      Insert({.key = RankKey(scores[i], batch_nodes_[i]), .part = batch_parts_[i]});
    }
    batch_size_ = 0;
  }

  void Insert(const RankedNode& entry) {
    const uint32_t rank = beam_.Insert(entry);
    first_open_ = std::min(first_open_, rank);
    const GraphPart& part = args_.parts[entry.part];
    const uint32_t node = entry.node() - first_nodes_[entry.part];
    if (returns_all_) {
      improved_ |= rank < args_.nodes.size();
    } else if (node >= part.begin && node < part.end) {
      improved_ |= results_.Insert(entry) < args_.nodes.size();
    }
    // Nearly all keys of the beam are looked at.
    if (rank < beam_.size()) __builtin_prefetch(part.graph.Row(node));
  }

  GraphSearchResult Write() const {
    const RankedNodes& from = returns_all_ ? beam_ : results_;
    const uint32_t count = std::min(from.size(), static_cast<uint32_t>(args_.nodes.size()));
    for (uint32_t i = 0; i < count; ++i) {
      args_.nodes[i] = from[i].node();
      args_.scores[i] = from[i].score();
    }
    return {.found_count = count, .scanned_count = scanned_};
  }

  const GraphSearchArgs& args_;
  const RowScorer scorer_;
  std::span<float> query_;
  std::span<uint64_t> visited_;
  std::span<uint32_t> first_nodes_;  // of the parts
  RankedNodes beam_{{}};
  RankedNodes results_{{}};  // unused where every node may be returned
  uint32_t node_count_ = 0;
  uint32_t scan_limit_ = 0;
  uint32_t scanned_ = 0;
  uint32_t first_open_ = 0;  // entries of the beam before it have no neighbours left
  bool returns_all_ = true;
  bool improved_ = false;  // a result was added in this step
  uint32_t batch_size_ = 0;
  uint32_t batch_nodes_[kBatch];
  uint32_t batch_parts_[kBatch];
  const std::byte* batch_rows_[kBatch];
};

}  // namespace

size_t GraphSearchScratchBytes(uint32_t node_count, uint32_t key_dim, uint32_t beam_size,
                               uint32_t k, size_t part_count) {
  return ScratchAligned(ScoreRowsQueryFloats(key_dim) * sizeof(float)) +
         ScratchAligned(VisitedWords(node_count) * sizeof(uint64_t)) +
         ScratchAligned(size_t{std::max(beam_size, k)} * sizeof(RankedNode)) +
         ScratchAligned(size_t{k} * sizeof(RankedNode)) +
         ScratchAligned(part_count * sizeof(uint32_t));
}

GraphSearchResult SearchGraph(const Exec& exec, const GraphSearchArgs& args) {
  PQC_CHECK(args.key_dim > 0 && args.key_dim % 8 == 0);
  PQC_CHECK(args.query.size() == args.key_dim);
  PQC_CHECK(args.scores.size() == args.nodes.size());
  const uint64_t node_count = NodeCount(args.parts);
  PQC_CHECK(node_count <= kMaxGraphNodes);
  PQC_CHECK(args.scratch.size() >=
            GraphSearchScratchBytes(static_cast<uint32_t>(node_count), args.key_dim, args.beam_size,
                                    static_cast<uint32_t>(args.nodes.size()), args.parts.size()));
  return Walk(exec, args).Run();
}

}  // namespace pqcached::kernels
