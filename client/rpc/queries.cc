// RpcRemote: selects, scores, fetches and attends.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "client/rpc/refusal.h"
#include "client/rpc/rpc_remote.h"
#include "client/rpc/wire.h"
#include "kernels/base/status_macros.h"
#include "proto/codec/index.h"
#include "proto/codec/selection.h"

namespace pqcached::client {
namespace {

// Reads larger than this are split into several calls.
constexpr uint64_t kReadPayloadBytes = 4 << 20;

grpc::Status BadAnswer(const std::string& field, const std::string& what) {
  return {grpc::StatusCode::INTERNAL, "the sidecar's answer is invalid: " + field + ": " + what};
}

uint64_t RowBytes(const FetchView& fetch) {
  return kvstore::BytesOfPart(fetch.shape, fetch.part).size;
}

grpc::Status CopySelected(const v1::Selected& selected, uint32_t set_count, bool positions,
                          pqc_positions* out, bool* too_small) {
  const uint64_t needed = uint64_t{selected.kv_heads()} * selected.count();
  if (selected.kv_heads() != set_count) {
    return BadAnswer("selected.kv_heads", std::to_string(selected.kv_heads()));
  }
  if (positions && static_cast<uint64_t>(selected.positions_size()) != needed) {
    return BadAnswer("selected.positions", std::to_string(selected.positions_size()));
  }
  out->kv_heads = selected.kv_heads();
  out->count = selected.count();
  out->sink_tokens = selected.sink_tokens();
  out->window_tokens = selected.window_tokens();
  if (!positions || !out->positions) return grpc::Status::OK;
  if (out->capacity < needed) {
    *too_small = true;
    return grpc::Status::OK;
  }
  std::copy(selected.positions().begin(), selected.positions().end(), out->positions);
  return grpc::Status::OK;
}

grpc::Status OutputTooSmallError() {
  return Refuse(grpc::StatusCode::OUT_OF_RANGE, "capacity",
                "too few positions; kv_heads x count of each output are needed");
}

// Copies output and lse of an answer to where the caller wants them.
grpc::Status CopyResult(const v1::Attention& attention, const std::string& field,
                        const QueryView& query, const kvstore::AttentionOut& out) {
  const LayerShape& shape = query.shape;
  const uint64_t length = query.queries.shape[0];
  std::string reason;
  const std::byte* output = TensorBytes(attention.output(), DType::kF32,
                                        {length, shape.query_heads, shape.value_dim}, &reason);
  if (!output) return BadAnswer(field + ".output", reason);
  if (static_cast<uint64_t>(attention.lse_size()) != length * shape.query_heads) {
    return BadAnswer(field + ".lse", std::to_string(attention.lse_size()));
  }
  std::vector<float> row(shape.value_dim);
  int next = 0;
  for (uint64_t token = 0; token < length; ++token) {
    for (uint32_t head = 0; head < shape.query_heads; ++head) {
      std::memcpy(row.data(), output, row.size() * sizeof(float));
      out.Store(token, head, row.data(), shape.value_dim, attention.lse(next++));
      output += row.size() * sizeof(float);
    }
  }
  return grpc::Status::OK;
}

grpc::Status CopyAttention(const v1::Attention& attention, const std::string& field,
                           const AttendItem& item, uint32_t set_count, bool* too_small) {
  RETURN_IF_ERROR(CopyResult(attention, field, item.query, item.out));
  return CopySelected(attention.selected(), set_count, item.selected->positions != nullptr,
                      item.selected, too_small);
}

// Returns the query tokens [begin, begin + count) of an item.
AttendRangeItem PartOf(const AttendRangeItem& item, uint64_t begin, uint64_t count) {
  AttendRangeItem part = item;
  TensorView& queries = part.query.queries;
  queries.data += static_cast<int64_t>(begin) * queries.strides[0] *
                  static_cast<int64_t>(kernels::DTypeBytes(queries.dtype));
  queries.shape[0] = count;
  part.query.query_position += begin;
  part.out = item.out.From(begin);
  return part;
}

// Returns the bytes of one query token in a request, or in an answer if that is more.
uint64_t TokenBytes(const LayerShape& shape) {
  return uint64_t{shape.query_heads} * (std::max(shape.key_dim, shape.value_dim) + 2) *
         sizeof(float);
}

// Copies [heads, tokens] of `from` into columns [token, token + tokens) of [heads, token_count] in
// `out`; `bytes` per column.
void CopyColumns(const std::byte* from, uint32_t heads, uint64_t tokens, uint64_t token,
                 uint64_t token_count, uint64_t bytes, std::byte* out) {
  for (uint32_t head = 0; head < heads; ++head) {
    std::memcpy(out + (head * token_count + token) * bytes, from + head * tokens * bytes,
                tokens * bytes);
  }
}

// Merges the (max, sum of exponentials) of two disjoint sets of tokens.
void MergeSums(float max, float sum_exp, float* joined_max, float* joined_sum_exp) {
  const float larger = std::max(max, *joined_max);
  if (!std::isfinite(larger)) return;
  *joined_sum_exp =
      *joined_sum_exp * std::exp(*joined_max - larger) + sum_exp * std::exp(max - larger);
  *joined_max = larger;
}

// The first versions of a client whose selections have rerank_factor, per_query_head, and
// tail_estimate.
constexpr uint32_t kRerankVersion = 15;
constexpr uint32_t kPerQueryHeadVersion = 18;
constexpr uint32_t kTailVersion = 21;

// Refuses an answer of an older sidecar, which leaves the estimate out.
grpc::Status CheckTailEstimate(const v1::Selection& selection, const v1::Attention& attention,
                               uint32_t item) {
  if (!selection.tail_estimate() || attention.has_tail_estimate()) return grpc::Status::OK;
  return Refuse(grpc::StatusCode::UNIMPLEMENTED,
                "items[" + std::to_string(item) + "].selection.tail_estimate",
                "the sidecar is older than tail estimates");
}

}  // namespace

void RpcRemote::EncodeSelection(const kvstore::Selection& selection, v1::Selection* message) const {
  kvstore::Selection known = selection;
  if (client_version_ < kRerankVersion) known.rerank_factor = 1.0f;
  if (client_version_ < kPerQueryHeadVersion) known.per_query_head = false;
  if (client_version_ < kTailVersion) known.tail_estimate = false;
  codec::Encode(known, message);
}

uint32_t RpcRemote::SetCount(const kvstore::Selection& selection, const LayerShape& shape) const {
  return client_version_ < kPerQueryHeadVersion
             ? shape.kv_heads
             : selection.SetCount(shape.kv_heads, shape.query_heads);
}

grpc::Status RpcRemote::TopKPart(const TopKItem* items, uint32_t item_count, Deadline deadline,
                                 bool* too_small) {
  v1::TopKRequest request;
  v1::TopKResponse response;
  for (uint32_t i = 0; i < item_count; ++i) {
    v1::TopKItem* item = request.add_items();
    ToWire(items[i].query, item->mutable_query());
    EncodeSelection(*items[i].selection, item->mutable_selection());
  }
  grpc::Status status = Attempt(Repeat::kHarmless, deadline, [&](const Context& context) {
    return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncTopK, context, request, &response);
  });
  if (!status.ok()) return status;
  if (static_cast<uint32_t>(response.items_size()) != item_count) {
    return BadAnswer("items", "must be one per item of the request");
  }
  for (uint32_t i = 0; i < item_count; ++i) {
    status = CopySelected(response.items(static_cast<int>(i)),
                          SetCount(*items[i].selection, items[i].query.shape),
                          /*positions=*/true, items[i].out, too_small);
    if (!status.ok()) return status;
  }
  return status;
}

