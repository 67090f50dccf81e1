#include <algorithm>
#include <bit>
#include <new>
#include <string>

#include "kernels/graph/search.h"
#include "kernels/select/exact/exact_score.h"
#include "kernels/select/score_select.h"
#include "kvstore/read/indexes/flat.h"
#include "kvstore/read/indexes/graph.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kDefaultDegree = 15;  // rows of a graph are whole cache lines: 2 of them
constexpr uint32_t kDefaultListSize = 100;
constexpr uint32_t kDefaultSampleCount = 512;

// A walk scores many keys for each that it finds: of fewer tokens for each token wanted, all are
// scored. So is a smaller part of a graph, because a walk goes through all nodes.
constexpr uint32_t kTokensPerWanted = 32;
constexpr uint32_t kLeastPart = 2;
constexpr uint32_t kMostWanted = 4096;

// Returns the beam of a walk over all segments. Of SmolLM2's keys in 4 segments of 8192 tokens it
// finds 0.995 of the best 48 and 128 (tests/quality/graph/graph_select.cc, 2026-11-28); with two
// thirds of the beam, 0.990.
constexpr uint32_t BeamOf(uint32_t wanted) { return 3 * wanted + 128; }

// Returns the number of keys that a walk returns: for several queries all of its beam, because
// their best tokens together need not be among the best ones of each.
constexpr uint32_t FoundOf(uint32_t wanted, uint32_t queries) {
  return queries == 1 ? wanted : BeamOf(wanted);
}
constexpr uint32_t kMostFound = FoundOf(kMostWanted, 2);

// Set of columns: candidates, counted over the pieces of a plan.
class ColumnSet {
 public:
  static size_t Bytes(uint32_t count) {
    return PaddedBytes((size_t{count} + 63) / 64 * sizeof(uint64_t));
  }

  ColumnSet(uint32_t count, std::span<std::byte> memory)
      : words_(reinterpret_cast<uint64_t*>(memory.data()), (size_t{count} + 63) / 64) {
    std::fill(words_.begin(), words_.end(), 0);
  }

  void Add(uint32_t column) { words_[column / 64] |= uint64_t{1} << column % 64; }
  void AddRange(uint32_t begin, uint32_t end) {
    for (uint32_t column = begin; column < end; ++column) Add(column);
  }
  // Adds the highest columns until there are `least`. REQUIRES: least <= the count of columns.
  void Fill(uint32_t count, uint32_t least) {
    uint32_t size = 0;
    for (const uint64_t word : words_) size += static_cast<uint32_t>(std::popcount(word));
    for (uint32_t column = count; size < least;) {
      --column;
      if ((words_[column / 64] >> column % 64 & 1) != 0) continue;
      Add(column);
      ++size;
    }
  }
  // Calls visit(column) in ascending order.
  template <class Visit>
  void ForEach(const Visit& visit) const {
    for (size_t i = 0; i < words_.size(); ++i) {
      for (uint64_t word = words_[i]; word != 0; word &= word - 1) {
        visit(static_cast<uint32_t>(i * 64) + static_cast<uint32_t>(std::countr_zero(word)));
      }
    }
  }

 private:
  std::span<uint64_t> words_;
};

// A piece whose graphs are walked.
struct WalkedPiece {
  const IndexDataHeader* header = nullptr;
  int64_t first_column = 0;  // of node 0, which may lie before the piece
  uint32_t first_node = 0;   // number of node 0 in a search
};

