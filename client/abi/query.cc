// Implements the calls that select, score, fetch and attend.
#include <algorithm>
#include <cstddef>

#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/step/handles.h"
#include "client/step/read_backend.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

using LongLong = unsigned long long;  // for %llu

// Reads the fields that all queries share. Errors use the field names of the header.
pqc_status ReadQuery(const pqc_sequence* sequence, const pqc_query* caller_query, QueryView* view,
                     bool of_range = false) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  pqc_query query;
  RETURN_IF_ERROR(ReadStruct(caller_query, "query", &query));
  view->sequence_id = sequence->state->sequence_id;
  view->layer = query.layer;
  view->query_position = query.query_position;
  RETURN_IF_ERROR(FindLayer(*sequence->state->cache, query.layer, "query.layer", &view->shape));
  return ReadQueries(query.queries, view->shape, &view->queries, of_range);
}

void CopyCounts(const pqc_positions& from, pqc_positions* to) {
  to->kv_heads = from.kv_heads;
  to->count = from.count;
  to->sink_tokens = from.sink_tokens;
  to->window_tokens = from.window_tokens;
}

pqc_status TopK(pqc_sequence* sequence, const pqc_query* query,
                const pqc_selection* caller_selection, pqc_positions* out) {
  QueryView view;
  RETURN_IF_ERROR(ReadQuery(sequence, query, &view));
  SequenceState& state = *sequence->state;
  kvstore::Selection selection;
  RETURN_IF_ERROR(ReadSelection(caller_selection, state.cache->default_index, &selection));
  if (!out) return Fail(PQC_INVALID_ARGUMENT, "out", "must not be NULL");
  RETURN_IF_ERROR(CheckMemberSize(*out, "out"));
  pqc_positions selected = *out;
  ReadBackend* reads = nullptr;
  RETURN_IF_ERROR(GetReads(state, &reads));
  const pqc_status status =
      reads->TopK(state, {.query = view, .selection = &selection, .out = &selected});
  if (status == PQC_OK || status == PQC_OUT_OF_RANGE) CopyCounts(selected, out);
  return status;
}

pqc_status Score(pqc_sequence* sequence, const pqc_query* query, const pqc_index* caller_index,
                 pqc_token_range tokens, const ScoresOut& out, uint64_t logit_capacity) {
  QueryView view;
  RETURN_IF_ERROR(ReadQuery(sequence, query, &view));
  SequenceState& state = *sequence->state;
  kvstore::IndexDescriptor index = state.cache->default_index;
  if (caller_index) {
    RETURN_IF_ERROR(ReadIndex(*caller_index, "index", state.cache->default_index, &index));
  }
  RETURN_IF_ERROR(CheckTokenRange(tokens));
  if (view.queries.shape[0] != 1) {
    return Fail(PQC_INVALID_ARGUMENT, "query.queries.shape[0]", "query_length %llu, must be 1 here",
                LongLong{view.queries.shape[0]});
  }
  if (out.logits) {
    const uint64_t needed = view.shape.query_heads * (tokens.end - tokens.begin);
    RETURN_IF_ERROR(CheckCapacity("logit_capacity", logit_capacity, needed));
  }
  ReadBackend* reads = nullptr;
  RETURN_IF_ERROR(GetReads(state, &reads));
  return reads->Score(state, view, index, {tokens.begin, tokens.end}, out);
}

// Returns the bytes of a fetch of that many tokens.
uint64_t BytesOf(const FetchView& view, uint64_t tokens) {
  return view.shape.kv_heads * tokens * kvstore::BytesOfPart(view.shape, view.part).size;
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
  view->part = static_cast<RowPart>(part);
  RETURN_IF_ERROR(FindLayer(*sequence->state->cache, layer, "layer", &view->shape));
  if (view->part != RowPart::kKey || view->shape.has_keys()) return PQC_OK;
  return Fail(PQC_FAILED_PRECONDITION, "part", "PQC_KEY, but layer %u is of kind PQC_LAYERS_VALUES",
              layer);
}

