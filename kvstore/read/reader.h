// Reader: selects, scores, copies and attends over the rows of one sequence.
//
// A client reads mapped memory, the sidecar reads a snapshot. Each is a LayerSource; all checks and
// all work behind it are this one class. Refusals name fields in the words of the proto, relative
// to the item of the call: "query.query_position", "selection.index", "tokens", "positions[3]".
//
//     SnapshotSource source(reading);
//     Reader reader(source, exec, parallel, scratch);
//     SelectedTokens selected;
//     RETURN_IF_ERROR(ToStatus(reader.TopK(query, selection, &selected)));
//     // scratch.positions has [kv_heads, selected.count]
#ifndef PQCACHED_KVSTORE_READ_READER_H_
#define PQCACHED_KVSTORE_READ_READER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "kernels/base/exec.h"
#include "kvstore/read/attention.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/refusal.h"
#include "kvstore/read/scratch.h"
#include "kvstore/read/selection.h"

namespace pqcached::kvstore {

// A layer to open, the index over it (flat: rows alone), and the names of both in refusals.
struct LayerRequest {
  uint32_t layer = 0;
  IndexDescriptor index = {};
  const char* layer_field = "layer";
  const char* index_field = "index";
};

// Gives the rows of one sequence, layer by layer.
class LayerSource {
 public:
  // Returns the kind of a layer; kSelected for a layer that Open refuses.
  virtual LayerKind KindOf(uint32_t layer) const = 0;
  // Opens the visible rows of a layer, with codes and centroids in the segments where the index is
  // ready. The view is valid until the next call, and while the source exists.
  //
  // Errors: kInvalidArgument (layer; index, by CheckIndex), kFailedPrecondition (the sequence has
  // no such index, or the layer is of a kind that has none), kDataLoss, kInternal
  virtual Refusal Open(const LayerRequest& request, LayerView* view) = 0;
  // Returns the sequence's first index of a kind, if it has one.
  virtual std::optional<IndexDescriptor> FindIndex(IndexKind kind) const = 0;

 protected:
  ~LayerSource() = default;
};

// Refuses (kFailedPrecondition) an index of a layer whose kind has none.
Refusal CheckKind(LayerKind kind, const LayerRequest& request);
// Refuses (kFailedPrecondition, `field`) a layer of values only, which a query cannot read.
Refusal CheckKeys(const LayerShape& shape, uint32_t layer, const char* field);

// Refuses (kAborted) when a segment with candidates has no codes yet.
Refusal CheckCoded(const LayerView& view, const LayerRequest& request,
                   std::span<const PositionRange> candidates);

struct SelectedTokens {
  uint32_t count = 0;  // per set: Selection::SetCount
  uint32_t sink_tokens = 0;
  uint32_t window_tokens = 0;
};

struct ScoresOut {
  float* logits = nullptr;   // [query_heads, tokens], or null
  float* max = nullptr;      // [query_heads], or null
  float* sum_exp = nullptr;  // [query_heads], or null
};

// Rows of all kv heads at consecutive positions.
struct RowRun {
  uint32_t first_position = 0;
  uint32_t token_count = 0;
  std::span<const std::byte* const> rows;  // [kv_heads]: the row of the first position
};

// Bytes [begin, begin + size) of a row, which are `dim` elements.
struct PartBytes {
  uint32_t dim = 0;
  size_t begin = 0;
  size_t size = 0;
};
PartBytes BytesOfPart(const LayerShape& shape, RowPart part);

// A query takes all candidates of a full layer and no tokens of a window layer (TermsOf).
//
// Outputs are overwritten, and unspecified after a refusal. Thread-compatible; no call waits.
class Reader {
 public:
  // REQUIRES: all arguments outlive the reader.
  Reader(LayerSource& source, const kernels::Exec& exec, const ParallelFor& parallel,
         ReadScratch& scratch)
      : source_(source), exec_(exec), parallel_(parallel), scratch_(scratch) {}