// The work area of a selection.
struct Work {
  static size_t WalkBytes(const LayerShape& shape, uint32_t token_count, size_t piece_count) {
    // A graph that is walked has at most kLeastPart nodes for each candidate, and one more.
    const uint64_t most = uint64_t{token_count} * kLeastPart + piece_count;
    return kernels::GraphSearchScratchBytes(
        static_cast<uint32_t>(std::min<uint64_t>(most, kernels::kMaxGraphNodes)), shape.key_dim,
        BeamOf(kMostWanted), kMostFound, piece_count);
  }
  // Cuts the parts from `base`; null only counts the bytes.
  Work(const LayerShape& shape, uint32_t token_count, size_t piece_count, std::byte* base) {
    const auto take = [this, base](size_t bytes) {
      std::byte* const part = base == nullptr ? nullptr : base + total_bytes;
      total_bytes += PaddedBytes(bytes);
      return part;
    };
    const size_t group = shape.group_size(), tokens = token_count;
    columns = {take(ColumnSet::Bytes(token_count)), ColumnSet::Bytes(token_count)};
    positions = {reinterpret_cast<uint32_t*>(take(tokens * sizeof(uint32_t))), tokens};
    logits = {reinterpret_cast<float*>(take(group * tokens * sizeof(float))), group * tokens};
    spans = take(piece_count * sizeof(kernels::RowSpan));
    parts = take(piece_count * sizeof(kernels::GraphPart));
    walked = take(piece_count * sizeof(WalkedPiece));
    nodes = {reinterpret_cast<uint32_t*>(take(kMostFound * sizeof(uint32_t))), kMostFound};
    scores = {reinterpret_cast<float*>(take(kMostFound * sizeof(float))), kMostFound};
    // One after the other.
    const size_t bytes =
        std::max({WalkBytes(shape, token_count, piece_count),
                  kernels::ExactScoreScratchBytes(shape.group_size(), shape.key_dim),
                  kernels::ScoreSelectScratchBytes(shape.group_size(), token_count)});
    shared = {take(bytes), bytes};
  }

  std::span<std::byte> columns;
  std::span<uint32_t> positions;  // of the candidates that are scored
  std::span<float> logits;        // their logits, [G, candidates]
  std::byte* spans = nullptr;
  std::byte* parts = nullptr;  // graphs that are walked
  std::byte* walked = nullptr;
  std::span<uint32_t> nodes;  // of one walk
  std::span<float> scores;
  std::span<std::byte> shared;
  size_t total_bytes = 0;
};

// Collects the candidates of one kv head.
class Collector {
 public:
  Collector(const HeadSearch& search, uint32_t wanted, const Work& work, ColumnSet& columns)
      : search_(search), wanted_(wanted), work_(work), columns_(columns) {}

  void Run() {
    uint32_t column = 0;
    for (const SearchPiece& piece : search_.plan.pieces) {
      Add(piece, column);
      column += piece.token_count();
    }
    for (uint32_t row = 0; row < search_.shape.group_size(); ++row) Walk(row);
  }

 private:
  // Makes a piece a part of the walks, or adds all of its columns.
  void Add(const SearchPiece& piece, uint32_t first_column) {
    const uint32_t end_column = first_column + piece.token_count();
    const IndexDataHeader& header = *piece.segment->index_data;
    const PositionRange closed{
        header.counted_begin,
        std::min(header.counted_end.load(std::memory_order_acquire), header.slot_capacity)};
    const uint32_t begin = std::max(piece.slot_begin, closed.begin);
    const uint32_t end = std::min(piece.slot_end, closed.end);
    if (begin >= end || end - begin < (closed.end - closed.begin) / kLeastPart ||
        search_.plan.token_count < kTokensPerWanted * wanted_ || wanted_ > kMostWanted ||
        closed.end - closed.begin > kernels::kMaxGraphNodes - node_count_) {
      columns_.AddRange(first_column, end_column);
      return;
    }
    columns_.AddRange(first_column, first_column + begin - piece.slot_begin);
    columns_.AddRange(first_column + end - piece.slot_begin, end_column);
    new (Walked() + part_count_)
        WalkedPiece{.header = &header,
                    .first_column = int64_t{first_column} + closed.begin - piece.slot_begin,
                    .first_node = node_count_};
    new (Parts() + part_count_) kernels::GraphPart{
        .graph = {.shape = {.node_count = closed.end - closed.begin,
                            .max_degree = 2 * GraphParametersOf(search_.index).degree}},
        .rows =
            piece.segment->rows[search_.kv_head] + size_t{closed.begin} * search_.shape.row_bytes,
        .begin = begin - closed.begin,
        .end = end - closed.begin};
    ++part_count_;
    node_count_ += closed.end - closed.begin;
  }