pqc_status FetchBlocks(pqc_sequence* sequence, uint32_t layer, pqc_token_range tokens,
                       pqc_row_part part, void* out, uint64_t out_bytes) {
  FetchView view;
  RETURN_IF_ERROR(ReadFetch(sequence, layer, part, out, &view));
  RETURN_IF_ERROR(CheckTokenRange(tokens));
  RETURN_IF_ERROR(CheckCapacity("out_bytes", out_bytes, BytesOf(view, tokens.end - tokens.begin)));
  SequenceState& state = *sequence->state;
  ReadBackend* reads = nullptr;
  RETURN_IF_ERROR(GetReads(state, &reads));
  return reads->FetchBlocks(state, view, {tokens.begin, tokens.end}, static_cast<std::byte*>(out));
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
  RETURN_IF_ERROR(CheckCapacity("out_bytes", out_bytes, BytesOf(view, positions.count)));
  SequenceState& state = *sequence->state;
  ReadBackend* reads = nullptr;
  RETURN_IF_ERROR(GetReads(state, &reads));
  return reads->FetchTokens(state, view, positions, static_cast<std::byte*>(out));
}

// Exactly one of `caller_selection` and `positions` is given.
pqc_status Attend(pqc_sequence* sequence, const pqc_query* query,
                  const pqc_selection* caller_selection, const PositionsView* positions,
                  pqc_attention* caller_out) {
  QueryView view;
  RETURN_IF_ERROR(ReadQuery(sequence, query, &view));
  SequenceState& state = *sequence->state;
  kvstore::Selection selection;
  if (!positions) {
    RETURN_IF_ERROR(ReadSelection(caller_selection, state.cache->default_index, &selection));
  }
  pqc_attention out;
  RETURN_IF_ERROR(ReadStruct(caller_out, "out", &out));
  RETURN_IF_ERROR(CheckMemberSize(out.selected, "out.selected"));
  kvstore::AttentionOut to;
  RETURN_IF_ERROR(
      ReadAttentionOut(AttentionOutFields(out), view.shape, view.queries.shape[0], &to));
  ReadBackend* reads = nullptr;
  RETURN_IF_ERROR(GetReads(state, &reads));
  const pqc_status status = reads->Attend(state, {.query = view,
                                                  .selection = positions ? nullptr : &selection,
                                                  .positions = positions,
                                                  .out = to,
                                                  .selected = &out.selected});
  if (status == PQC_OK || status == PQC_OUT_OF_RANGE) {
    CopyCounts(out.selected, &caller_out->selected);
  }
  return status;
}

pqc_status AttendRange(pqc_sequence* sequence, const pqc_query* query, pqc_token_range tokens,
                       pqc_attention* caller_out) {
  QueryView view;
  RETURN_IF_ERROR(ReadQuery(sequence, query, &view, /*of_range=*/true));
  const uint64_t length = view.queries.shape[0];
  if (view.query_position > kMaxSequenceTokens - length) {
    return Fail(PQC_INVALID_ARGUMENT, "query.query_position",
                "%llu and %llu tokens, but a sequence has at most 2^30",
                LongLong{view.query_position}, LongLong{length});
  }
  if (tokens.begin != tokens.end) RETURN_IF_ERROR(CheckTokenRange(tokens));
  pqc_attention out;
  RETURN_IF_ERROR(ReadStruct(caller_out, "out", &out));
  RETURN_IF_ERROR(CheckMemberSize(out.selected, "out.selected"));
  if (out.selected.positions) {
    return Fail(PQC_INVALID_ARGUMENT, "out.selected.positions", "must be NULL here");
  }
  AttendRangeItem item;
  item.query = view;
  item.tokens = {tokens.begin, tokens.end};
  RETURN_IF_ERROR(ReadAttentionOut(AttentionOutFields(out), view.shape, length, &item.out));
  SequenceState& state = *sequence->state;
  ReadBackend* reads = nullptr;
  RETURN_IF_ERROR(GetReads(state, &reads));
  RETURN_IF_ERROR(reads->AttendRange(state, item));
  pqc_positions& selected = caller_out->selected;
  selected.kv_heads = view.shape.kv_heads;
  selected.count = static_cast<uint32_t>(tokens.end - tokens.begin);
  selected.sink_tokens = selected.window_tokens = 0;
  return PQC_OK;
}