pqc_status RpcRemote::TopK(const TopKItem* items, uint32_t item_count,
                           RefusalBuffer* error) noexcept {
  return Finish("TopK", error, [&]() -> grpc::Status {
    const Deadline deadline = CallDeadline();
    bool too_small = false;
    for (uint32_t i = 0; i < item_count; i += kMaxBatchItems) {
      const grpc::Status status =
          TopKPart(items + i, std::min(kMaxBatchItems, item_count - i), deadline, &too_small);
      RETURN_IF_ERROR(RenumberItem(status, [i](uint32_t item) { return i + item; }));
    }
    return too_small ? OutputTooSmallError() : grpc::Status::OK;
  });
}

grpc::Status RpcRemote::ScorePart(const QueryView& query, const kvstore::IndexDescriptor& index,
                                  kvstore::TokenRange tokens, Deadline deadline,
                                  v1::ScoreResponse* response) {
  v1::ScoreRequest request;
  v1::ScoreItem* item = request.add_items();
  ToWire(query, item->mutable_query());
  codec::Encode(index, item->mutable_index());
  item->mutable_tokens()->set_begin(tokens.begin);
  item->mutable_tokens()->set_end(tokens.end);
  grpc::Status status = Attempt(Repeat::kHarmless, deadline, [&](const Context& context) {
    return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncScore, context, request, response);
  });
  if (!status.ok()) return status;
  const auto heads = static_cast<int>(query.shape.query_heads);
  if (response->items_size() != 1 || response->items(0).max_size() != heads ||
      response->items(0).sum_exp_size() != heads) {
    return BadAnswer("items", "must be one, with max and sum_exp of each query head");
  }
  return status;
}

