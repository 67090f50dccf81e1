// Implements the calls that select, score, fetch and attend.
#include <algorithm>
#include <cstddef>

#include "client/abi/read_path.h"
#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/local/read.h"
#include "client/step/handles.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

using LongLong = unsigned long long;  // for %llu

// Reads the fields that all queries share. Errors use the field names of the header.
pqc_status ReadQuery(const pqc_sequence* sequence, const pqc_query* caller_query, QueryView* view) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  pqc_query query;
  RETURN_IF_ERROR(ReadStruct(caller_query, "query", &query));
  view->sequence_id = sequence->state->sequence_id;
  view->layer = query.layer;
  view->query_position = query.query_position;
  RETURN_IF_ERROR(FindLayer(*sequence->state->cache, query.layer, "query.layer", &view->shape));
  return ReadQueries(query.queries, view->shape, &view->queries);
}

void CopyCounts(const pqc_positions& from, pqc_positions* to) {
  to->kv_heads = from.kv_heads;
  to->count = from.count;
  to->sink_tokens = from.sink_tokens;
  to->window_tokens = from.window_tokens;
}

void SetCounts(const LayerShape& shape, const LocalSelected& selected, pqc_positions* out) {
  out->kv_heads = shape.kv_heads;
  out->count = selected.count;
  out->sink_tokens = selected.sink_tokens;
  out->window_tokens = selected.window_tokens;
}

pqc_status CopyPositions(const Scratch& scratch, pqc_positions* out) {
  if (!out->positions) return PQC_OK;
  const uint64_t needed = uint64_t{out->kv_heads} * out->count;
  RETURN_IF_ERROR(CheckCapacity("capacity", out->capacity, needed));
  std::copy_n(scratch.positions.data(), needed, out->positions);
  return PQC_OK;
}

pqc_status SelectMapped(SequenceState& state, const QueryView& query, const pqc_selection& terms,
                        pqc_positions* out, bool* remote_instead) {
  kvstore::Selection selection;
  RETURN_IF_ERROR(ToTerms(terms, state.cache->default_index, &selection));
  ClientState& client = *state.cache->client;
  ScratchPool::Loan scratch(client.scratch);
  LocalSelected selected;
  RETURN_IF_ERROR(ReadMapped(
      state,
      [&](const Pinned& pinned) {
        return SelectLocally(pinned, query, selection, client.local->workers().parallel_for(),
                             *scratch, &selected);
      },
      remote_instead));
  SetCounts(query.shape, selected, out);
  return CopyPositions(*scratch, out);
}

pqc_status ScoreMapped(SequenceState& state, const QueryView& query, const pqc_index& index,
                       pqc_token_range tokens, const ScoresOut& out, bool* remote_instead) {
  kvstore::IndexDescriptor descriptor;
  RETURN_IF_ERROR(ToIndex(index, state.cache->default_index, &descriptor));
  ClientState& client = *state.cache->client;
  ScratchPool::Loan scratch(client.scratch);
  return ReadMapped(
      state,
      [&](const Pinned& pinned) {
        return ScoreLocally(pinned, query, descriptor, tokens,
                            client.local->workers().parallel_for(), *scratch, out);
      },
      remote_instead);
}