  // Selects tokens into scratch.positions, [sets, count].
  //
  // Errors: kInvalidArgument (a field), kOutOfRange (candidates that are not stored), kAborted
  // (candidates without codes), those of LayerSource
  Refusal TopK(const LayerQuery& query, const Selection& selection, SelectedTokens* selected);
  // Selects pages of tokens; writes the lists, [out.list_count, out.capacity], without padding.
  // REQUIRES: room for the lists that PlanPages plans.
  //
  // Errors: as TopK
  Refusal TopPages(const LayerQuery& query, const Selection& selection, const PageTerms& terms,
                   const PageLists& out);
  // Selects as TopK, and attends to the selected tokens; with a tail estimate, also to clusters of
  // the others. Without `want_positions`, scratch.positions is unspecified.
  //
  // Errors: as TopK, and kFailedPrecondition (selection.tail_estimate: there are no clusters)
  Refusal Attend(const LayerQuery& query, const Selection& selection, bool want_positions,
                 SelectedTokens* selected, const AttentionOut& out);
  // Attends to positions [sets, count], ascending per set: a set for each kv head, or one for each
  // query head. The query may have logits.
  //
  // Errors: kInvalidArgument (the number of sets, the order; "logits"), kOutOfRange (not stored),
  // those of LayerSource
  Refusal AttendPositions(const LayerQuery& query, std::span<const uint32_t> positions,
                          uint32_t count, const AttentionOut& out);
  // Attends to lists of positions, one for each kv head or for each query head, which are ascending
  // and may be empty. The query may have logits. REQUIRES: as many lists as heads of one kind.
  //
  // Errors: as AttendPositions, with fields "lists[head][i]"
  Refusal AttendLists(const LayerQuery& query, std::span<const std::span<const uint32_t>> lists,
                      const AttentionOut& out);
  // Attends to the rows of a range, which may be empty, causally by query position.
  //
  // Errors: kInvalidArgument (the range), kOutOfRange (not stored), those of LayerSource
  Refusal AttendRange(const LayerQuery& query, TokenRange tokens, const AttentionOut& out);
  // Computes the logits of a range of tokens under an index. REQUIRES: query_length is 1.
  Refusal Score(const LayerQuery& query, const IndexDescriptor& index, TokenRange tokens,
                const ScoresOut& out);
  // Copies a part of the rows of a range of tokens to `out`, [kv_heads, tokens, part].
  Refusal FetchBlocks(uint32_t layer, TokenRange tokens, RowPart part, std::span<std::byte> out);
  // Copies a part of the rows at positions [kv_heads, count], in any order, to `out`, [kv_heads,
  // count, part].
  Refusal FetchTokens(uint32_t layer, std::span<const uint32_t> positions, RowPart part,
                      std::span<std::byte> out);
  // Checks that the rows of a range of tokens, which may not be empty, are stored in a layer.
  //
  // Errors: kInvalidArgument (the range), kOutOfRange (not stored), those of LayerSource
  Refusal CheckStored(uint32_t layer, TokenRange tokens);
  // Calls `visit` with the rows of a range of tokens in runs, each position in one run, on all
  // threads when there are many.
  //
  // Errors: those of CheckStored
  Refusal VisitRows(uint32_t layer, TokenRange tokens,
                    const std::function<void(const RowRun& run)>& visit);

 private:
  // Opens the layer of a query.
  Refusal Open(const LayerQuery& query, const LayerRequest& request, LayerView* view);
  // Gathers the queries in scratch, and makes the view's groups those of all query tokens.
  Refusal TakeQueries(const LayerQuery& query, LayerView* view);
  // Opens the layer of a selection, and computes its candidates and counts.
  Refusal ResolveIn(const LayerQuery& query, const Selection& selection, LayerView* view,
                    SelectedTokens* selected);
  // Selects tokens of an opened layer into scratch.positions.
  // With `want_logits`, scratch.logits receives what a re-ranking has computed; otherwise nothing.
  Refusal Select(const LayerQuery& query, const Selection& selection, bool want_logits,
                 LayerView* view);
  // Computes the weights of the stored rows of sink and window, in scratch.own.
  void WeighOwn(const LayerView& view);
  // Finds the k of a budget of attention mass. `view`: as opened.
  Refusal CountTokens(const LayerQuery& query, const Selection& selection, LayerView view);
  // Computes the logits of all candidates, for SelectPages, in scratch.pages.logits.
  void ScoreCandidates(const LayerView& view, const IndexDescriptor& index);
  // Lists all candidates in scratch.positions.
  void ListCandidates(uint32_t kv_heads);
  Refusal AttendToRanges(const LayerView& view, const LayerQuery& query,
                         std::span<const PositionRange> rows, const AttentionOut& out);
  // The tokens of an attention, as in AttendLayerArgs.
  struct Chosen {
    std::span<const uint32_t> positions = {};
    std::span<const std::span<const uint32_t>> lists = {};
    std::span<const float> logits = {};
  };
  // Gathers the logits of a query in scratch, by kv head: [query_length, group_size, positions].
  // REQUIRES: the view's groups are those of one query token.
  Refusal TakeLogits(const LayerQuery& query, const LayerView& view, const Chosen& chosen);
  // Attends to checked positions or lists, for a query with logits or with queries.
  Refusal AttendChosen(const LayerQuery& query, Chosen chosen, LayerView* view,
                       const AttentionOut& out);
  // Attends to tokens; the result is in scratch.output and scratch.lse.
  void AttendOver(const LayerView& view, const LayerQuery& query, const Chosen& chosen);
  // Merges the estimate for candidates that scratch.positions does not have with that result.
  Refusal EstimateTail(const LayerQuery& query, const Selection& selection,
                       const IndexDescriptor& clusters);
  // Stores the result.
  void StoreAttention(const LayerView& view, const LayerQuery& query, const AttentionOut& out);
  // Returns the threads for work over that many tokens.
  const ParallelFor& ThreadsFor(uint64_t tokens) const;

  LayerSource& source_;
  const kernels::Exec& exec_;
  const ParallelFor& parallel_;
  ReadScratch& scratch_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_READER_H_