pqc_status RpcRemote::Score(const QueryView& query, const kvstore::IndexDescriptor& index,
                            kvstore::TokenRange tokens, const ScoresOut& out,
                            RefusalBuffer* error) noexcept {
  return Finish("Score", error, [&]() -> grpc::Status {
    const Deadline deadline = CallDeadline();
    const uint32_t heads = query.shape.query_heads;
    const uint64_t token_count = tokens.end - tokens.begin;
    const uint64_t step =
        std::max<uint64_t>(1, PayloadBytes(kReadPayloadBytes) / (heads * sizeof(float)));
    std::vector<float> max(heads, -INFINITY);
    std::vector<float> sum_exp(heads, 0.0f);
    for (uint64_t token = 0; token < token_count; token += step) {
      const uint64_t count = std::min(step, token_count - token);
      const uint64_t begin = tokens.begin + token;
      v1::ScoreResponse response;
      RETURN_IF_ERROR(ScorePart(query, index, {begin, begin + count}, deadline, &response));
      const v1::Scores& scores = response.items(0);
      std::string reason;
      const std::byte* logits = TensorBytes(scores.logits(), DType::kF32, {heads, count}, &reason);
      if (!logits) return BadAnswer("items[0].logits", reason);
      if (out.logits) {
        CopyColumns(logits, heads, count, token, token_count, sizeof(float),
                    reinterpret_cast<std::byte*>(out.logits));
      }
      for (uint32_t head = 0; head < heads; ++head) {
        const int at = static_cast<int>(head);
        MergeSums(scores.max(at), scores.sum_exp(at), &max[head], &sum_exp[head]);
      }
    }
    if (out.max) std::copy(max.begin(), max.end(), out.max);
    if (out.sum_exp) std::copy(sum_exp.begin(), sum_exp.end(), out.sum_exp);
    return grpc::Status::OK;
  });
}

pqc_status RpcRemote::FetchTokens(const FetchView& fetch, const PositionsView& positions,
                                  std::byte* out, RefusalBuffer* error) noexcept {
  return Finish("FetchTokens", error, [&]() -> grpc::Status {
    const Deadline deadline = CallDeadline();
    const uint32_t heads = fetch.shape.kv_heads;
    const uint64_t row_bytes = RowBytes(fetch);
    const uint64_t step =
        std::max<uint64_t>(1, PayloadBytes(kReadPayloadBytes) / (heads * row_bytes));
    for (uint64_t first = 0; first < positions.count; first += step) {
      const uint64_t count = std::min<uint64_t>(step, positions.count - first);
      v1::FetchTokensRequest request;
      v1::FetchTokensResponse response;
      request.set_sequence_id(fetch.sequence_id);
      request.set_layer(fetch.layer);
      request.set_part(ToWire(fetch.part));
      request.set_count(static_cast<uint32_t>(count));
      for (uint32_t head = 0; head < heads; ++head) {
        const uint32_t* of_head = positions.positions + uint64_t{head} * positions.count + first;
        request.mutable_positions()->Add(of_head, of_head + count);
      }
      RETURN_IF_ERROR(Attempt(Repeat::kHarmless, deadline, [&](const Context& context) {
        return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncFetchTokens, context, request, &response);
      }));
      std::string reason;
      const std::byte* rows =
          TensorBytes(response.rows(), fetch.shape.dtype,
                      {heads, count, row_bytes / kernels::DTypeBytes(fetch.shape.dtype)}, &reason);
      if (!rows) return BadAnswer("rows", reason);
      CopyColumns(rows, heads, count, first, positions.count, row_bytes, out);
    }
    return grpc::Status::OK;
  });
}