// Exactly one of `terms` and `positions` is given.
pqc_status AttendMapped(SequenceState& state, const QueryView& query, const pqc_selection* terms,
                        const PositionsView* positions, pqc_attention* out, bool* remote_instead) {
  kvstore::Selection selection;
  if (terms) {
    RETURN_IF_ERROR(ToTerms(*terms, state.cache->default_index, &selection));
  }
  ClientState& client = *state.cache->client;
  const kvstore::ParallelFor& parallel = client.local->workers().parallel_for();
  ScratchPool::Loan scratch(client.scratch);
  LocalSelected selected;
  RETURN_IF_ERROR(ReadMapped(
      state,
      [&](const Pinned& pinned) {
        if (positions) {
          selected.count = positions->count;
          return AttendPositionsLocally(pinned, query, *positions, parallel, *scratch, out->output,
                                        out->lse);
        }
        RETURN_IF_ERROR(SelectLocally(pinned, query, selection, parallel, *scratch, &selected));
        return AttendLocally(pinned, query, selected.count, parallel, *scratch, out->output,
                             out->lse);
      },
      remote_instead));
  SetCounts(query.shape, selected, &out->selected);
  if (!positions) return CopyPositions(*scratch, &out->selected);
  pqc_positions& same = out->selected;
  if (!same.positions) return PQC_OK;
  const uint64_t needed = uint64_t{same.kv_heads} * same.count;
  RETURN_IF_ERROR(CheckCapacity("capacity", same.capacity, needed));
  std::copy_n(positions->positions, needed, same.positions);
  return PQC_OK;
}

pqc_status Select(pqc_sequence* sequence, const pqc_query* query, const pqc_selection* selection,
                  pqc_positions* out) {
  QueryView view;
  RETURN_IF_ERROR(ReadQuery(sequence, query, &view));
  pqc_selection terms;
  RETURN_IF_ERROR(ReadSelection(selection, &terms));
  if (!out) return Fail(PQC_INVALID_ARGUMENT, "out", "must not be NULL");
  RETURN_IF_ERROR(CheckMemberSize(*out, "out"));
  pqc_positions selected = *out;
  SequenceState& state = *sequence->state;
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*state.cache->client, &remote));
  if (state.local) {
    bool remote_instead = false;
    const pqc_status status = SelectMapped(state, view, terms, &selected, &remote_instead);
    if (status == PQC_OK || status == PQC_OUT_OF_RANGE) CopyCounts(selected, out);
    if (!remote_instead) return status;
  }
  RefusalBuffer error;
  const TopKItem item{.query = view, .selection = &terms, .out = &selected};
  const pqc_status status = remote->TopK(&item, 1, &error);
  if (status == PQC_OK || status == PQC_OUT_OF_RANGE) CopyCounts(selected, out);
  return Report(status, error, {{"items[0]", ""}});
}

pqc_status CheckRange(pqc_token_range tokens) {
  if (tokens.begin < tokens.end && tokens.end <= kMaxSequenceTokens) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, "tokens", "[%llu, %llu), must not be empty nor go beyond 2^30",
              LongLong{tokens.begin}, LongLong{tokens.end});
}

pqc_status Score(pqc_sequence* sequence, const pqc_query* query, const pqc_index* caller_index,
                 pqc_token_range tokens, const ScoresOut& out, uint64_t logit_capacity) {
  QueryView view;
  RETURN_IF_ERROR(ReadQuery(sequence, query, &view));
  pqc_index index{};
  if (caller_index) index = *caller_index;
  RETURN_IF_ERROR(CheckIndex(index, "index"));
  RETURN_IF_ERROR(CheckRange(tokens));
  if (view.queries.shape[0] != 1) {
    return Fail(PQC_INVALID_ARGUMENT, "query.queries.shape[0]", "query_length %llu, must be 1 here",
                LongLong{view.queries.shape[0]});
  }
  if (out.logits) {
    const uint64_t needed = view.shape.query_heads * (tokens.end - tokens.begin);
    RETURN_IF_ERROR(CheckCapacity("logit_capacity", logit_capacity, needed));
  }
  SequenceState& state = *sequence->state;
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*state.cache->client, &remote));
  if (state.local) {
    bool remote_instead = false;
    const pqc_status status = ScoreMapped(state, view, index, tokens, out, &remote_instead);
    if (!remote_instead) return status;
  }
  RefusalBuffer error;
  return Report(remote->Score(view, index, tokens, out, &error), error, {{"items[0]", ""}});
}

uint64_t RowBytes(const LayerShape& shape, pqc_row_part part) {
  const uint64_t dims =
      (part == PQC_VALUE ? 0u : shape.key_dim) + (part == PQC_KEY ? 0u : shape.value_dim);
  return dims * (shape.dtype == PQC_F32 ? 4u : 2u);
}