  // Returns the graph of a row of queries, counted within the stored kv head: rows are those of
  // query tokens and then query heads.
  uint32_t GraphOf(const IndexDataHeader& header, uint32_t row) const {
    const auto graphs = static_cast<uint32_t>(header.head_stride_bytes /
                                              std::max<uint64_t>(1, header.plane_stride_bytes));
    const uint32_t own = std::max(1u, graphs / search_.sharing_heads);
    return search_.sharing_head * own + row % own;
  }

  // Adds the columns that a walk for one query finds.
  void Walk(uint32_t row) {
    if (part_count_ == 0) return;
    // The first lines of all graphs are read together, because none of them is in a cache.
    for (uint32_t i = 0; i < part_count_; ++i) {
      const IndexDataHeader& header = *Walked()[i].header;
      kernels::GraphView& graph = Parts()[i].graph;
      graph.bytes = GraphBegin(header, search_.kv_head, GraphOf(header, row));
      for (size_t at = 0; at < sizeof(kernels::GraphHeader); at += kernels::kGraphAlignment) {
        __builtin_prefetch(graph.bytes + at);
      }
    }
    for (uint32_t i = 0; i < part_count_; ++i) {
      kernels::GraphView& graph = Parts()[i].graph;
      graph.entry_count = std::min(graph.EntryCount(), kernels::kMaxGraphEntries);
    }
    const LayerShape& shape = search_.shape;
    const uint32_t found = FoundOf(wanted_, shape.group_size());
    const kernels::GraphSearchResult result = kernels::SearchGraph(
        search_.exec, {.parts = {Parts(), part_count_},
                       .dtype = shape.dtype,
                       .key_dim = shape.key_dim,
                       .row_stride_bytes = shape.row_bytes,
                       .scale = shape.scale,
                       .query = search_.queries.subspan(size_t{row} * shape.key_dim, shape.key_dim),
                       .beam_size = BeamOf(wanted_),
                       .nodes = work_.nodes.first(found),
                       .scores = work_.scores.first(found),
                       .scratch = work_.shared});
    for (const uint32_t node : work_.nodes.first(result.found_count)) {
      const WalkedPiece& piece = PieceOf(node);
      columns_.Add(static_cast<uint32_t>(piece.first_column + node - piece.first_node));
    }
  }

  const WalkedPiece& PieceOf(uint32_t node) const {
    const WalkedPiece* const after = std::upper_bound(
        Walked(), Walked() + part_count_, node,
        [](uint32_t of, const WalkedPiece& piece) { return of < piece.first_node; });
    return after[-1];
  }

  kernels::GraphPart* Parts() const { return reinterpret_cast<kernels::GraphPart*>(work_.parts); }
  WalkedPiece* Walked() const { return reinterpret_cast<WalkedPiece*>(work_.walked); }

  const HeadSearch& search_;
  const uint32_t wanted_;
  const Work& work_;
  ColumnSet& columns_;
  uint32_t part_count_ = 0;
  uint32_t node_count_ = 0;
};

// Writes the positions of a set of columns of a plan; returns how many there are.
uint32_t WritePositions(const SearchPlan& plan, const ColumnSet& columns,
                        std::span<uint32_t> positions) {
  uint32_t count = 0, first_column = 0;
  const SearchPiece* piece = plan.pieces.data();
  columns.ForEach([&](uint32_t column) {
    while (column - first_column >= piece->token_count()) first_column += piece++->token_count();
    positions[count++] = piece->first_position() + column - first_column;
  });
  return count;
}

std::span<const kernels::RowSpan> SpansOf(const HeadSearch& search, std::byte* memory) {
  auto* const spans = reinterpret_cast<kernels::RowSpan*>(memory);
  size_t count = 0;
  for (const SearchPiece& piece : search.plan.pieces) {
    new (spans + count++)
        kernels::RowSpan{.rows = piece.segment->rows[search.kv_head] +
                                 size_t{piece.slot_begin} * search.shape.row_bytes,
                         .token_count = piece.token_count(),
                         .first_position = piece.first_position()};
  }
  return {spans, count};
}

}  // namespace