grpc::Status RpcRemote::AttendPart(const AttendItem* items, uint32_t item_count, Deadline deadline,
                                   bool* too_small) {
  v1::AttendRequest request;
  v1::AttendResponse response;
  for (uint32_t i = 0; i < item_count; ++i) {
    v1::AttendItem* item = request.add_items();
    ToWire(items[i].query, item->mutable_query());
    if (items[i].selection) EncodeSelection(*items[i].selection, item->mutable_selection());
    if (const PositionsView* positions = items[i].positions) {
      item->mutable_positions()->set_count(positions->count);
      item->mutable_positions()->mutable_positions()->Add(
          positions->positions,
          positions->positions + uint64_t{items[i].query.shape.kv_heads} * positions->count);
    }
    item->set_want_positions(items[i].selected->positions != nullptr);
  }
  grpc::Status status = Attempt(Repeat::kHarmless, deadline, [&](const Context& context) {
    return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncAttend, context, request, &response);
  });
  if (!status.ok()) return status;
  if (static_cast<uint32_t>(response.items_size()) != item_count) {
    return BadAnswer("items", "must be one per item of the request");
  }
  for (uint32_t i = 0; i < item_count; ++i) {
    RETURN_IF_ERROR(CheckTailEstimate(request.items(static_cast<int>(i)).selection(),
                                      response.items(static_cast<int>(i)), i));
    const LayerShape& shape = items[i].query.shape;
    const uint32_t sets =
        items[i].selection ? SetCount(*items[i].selection, shape) : shape.kv_heads;
    status = CopyAttention(response.items(static_cast<int>(i)), "items[" + std::to_string(i) + "]",
                           items[i], sets, too_small);
    if (!status.ok()) return status;
  }
  return status;
}

pqc_status RpcRemote::Attend(const AttendItem* items, uint32_t item_count,
                             RefusalBuffer* error) noexcept {
  return Finish("Attend", error, [&]() -> grpc::Status {
    const Deadline deadline = CallDeadline();
    bool too_small = false;
    for (uint32_t i = 0; i < item_count; i += kMaxBatchItems) {
      const grpc::Status status =
          AttendPart(items + i, std::min(kMaxBatchItems, item_count - i), deadline, &too_small);
      RETURN_IF_ERROR(RenumberItem(status, [i](uint32_t item) { return i + item; }));
    }
    return too_small ? OutputTooSmallError() : grpc::Status::OK;
  });
}

grpc::Status RpcRemote::AttendScoredPart(const ScoredItem* items, uint32_t item_count,
                                         Deadline deadline) {
  v1::AttendRequest request;
  v1::AttendResponse response;
  for (uint32_t i = 0; i < item_count; ++i) {
    const QueryView& logits = items[i].logits;
    const PositionsView& positions = items[i].positions;
    v1::AttendItem* item = request.add_items();
    ToWire(logits, item->mutable_query());
    v1::TokenPositions* given = item->mutable_positions();
    given->set_count(positions.count);
    given->mutable_positions()->Add(
        positions.positions,
        positions.positions + uint64_t{logits.shape.kv_heads} * positions.count);
    given->mutable_logits()->Swap(item->mutable_query()->mutable_queries());
    item->mutable_query()->clear_queries();
  }
  const grpc::Status status = Attempt(Repeat::kHarmless, deadline, [&](const Context& context) {
    return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncAttend, context, request, &response);
  });
  if (FieldOf(status).find(".query.queries") != std::string::npos) {
    return Refuse(grpc::StatusCode::UNIMPLEMENTED, "items[0].positions.logits",
                  "the sidecar is older than logits of positions");
  }
  RETURN_IF_ERROR(status);
  if (static_cast<uint32_t>(response.items_size()) != item_count) {
    return BadAnswer("items", "must be one per item of the request");
  }
  for (uint32_t i = 0; i < item_count; ++i) {
    RETURN_IF_ERROR(CopyResult(response.items(static_cast<int>(i)),
                               "items[" + std::to_string(i) + "]", items[i].logits, items[i].out));
  }
  return grpc::Status::OK;
}