pqc_status ReadFetch(const pqc_sequence* sequence, uint32_t layer, pqc_row_part part,
                     const void* out, FetchView* view) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  if (!out) return Fail(PQC_INVALID_ARGUMENT, "out", "must not be NULL");
  if (const uint32_t number = RawEnum(part); number > PQC_VALUE) {
    return Fail(PQC_INVALID_ARGUMENT, "part", "%u, must be PQC_ROW, PQC_KEY or PQC_VALUE", number);
  }
  view->sequence_id = sequence->state->sequence_id;
  view->layer = layer;
  view->part = part;
  return FindLayer(*sequence->state->cache, layer, "layer", &view->shape);
}

pqc_status FetchBlocks(pqc_sequence* sequence, uint32_t layer, pqc_token_range tokens,
                       pqc_row_part part, void* out, uint64_t out_bytes) {
  FetchView view;
  RETURN_IF_ERROR(ReadFetch(sequence, layer, part, out, &view));
  RETURN_IF_ERROR(CheckRange(tokens));
  const uint64_t needed =
      view.shape.kv_heads * (tokens.end - tokens.begin) * RowBytes(view.shape, part);
  RETURN_IF_ERROR(CheckCapacity("out_bytes", out_bytes, needed));
  SequenceState& state = *sequence->state;
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*state.cache->client, &remote));
  if (state.local) {
    bool remote_instead = false;
    const pqc_status status = ReadMapped(
        state,
        [&](const Pinned& pinned) {
          return FetchBlocksLocally(pinned, view, tokens, static_cast<std::byte*>(out));
        },
        &remote_instead);
    if (!remote_instead) return status;
  }
  RefusalBuffer error;
  return Report(remote->FetchBlocks(view, tokens, static_cast<std::byte*>(out), &error), error,
                {{"ranges[0]", "tokens"}});
}

pqc_status CheckPositionList(const PositionsView& positions) {
  if (!positions.positions) return Fail(PQC_INVALID_ARGUMENT, "positions", "must not be NULL");
  if (positions.count >= 1 && positions.count <= kMaxSequenceTokens) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, "count", "%u, must be 1 to 2^30", positions.count);
}

pqc_status FetchTokens(pqc_sequence* sequence, uint32_t layer, const PositionsView& positions,
                       pqc_row_part part, void* out, uint64_t out_bytes) {
  FetchView view;
  RETURN_IF_ERROR(ReadFetch(sequence, layer, part, out, &view));
  RETURN_IF_ERROR(CheckPositionList(positions));
  const uint64_t needed =
      uint64_t{view.shape.kv_heads} * positions.count * RowBytes(view.shape, part);
  RETURN_IF_ERROR(CheckCapacity("out_bytes", out_bytes, needed));
  SequenceState& state = *sequence->state;
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*state.cache->client, &remote));
  if (state.local) {
    bool remote_instead = false;
    const pqc_status status = ReadMapped(
        state,
        [&](const Pinned& pinned) {
          return FetchTokensLocally(pinned, view, positions, static_cast<std::byte*>(out));
        },
        &remote_instead);
    if (!remote_instead) return status;
  }
  RefusalBuffer error;
  return Report(remote->FetchTokens(view, positions, static_cast<std::byte*>(out), &error), error);
}