pqc_status AttendPositions(pqc_sequence* sequence, const pqc_query* query,
                           const PositionsView& positions, pqc_attention* out) {
  RETURN_IF_ERROR(CheckPositionList(positions));
  return Attend(sequence, query, nullptr, &positions, out);
}

}  // namespace
}  // namespace pqcached::client

using pqcached::client::CallRecord;
using pqcached::client::PositionsView;
using pqcached::client::RecordedCall;

extern "C" {

pqc_status pqc_topk(pqc_sequence* sequence, const pqc_query* query, const pqc_selection* selection,
                    pqc_positions* out) {
  return RecordedCall(
      "pqc_topk",
      [&](CallRecord& call) { call.Handle("sequence", sequence).Query(query).Room(out); },
      [&] { return pqcached::client::TopK(sequence, query, selection, out); });
}

pqc_status pqc_score(pqc_sequence* sequence, const pqc_query* query, const pqc_index* index,
                     pqc_token_range tokens, float* logits, uint64_t logit_capacity, float* max,
                     float* sum_exp) {
  return RecordedCall(
      "pqc_score",
      [&](CallRecord& call) {
        call.Handle("sequence", sequence)
            .Query(query)
            .Number("tokens_begin", tokens.begin)
            .Number("tokens_end", tokens.end)
            .Number("capacity", logit_capacity);
      },
      [&] {
        const pqcached::client::ScoresOut out{logits, max, sum_exp};
        return pqcached::client::Score(sequence, query, index, tokens, out, logit_capacity);
      });
}

pqc_status pqc_fetch_blocks(pqc_sequence* sequence, uint32_t layer, pqc_token_range tokens,
                            pqc_row_part part, void* out, uint64_t out_bytes) {
  return RecordedCall(
      "pqc_fetch_blocks",
      [&](CallRecord& call) {
        call.Handle("sequence", sequence)
            .Number("layer", layer)
            .Number("tokens_begin", tokens.begin)
            .Number("tokens_end", tokens.end)
            .Number("capacity", out_bytes);
      },
      [&] { return pqcached::client::FetchBlocks(sequence, layer, tokens, part, out, out_bytes); });
}

pqc_status pqc_fetch_tokens(pqc_sequence* sequence, uint32_t layer, const uint32_t* positions,
                            uint32_t count, pqc_row_part part, void* out, uint64_t out_bytes) {
  return RecordedCall(
      "pqc_fetch_tokens",
      [&](CallRecord& call) {
        call.Handle("sequence", sequence)
            .Number("layer", layer)
            .Number("count", count)
            .Number("capacity", out_bytes);
      },
      [&] {
        return pqcached::client::FetchTokens(sequence, layer, PositionsView{positions, count}, part,
                                             out, out_bytes);
      });
}

pqc_status pqc_attend(pqc_sequence* sequence, const pqc_query* query,
                      const pqc_selection* selection, pqc_attention* out) {
  return RecordedCall(
      "pqc_attend",
      [&](CallRecord& call) { call.Handle("sequence", sequence).Query(query).Room(out); },
      [&] { return pqcached::client::Attend(sequence, query, selection, nullptr, out); });
}

pqc_status pqc_attend_range(pqc_sequence* sequence, const pqc_query* query, pqc_token_range tokens,
                            pqc_attention* out) {
  return RecordedCall(
      "pqc_attend_range",
      [&](CallRecord& call) {
        call.Handle("sequence", sequence)
            .Query(query)
            .Number("tokens_begin", tokens.begin)
            .Number("tokens_end", tokens.end)
            .Room(out);
      },
      [&] { return pqcached::client::AttendRange(sequence, query, tokens, out); });
}

pqc_status pqc_attend_positions(pqc_sequence* sequence, const pqc_query* query,
                                const uint32_t* positions, uint32_t count, pqc_attention* out) {
  return RecordedCall(
      "pqc_attend_positions",
      [&](CallRecord& call) {
        call.Handle("sequence", sequence).Query(query).Number("count", count).Room(out);
      },
      [&] {
        return pqcached::client::AttendPositions(sequence, query, PositionsView{positions, count},
                                                 out);
      });
}

}  // extern "C"