pqc_status RpcRemote::AttendScored(const ScoredItem* items, uint32_t item_count,
                                   RefusalBuffer* error) noexcept {
  return Finish("Attend", error, [&]() -> grpc::Status {
    const Deadline deadline = CallDeadline();
    for (uint32_t i = 0; i < item_count; i += kMaxBatchItems) {
      const grpc::Status status =
          AttendScoredPart(items + i, std::min(kMaxBatchItems, item_count - i), deadline);
      RETURN_IF_ERROR(RenumberItem(status, [i](uint32_t item) { return i + item; }));
    }
    return grpc::Status::OK;
  });
}

grpc::Status RpcRemote::AttendRangePart(const AttendRangeItem* parts, uint32_t part_count,
                                        Deadline deadline) {
  v1::AttendRangeRequest request;
  v1::AttendRangeResponse response;
  for (uint32_t i = 0; i < part_count; ++i) {
    v1::AttendRangeItem* item = request.add_items();
    ToWire(parts[i].query, item->mutable_query());
    item->mutable_tokens()->set_begin(parts[i].tokens.begin);
    item->mutable_tokens()->set_end(parts[i].tokens.end);
  }
  grpc::Status status = Attempt(Repeat::kHarmless, deadline, [&](const Context& context) {
    return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncAttendRange, context, request, &response);
  });
  if (!status.ok()) return status;
  if (static_cast<uint32_t>(response.items_size()) != part_count) {
    return BadAnswer("items", "must be one per item of the request");
  }
  for (uint32_t i = 0; i < part_count; ++i) {
    RETURN_IF_ERROR(CopyResult(response.items(static_cast<int>(i)),
                               "items[" + std::to_string(i) + "]", parts[i].query, parts[i].out));
  }
  return grpc::Status::OK;
}

pqc_status RpcRemote::AttendRange(const AttendRangeItem* items, uint32_t item_count,
                                  RefusalBuffer* error) noexcept {
  return Finish("AttendRange", error, [&]() -> grpc::Status {
    const Deadline deadline = CallDeadline();
    const uint64_t limit = PayloadBytes(kReadPayloadBytes);
    std::vector<AttendRangeItem> parts;
    std::vector<uint32_t> numbers;  // by part: the item that it is of
    uint64_t bytes = 0;
    const auto send = [&]() -> grpc::Status {
      const auto count = static_cast<uint32_t>(parts.size());
      return RenumberItem(AttendRangePart(parts.data(), count, deadline),
                          [&](uint32_t part) { return part < count ? numbers[part] : part; });
    };
    for (uint32_t i = 0; i < item_count; ++i) {
      const uint64_t token_bytes = TokenBytes(items[i].query.shape);
      const uint64_t length = items[i].query.queries.shape[0];
      for (uint64_t begin = 0; begin < length;) {
        if (!parts.empty() && (bytes + token_bytes > limit || parts.size() == kMaxBatchItems)) {
          RETURN_IF_ERROR(send());
          parts.clear();
          numbers.clear();
          bytes = 0;
        }
        const uint64_t fitting = bytes < limit ? (limit - bytes) / token_bytes : 0;
        const uint64_t count = std::clamp<uint64_t>(fitting, 1, length - begin);
        parts.push_back(PartOf(items[i], begin, count));
        numbers.push_back(i);
        bytes += count * token_bytes;
        begin += count;
      }
    }
    return send();
  });
}

}  // namespace pqcached::client