const IndexTypeInfo& GraphIndex::info() const {
  static constexpr IndexParameter kParameters[] = {
      {.name = "degree",
       .text = "neighbours of a key by projection (M); twice as many in all",
       .least = 4,
       .most = 63,
       .default_value = kDefaultDegree},
      {.name = "list_size",
       .text = "nearest keys of a query sample (N_q)",
       .least = 8,
       .most = 256,
       .default_value = kDefaultListSize},
      {.name = "samples",
       .text = "query samples of a query head from which graphs are built, at most",
       .least = 32,
       .most = 1024,
       .default_value = kDefaultSampleCount}};
  static constexpr IndexTypeInfo kInfo = {
      .kind = IndexKind::kGraph,
      .name = "graph",
      .text = "RetrievalAttention: a graph over keys for each query head; needs query samples.",
      .parameters = kParameters,
  };
  return kInfo;
}

GraphParameters GraphParametersOf(const IndexDescriptor& index) {
  return {.degree = index.subspace_count,
          .list_size = index.bits,
          .sample_count = static_cast<uint32_t>(index.layout)};
}

uint32_t GraphIndex::ValueOf(const IndexDescriptor& index, size_t parameter) const {
  const GraphParameters values = GraphParametersOf(index);
  return parameter == 0 ? values.degree : parameter == 1 ? values.list_size : values.sample_count;
}

void GraphIndex::SetValue(IndexDescriptor* index, size_t parameter, uint32_t value) const {
  if (parameter == 0) index->subspace_count = value;
  if (parameter == 1) index->bits = value;
  if (parameter == 2) index->layout = static_cast<SubspaceLayout>(value);
}

Refusal GraphIndex::CheckFit(const IndexDescriptor&, uint32_t, const char*) const { return {}; }

std::string GraphIndex::NameOf(const IndexDescriptor& index) const {
  const GraphParameters values = GraphParametersOf(index);
  return "graph degree=" + std::to_string(values.degree) +
         " list_size=" + std::to_string(values.list_size) +
         " samples=" + std::to_string(values.sample_count);
}

SearchScratch GraphIndex::ScoreScratch(const LayerShape& shape, const IndexDescriptor&,
                                       const SearchPlanSize&) const {
  return {.work_bytes = kernels::ExactScoreScratchBytes(shape.group_size(), shape.key_dim)};
}

void GraphIndex::Score(const HeadSearch& search, const SearchPiece& piece, float* logits,
                       size_t stride) const {
  ScoreRowsOf(search, piece, logits, stride);
}

SearchScratch GraphIndex::SelectScratch(const kernels::Exec&, const LayerShape& shape,
                                        const IndexDescriptor&, const SearchPlanSize& plan) const {
  return {.work_bytes = Work(shape, plan.token_count, plan.piece_count, nullptr).total_bytes};
}

void GraphIndex::Select(const HeadSearch& search, GroupRule rule,
                        std::span<uint32_t> positions) const {
  const LayerShape& shape = search.shape;
  const SearchPlan& plan = search.plan;
  const auto wanted = static_cast<uint32_t>(positions.size());
  const Work work(shape, plan.token_count, plan.pieces.size(), search.work.data());
  ColumnSet columns(plan.token_count, work.columns);
  Collector collector(search, wanted, work, columns);
  collector.Run();
  columns.Fill(plan.token_count, wanted);
  const uint32_t count = WritePositions(plan, columns, work.positions);
  const size_t group = shape.group_size();
  const std::span<float> logits = work.logits.first(group * count);
  kernels::ExactScoresAt(search.exec, {.dtype = shape.dtype,
                                       .key_dim = shape.key_dim,
                                       .row_stride_bytes = shape.row_bytes,
                                       .group_size = shape.group_size(),
                                       .token_count = count,
                                       .scale = shape.scale,
                                       .queries = search.queries,
                                       .spans = SpansOf(search, work.spans),
                                       .positions = work.positions.first(count),
                                       .score_stride = count,
                                       .scores = logits,
                                       .scratch = work.shared});
  CapLogits(shape, logits);
  const kernels::ScoreSpan span{
      .logits = logits.data(), .head_stride = count, .token_count = count};
  kernels::ScoreSelect(search.exec, {.group_size = shape.group_size(),
                                     .rule = rule,
                                     .spans = {&span, 1},
                                     .positions = positions,
                                     .scratch = work.shared});
  for (uint32_t& position : positions) position = work.positions[position];
}

}  // namespace pqcached::kvstore
