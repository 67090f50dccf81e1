// Rank, fetch, attend.
#include <cstring>
#include <limits>

#include "client/arguments.h"
#include "client/error.h"
#include "client/handles.h"

namespace pqcached::client {
namespace {

using LongLong = unsigned long long;  // for %llu

pqc_status CheckCapacity(const char* name, uint64_t capacity, uint64_t needed) {
  if (capacity >= needed) return PQC_OK;
  return Fail(PQC_OUT_OF_RANGE, "%s: %llu, but %llu are needed", name, LongLong{capacity},
              LongLong{needed});
}

// Reads the parts that all queries have. `name`s are those of the header.
pqc_status ReadQuery(const pqc_sequence* sequence, const pqc_query* caller_query, QueryView* view) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence: must not be NULL");
  pqc_query query;
  if (const pqc_status status = ReadStruct(caller_query, "query", &query); status != PQC_OK) {
    return status;
  }
  view->sequence_id = sequence->sequence_id;
  view->layer = query.layer;
  view->query_position = query.query_position;
  if (const pqc_status status = FindLayer(*sequence, query.layer, "query.layer", &view->shape);
      status != PQC_OK) {
    return status;
  }
  return ReadQueries(query.queries, view->shape, &view->queries);
}

void CopyCounts(const pqc_positions& from, pqc_positions* to) {
  to->kv_heads = from.kv_heads;
  to->count = from.count;
  to->sink_tokens = from.sink_tokens;
  to->window_tokens = from.window_tokens;
}

pqc_status Select(pqc_sequence* sequence, const pqc_query* query, const pqc_selection* selection,
                  pqc_positions* out) {
  QueryView view;
  if (const pqc_status status = ReadQuery(sequence, query, &view); status != PQC_OK) {
    return status;
  }
  pqc_selection terms;
  if (const pqc_status status = ReadSelection(selection, &terms); status != PQC_OK) return status;
  if (!out) return Fail(PQC_INVALID_ARGUMENT, "out: must not be NULL");
  if (const pqc_status status = CheckMemberSize(*out, "out"); status != PQC_OK) return status;
  pqc_positions selected = *out;
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*sequence->cache->client, &remote); status != PQC_OK) {
    return status;
  }
  ErrorText error;
  const pqc_status status = remote->TopK(view, terms, &selected, &error);
  if (status == PQC_OK || status == PQC_OUT_OF_RANGE) CopyCounts(selected, out);
  return Report(status, error);
}

pqc_status CheckRange(pqc_token_range tokens) {
  if (tokens.begin < tokens.end && tokens.end <= kMaxSequenceTokens) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, "tokens: [%llu, %llu), must not be empty nor go beyond 2^30",
              LongLong{tokens.begin}, LongLong{tokens.end});
}

pqc_status Score(pqc_sequence* sequence, const pqc_query* query, const pqc_index* caller_index,
                 pqc_token_range tokens, const ScoresOut& out, uint64_t logit_capacity) {
  QueryView view;
  if (const pqc_status status = ReadQuery(sequence, query, &view); status != PQC_OK) {
    return status;
  }
  pqc_index index{};
  if (caller_index) index = *caller_index;
  if (const pqc_status status = CheckIndex(index, "index"); status != PQC_OK) return status;
  if (const pqc_status status = CheckRange(tokens); status != PQC_OK) return status;
  if (out.logits) {
    const uint64_t needed = view.shape.query_heads * (tokens.end - tokens.begin);
    const pqc_status status = CheckCapacity("logit_capacity", logit_capacity, needed);
    if (status != PQC_OK) return status;
  }
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*sequence->cache->client, &remote); status != PQC_OK) {
    return status;
  }
  ErrorText error;
  return Report(remote->Score(view, index, tokens, out, &error), error);
}

uint64_t RowBytes(const LayerShape& shape, pqc_row_part part) {
  const uint64_t dims =
      (part == PQC_VALUE ? 0u : shape.key_dim) + (part == PQC_KEY ? 0u : shape.value_dim);
  return dims * (shape.dtype == PQC_F32 ? 4u : 2u);
}

pqc_status ReadFetch(const pqc_sequence* sequence, uint32_t layer, pqc_row_part part,
                     const void* out, FetchView* view) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence: must not be NULL");
  if (!out) return Fail(PQC_INVALID_ARGUMENT, "out: must not be NULL");
  if (const uint32_t number = RawEnum(part); number > PQC_VALUE) {
    return Fail(PQC_INVALID_ARGUMENT, "part: %u, must be PQC_ROW, PQC_KEY or PQC_VALUE", number);
  }
  view->sequence_id = sequence->sequence_id;
  view->layer = layer;
  view->part = part;
  return FindLayer(*sequence, layer, "layer", &view->shape);
}