// Exactly one of `selection` and `positions` is given.
pqc_status Attend(pqc_sequence* sequence, const pqc_query* query, const pqc_selection* selection,
                  const PositionsView* positions, pqc_attention* caller_out) {
  QueryView view;
  RETURN_IF_ERROR(ReadQuery(sequence, query, &view));
  pqc_attention out;
  RETURN_IF_ERROR(ReadStruct(caller_out, "out", &out));
  RETURN_IF_ERROR(CheckMemberSize(out.selected, "out.selected"));
  if (!out.output) return Fail(PQC_INVALID_ARGUMENT, "out.output", "must not be NULL");
  if (!out.lse) return Fail(PQC_INVALID_ARGUMENT, "out.lse", "must not be NULL");
  const uint64_t rows = view.queries.shape[0] * view.shape.query_heads;
  const uint64_t outputs = rows * view.shape.value_dim;
  RETURN_IF_ERROR(CheckCapacity("out.output_capacity", out.output_capacity, outputs));
  RETURN_IF_ERROR(CheckCapacity("out.lse_capacity", out.lse_capacity, rows));
  SequenceState& state = *sequence->state;
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*state.cache->client, &remote));
  if (state.local) {
    bool remote_instead = false;
    const pqc_status status =
        AttendMapped(state, view, selection, positions, &out, &remote_instead);
    if (status == PQC_OK || status == PQC_OUT_OF_RANGE) {
      CopyCounts(out.selected, &caller_out->selected);
    }
    if (!remote_instead) return status;
  }
  RefusalBuffer error;
  const AttendItem item{.query = view, .selection = selection, .positions = positions, .out = &out};
  const pqc_status status = remote->Attend(&item, 1, &error);
  if (status == PQC_OK || status == PQC_OUT_OF_RANGE) {
    CopyCounts(out.selected, &caller_out->selected);
  }
  return Report(status, error,
                {{"items[0].positions.positions", "positions"},
                 {"items[0].positions.count", "count"},
                 {"items[0]", ""}});
}

pqc_status AttendSelected(pqc_sequence* sequence, const pqc_query* query,
                          const pqc_selection* selection, pqc_attention* out) {
  pqc_selection terms;
  RETURN_IF_ERROR(ReadSelection(selection, &terms));
  return Attend(sequence, query, &terms, nullptr, out);
}

pqc_status AttendPositions(pqc_sequence* sequence, const pqc_query* query,
                           const PositionsView& positions, pqc_attention* out) {
  RETURN_IF_ERROR(CheckPositionList(positions));
  return Attend(sequence, query, nullptr, &positions, out);
}

}  // namespace
}  // namespace pqcached::client

using pqcached::client::Call;
using pqcached::client::PositionsView;

extern "C" {

pqc_status pqc_topk(pqc_sequence* sequence, const pqc_query* query, const pqc_selection* selection,
                    pqc_positions* out) {
  return Call([&] { return pqcached::client::Select(sequence, query, selection, out); });
}

pqc_status pqc_score(pqc_sequence* sequence, const pqc_query* query, const pqc_index* index,
                     pqc_token_range tokens, float* logits, uint64_t logit_capacity, float* max,
                     float* sum_exp) {
  return Call([&] {
    const pqcached::client::ScoresOut out{logits, max, sum_exp};
    return pqcached::client::Score(sequence, query, index, tokens, out, logit_capacity);
  });
}

pqc_status pqc_fetch_blocks(pqc_sequence* sequence, uint32_t layer, pqc_token_range tokens,
                            pqc_row_part part, void* out, uint64_t out_bytes) {
  return Call(
      [&] { return pqcached::client::FetchBlocks(sequence, layer, tokens, part, out, out_bytes); });
}

pqc_status pqc_fetch_tokens(pqc_sequence* sequence, uint32_t layer, const uint32_t* positions,
                            uint32_t count, pqc_row_part part, void* out, uint64_t out_bytes) {
  return Call([&] {
    return pqcached::client::FetchTokens(sequence, layer, PositionsView{positions, count}, part,
                                         out, out_bytes);
  });
}

pqc_status pqc_attend(pqc_sequence* sequence, const pqc_query* query,
                      const pqc_selection* selection, pqc_attention* out) {
  return Call([&] { return pqcached::client::AttendSelected(sequence, query, selection, out); });
}

pqc_status pqc_attend_positions(pqc_sequence* sequence, const pqc_query* query,
                                const uint32_t* positions, uint32_t count, pqc_attention* out) {
  return Call([&] {
    return pqcached::client::AttendPositions(sequence, query, PositionsView{positions, count}, out);
  });
}

}  // extern "C"
