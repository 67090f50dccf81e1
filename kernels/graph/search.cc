#include "kernels/graph/search.h"

#include <algorithm>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/graph/ranked_nodes.h"
#include "kernels/graph/score_rows.h"

namespace pqcached::kernels {
namespace {

// Neighbours that are looked at in one step. They are ordered by usefulness, so the first ones of
// the next keys are more useful than the last ones of this key: with all neighbours in one step,
// SmolLM2's recall@100 at 2 % of its keys is 0.52 instead of 0.54 (8192 tokens, 2026-11-28).
constexpr uint32_t kStepEdges = 8;
// A key whose neighbours were looked at once competes as if it ranked this much lower.
constexpr uint32_t kStepRanks = 8;
// Keys that are scored together, so that their cache misses overlap.
constexpr uint32_t kBatch = 16;

constexpr uint32_t kLineBytes = 64;

class Walk {
 public:
  Walk(const Exec& exec, const GraphSearchArgs& args)
      : args_(args), scorer_(RowScorerFor(exec, args.dtype)) {
    const auto k = static_cast<uint32_t>(args.nodes.size());
    const uint32_t node_count = args.graph.shape.node_count;
    ScratchCutter cutter(args.scratch);
    query_ = cutter.Take<float>(ScoreRowsQueryFloats(args.key_dim));
    visited_ = cutter.Take<uint64_t>((size_t{node_count} + 63) / 64);
    beam_ = RankedNodes(cutter.Take<RankedNode>(std::max(args.beam_size, k)));
    results_ = RankedNodes(cutter.Take<RankedNode>(k));
    std::fill(visited_.begin(), visited_.end(), 0);
    scorer_.prepare(args.query.data(), args.key_dim, args.scale, query_.data());
    scan_limit_ = args.scan_limit == 0 ? node_count : std::min(args.scan_limit, node_count);
    returns_all_ = args.begin == 0 && args.end >= node_count;
  }

  GraphSearchResult Run() {
    for (uint32_t seed : args_.seeds) Add(seed);
    const uint32_t entries = std::min(args_.graph.entry_count, args_.entry_limit);
    for (uint32_t i = 0; i < entries; ++i) Add(args_.graph.Entry(i));
    Score();
    uint32_t idle_steps = 0;
    while (scanned_ < scan_limit_) {
      RankedNode* next = Pick();
      if (next == nullptr) break;
      improved_ = false;
      LookAt(*next);
      Score();
      idle_steps = improved_ ? 0 : idle_steps + 1;
      if (args_.patience > 0 && idle_steps >= args_.patience) break;
    }
    return Write();
  }

 private:
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
    const uint32_t degree = args_.graph.Degree(entry.node);
    const uint32_t begin = std::min(entry.next_edge, degree);
    const uint32_t end = std::min(begin + kStepEdges, degree);
    const uint32_t node = entry.node;
    entry.next_edge = end == degree ? kAllEdges : end;
    // `entry` moves when keys are added.
    for (uint32_t i = begin; i < end; ++i) Add(args_.graph.Neighbour(node, i));
  }

  // Queues a node to be scored, unless it was queued before or is none.
  void Add(uint32_t node) {
    if (node >= args_.graph.shape.node_count) return;
    const uint64_t bit = uint64_t{1} << node % 64;
    if ((visited_[node / 64] & bit) != 0) return;
    if (scanned_ + batch_size_ >= scan_limit_) return;
    visited_[node / 64] |= bit;
    const std::byte* row = args_.rows + node * args_.row_stride_bytes;
    const size_t key_bytes = args_.key_dim * DTypeBytes(args_.dtype);
    for (size_t at = 0; at < key_bytes; at += kLineBytes) __builtin_prefetch(row + at);
    batch_nodes_[batch_size_] = node;
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
      const bool is_nan = scores[i] != scores[i];
      Insert(is_nan ? -std::numeric_limits<float>::infinity() : scores[i], batch_nodes_[i]);
    }
    batch_size_ = 0;
  }

  void Insert(float score, uint32_t node) {
    const RankedNode entry{.score = score, .node = node};
    const uint32_t rank = beam_.Insert(entry);
    first_open_ = std::min(first_open_, rank);
    if (returns_all_) {
      improved_ |= rank < args_.nodes.size();
    } else if (node >= args_.begin && node < args_.end) {
      improved_ |= results_.Insert(entry) < args_.nodes.size();
    }
    // The neighbours of a good key are needed soon.
    if (rank < kStepRanks) __builtin_prefetch(args_.graph.Row(node));
  }

  GraphSearchResult Write() const {
    const RankedNodes& from = returns_all_ ? beam_ : results_;
    const uint32_t count = std::min(from.size(), static_cast<uint32_t>(args_.nodes.size()));
    for (uint32_t i = 0; i < count; ++i) {
      args_.nodes[i] = from[i].node;
      args_.scores[i] = from[i].score;
    }
    return {.found_count = count, .scanned_count = scanned_};
  }

  const GraphSearchArgs& args_;
  const RowScorer scorer_;
  std::span<float> query_;
  std::span<uint64_t> visited_;
  RankedNodes beam_{{}};
  RankedNodes results_{{}};  // unused where every node may be returned
  uint32_t scan_limit_ = 0;
  uint32_t scanned_ = 0;
  uint32_t first_open_ = 0;  // entries of the beam before it have no neighbours left
  bool returns_all_ = false;
  bool improved_ = false;  // a result was added in this step
  uint32_t batch_size_ = 0;
  uint32_t batch_nodes_[kBatch];
  const std::byte* batch_rows_[kBatch];
};

}  // namespace

size_t GraphSearchScratchBytes(uint32_t node_count, uint32_t key_dim, uint32_t beam_size,
                               uint32_t k) {
  return ScratchAligned(ScoreRowsQueryFloats(key_dim) * sizeof(float)) +
         ScratchAligned((size_t{node_count} + 63) / 64 * sizeof(uint64_t)) +
         ScratchAligned(size_t{std::max(beam_size, k)} * sizeof(RankedNode)) +
         ScratchAligned(size_t{k} * sizeof(RankedNode));
}

GraphSearchResult SearchGraph(const Exec& exec, const GraphSearchArgs& args) {
  PQC_CHECK(args.key_dim > 0 && args.key_dim % 8 == 0);
  PQC_CHECK(args.query.size() == args.key_dim);
  PQC_CHECK(args.scores.size() == args.nodes.size());
  PQC_CHECK(args.graph.shape.node_count <= kMaxGraphNodes);
  PQC_CHECK(args.scratch.size() >=
            GraphSearchScratchBytes(args.graph.shape.node_count, args.key_dim, args.beam_size,
                                    static_cast<uint32_t>(args.nodes.size())));
  return Walk(exec, args).Run();
}

}  // namespace pqcached::kernels