pqc_status FetchRange(pqc_sequence* sequence, uint32_t layer, pqc_token_range tokens,
                      pqc_row_part part, void* out, uint64_t out_bytes) {
  FetchView view;
  if (const pqc_status status = ReadFetch(sequence, layer, part, out, &view); status != PQC_OK) {
    return status;
  }
  if (const pqc_status status = CheckRange(tokens); status != PQC_OK) return status;
  const uint64_t needed =
      view.shape.kv_heads * (tokens.end - tokens.begin) * RowBytes(view.shape, part);
  if (const pqc_status status = CheckCapacity("out_bytes", out_bytes, needed); status != PQC_OK) {
    return status;
  }
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*sequence->cache->client, &remote); status != PQC_OK) {
    return status;
  }
  ErrorText error;
  return Report(remote->FetchRange(view, tokens, static_cast<std::byte*>(out), &error), error);
}

pqc_status CheckPositions(const PositionsView& positions) {
  if (!positions.positions) return Fail(PQC_INVALID_ARGUMENT, "positions: must not be NULL");
  if (positions.count >= 1 && positions.count <= kMaxSequenceTokens) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, "count: %u, must be 1 to 2^30", positions.count);
}

pqc_status FetchTokens(pqc_sequence* sequence, uint32_t layer, const PositionsView& positions,
                       pqc_row_part part, void* out, uint64_t out_bytes) {
  FetchView view;
  if (const pqc_status status = ReadFetch(sequence, layer, part, out, &view); status != PQC_OK) {
    return status;
  }
  if (const pqc_status status = CheckPositions(positions); status != PQC_OK) return status;
  const uint64_t needed =
      uint64_t{view.shape.kv_heads} * positions.count * RowBytes(view.shape, part);
  if (const pqc_status status = CheckCapacity("out_bytes", out_bytes, needed); status != PQC_OK) {
    return status;
  }
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*sequence->cache->client, &remote); status != PQC_OK) {
    return status;
  }
  ErrorText error;
  return Report(remote->FetchTokens(view, positions, static_cast<std::byte*>(out), &error), error);
}

// Exactly one of `selection` and `positions` is given.
pqc_status Attend(pqc_sequence* sequence, const pqc_query* query, const pqc_selection* selection,
                  const PositionsView* positions, pqc_attention* caller_out) {
  QueryView view;
  if (const pqc_status status = ReadQuery(sequence, query, &view); status != PQC_OK) {
    return status;
  }
  pqc_attention out;
  if (const pqc_status status = ReadStruct(caller_out, "out", &out); status != PQC_OK) {
    return status;
  }
  if (const pqc_status status = CheckMemberSize(out.selected, "out.selected"); status != PQC_OK) {
    return status;
  }
  if (!out.output) return Fail(PQC_INVALID_ARGUMENT, "out.output: must not be NULL");
  if (!out.lse) return Fail(PQC_INVALID_ARGUMENT, "out.lse: must not be NULL");
  const uint64_t outputs = uint64_t{view.shape.query_heads} * view.shape.value_dim;
  if (const pqc_status status = CheckCapacity("out.output_capacity", out.output_capacity, outputs);
      status != PQC_OK) {
    return status;
  }
  if (const pqc_status status =
          CheckCapacity("out.lse_capacity", out.lse_capacity, view.shape.query_heads);
      status != PQC_OK) {
    return status;
  }
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*sequence->cache->client, &remote); status != PQC_OK) {
    return status;
  }
  ErrorText error;
  const pqc_status status = remote->Attend(view, selection, positions, &out, &error);
  if (status == PQC_OK || status == PQC_OUT_OF_RANGE) {
    CopyCounts(out.selected, &caller_out->selected);
  }
  return Report(status, error);
}

pqc_status AttendSelected(pqc_sequence* sequence, const pqc_query* query,
                          const pqc_selection* selection, pqc_attention* out) {
  pqc_selection terms;
  if (const pqc_status status = ReadSelection(selection, &terms); status != PQC_OK) return status;
  return Attend(sequence, query, &terms, nullptr, out);
}

pqc_status AttendPositions(pqc_sequence* sequence, const pqc_query* query,
                           const PositionsView& positions, pqc_attention* out) {
  if (const pqc_status status = CheckPositions(positions); status != PQC_OK) return status;
  return Attend(sequence, query, nullptr, &positions, out);
}

}  // namespace
}  // namespace pqcached::client

using pqcached::client::Call;
using pqcached::client::PositionsView;

extern "C" {

pqc_status pqc_select(pqc_sequence* sequence, const pqc_query* query,
                      const pqc_selection* selection, pqc_positions* out) {
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

pqc_status pqc_fetch_range(pqc_sequence* sequence, uint32_t layer, pqc_token_range tokens,
                           pqc_row_part part, void* out, uint64_t out_bytes) {
  return Call(
      [&] { return pqcached::client::FetchRange(sequence, layer, tokens, part, out, out_bytes); });
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
