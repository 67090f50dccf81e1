// Resolve: computes candidate ranges and k from the terms of a selection, and checks positions that
// callers give in its place.
//
// Pure; thread-safe.
#ifndef PQCACHED_KVSTORE_READ_RESOLVE_H_
#define PQCACHED_KVSTORE_READ_RESOLVE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvstore/read/layer_view.h"
#include "kvstore/read/refusal.h"
#include "kvstore/read/selection.h"

namespace pqcached::kvstore {

struct ResolvedSelection {
  // kInvalidArgument: a field of the selection; kOutOfRange: candidates that are not stored yet.
  // Fields begin with "selection." or are "query.query_position".
  Refusal refusal;

  std::vector<PositionRange> candidates;  // ascending, disjoint, non-empty
  std::vector<PositionRange> own;         // sink and window, likewise; may be not stored
  uint32_t candidate_count = 0;
  uint32_t select_count = 0;     // k; by attention mass at most
  uint32_t least_count = 0;      // k; by attention mass at least
  uint32_t shortlist_count = 0;  // candidates that the index proposes: k without re-ranking
  // Number of sink tokens and of local-window tokens that exist and are not excluded. The engine
  // attends to them itself.
  uint32_t sink_tokens = 0;
  uint32_t window_tokens = 0;

  // Returns whether all candidates are selected, for which nothing is scored.
  bool takes_all() const { return least_count == candidate_count; }
};

// Returns how many candidates the index proposes for the k of `resolved`.
uint32_t ShortlistCount(const Selection& selection, const ResolvedSelection& resolved);

// Returns the terms of a selection in a layer of that kind: the given ones where rows are selected;
// terms that take all candidates, whatever the budget and the index, in a full layer; terms that
// take no tokens, with neither sink nor window, in a window layer.
Selection TermsOf(LayerKind kind, const Selection& selection);

// Resolves the selection for a query at `query_position` of a layer that holds `stored_tokens`
// rows. With n = query_position + 1, candidates are [sink_tokens, n - window_tokens) without the
// excluded ranges. A query of several tokens (speculative decoding) has the position of its first
// token and one selection: its later tokens belong to the engine's local window, which grows by
// their number.
ResolvedSelection Resolve(const Selection& selection, uint64_t query_position,
                          uint32_t stored_tokens);
// Does the same and reuses the memory of an earlier result.
void Resolve(const Selection& selection, uint64_t query_position, uint32_t stored_tokens,
             ResolvedSelection* resolved);

// Checks that a range of tokens is not empty and that all of it is stored. Errors:
// kInvalidArgument, kOutOfRange ("tokens")
Refusal CheckTokens(TokenRange tokens, uint32_t stored);
// Checks positions [kv_heads, count]: stored, and with `ascending` in order within a set. Errors:
// kInvalidArgument, kOutOfRange (positions[i])
Refusal CheckPositions(const LayerView& view, std::span<const uint32_t> positions, bool ascending);
// Checks the ascending list of one head. Errors: likewise, with fields "lists[head][i]"
Refusal CheckList(std::span<const uint32_t> list, size_t head, uint32_t stored);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_RESOLVE_H_
