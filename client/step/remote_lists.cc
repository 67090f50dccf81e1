// Attention over lists of positions, with or without logits, by rpc Attend.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <numeric>
#include <string_view>
#include <vector>

#include "client/base/error.h"
#include "client/step/read_backend.h"
#include "client/step/step.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

// Requests larger than this are split.
constexpr uint64_t kMaxRequestBytes = 4 << 20;

constexpr uint32_t kScoredVersion = 17;  // of Remote

// A query over lists of one length.
struct Part {
  size_t item = 0;
  uint32_t length = 0;
  bool whole = false;                        // all lists of the item have this length
  std::vector<uint32_t> positions = {};      // [lists of the item, length]
  std::vector<float> logits = {};            // [query_length, query_heads, length], or none
  std::vector<float> output = {}, lse = {};  // unless `whole`
};

class ListCall {
 public:
  ListCall(Remote& remote, const LayerCall& call)
      : remote_(remote), call_(call), shape_(call.shape) {
    shape_.kv_heads = call.lists_per_item;
  }

  pqc_status Run() {
    for (size_t i = 0; i < call_.step->items.size(); ++i) RETURN_IF_ERROR(AddItem(i));
    return Send();
  }

 private:
  const StepItem& ItemOf(size_t index) const { return call_.step->items[index]; }
  // Returns the query of an item with as many kv heads as lists.
  QueryView QueryOfLists(const StepItem& item) const {
    QueryView query = QueryOf(call_, item);
    query.shape = shape_;
    return query;
  }
  // Returns the query tokens x query heads of an item.
  size_t RowsOf(const StepItem& item) const {
    return size_t{item.query_length} * shape_.query_heads;
  }

  // Stores what is known without an rpc, and adds the other parts. Sends the parts before them when
  // they are large enough.
  pqc_status AddItem(size_t index) {
    const std::span<const PositionList> lists = ListsOf(call_, ItemOf(index));
    std::vector<uint32_t> lengths;
    for (uint32_t list = 0; list < lists.size(); ++list) {
      if (lists[list].empty()) StoreNothing(ItemOf(index), list);
      lengths.push_back(static_cast<uint32_t>(lists[list].size()));
    }
    std::sort(lengths.begin(), lengths.end());
    lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
    for (const uint32_t length : lengths) {
      if (length == 0) continue;
      const uint64_t rows = lists.size() + (call_.has_logits ? RowsOf(ItemOf(index)) : 0);
      const uint64_t bytes = length * rows * sizeof(uint32_t);
      if (bytes_ + bytes > kMaxRequestBytes) RETURN_IF_ERROR(Send());
      bytes_ += bytes;
      parts_.push_back(PartOf(index, lists, length, lengths.size() == 1));
    }
    return PQC_OK;
  }

  Part PartOf(size_t index, std::span<const PositionList> lists, uint32_t length,
              bool whole) const {
    Part part{.item = index, .length = length, .whole = whole};
    part.positions.resize(lists.size() * length);
    auto next = part.positions.begin();
    for (const PositionList& list : lists) {
      // Any stored positions do for the other heads: an item has at least `length` tokens.
      if (list.size() == length) {
        std::copy(list.begin(), list.end(), next);
      } else {
        std::iota(next, next + length, 0);
      }
      next += length;
    }
    const size_t rows = RowsOf(ItemOf(index));
    if (call_.has_logits) {
      part.logits.resize(rows * length);  // 0 for the other heads
      const kvstore::LayerQuery query = LayerQueryOf(QueryOfLists(ItemOf(index)), true);
      for (size_t row = 0; row < rows; ++row) {
        const auto head = static_cast<uint32_t>(row % shape_.query_heads);
        if (lists[head / shape_.group_size()].size() != length) continue;
        query.Copy(static_cast<uint32_t>(row / shape_.query_heads), head, length,
                   &part.logits[row * length]);
      }
    }
    if (whole) return part;
    part.output.resize(rows * shape_.value_dim);
    part.lse.resize(rows);
    return part;
  }

  pqc_status Send() {
    if (parts_.empty()) return PQC_OK;
    RefusalBuffer error;
    const pqc_status status = call_.has_logits ? SendScored(&error) : SendQueries(&error);
    if (IsOlderSidecar(status, error)) {
      return Fail(PQC_UNIMPLEMENTED, "lists.list_count",
                  "the sidecar is older than lists per query head");
    }
    if (status != PQC_OK) return ReportPart(status, error);
    for (const Part& part : parts_) {
      if (!part.whole) StoreHeads(part);
    }
    parts_.clear();
    bytes_ = 0;
    return PQC_OK;
  }

  kvstore::AttentionOut OutOfPart(Part& part) const {
    if (part.whole) return OutOf(call_, ItemOf(part.item));
    return kvstore::AttentionOut::Packed(part.output.data(), part.lse.data(), shape_.query_heads,
                                         shape_.value_dim);
  }

  pqc_status SendQueries(RefusalBuffer* error) {
    std::vector<PositionsView> positions(parts_.size());
    std::vector<pqc_positions> selected(parts_.size(), pqc_positions{});
    std::vector<AttendItem> attends(parts_.size());
    for (size_t i = 0; i < parts_.size(); ++i) {
      Part& part = parts_[i];
      positions[i] = {part.positions.data(), part.length};
      attends[i] = {.query = QueryOfLists(ItemOf(part.item)),
                    .positions = &positions[i],
                    .out = OutOfPart(part),
                    .selected = &selected[i]};
    }
    return remote_.Attend(attends.data(), static_cast<uint32_t>(attends.size()), error);
  }

  pqc_status SendScored(RefusalBuffer* error) {
    std::vector<ScoredItem> attends(parts_.size());
    for (size_t i = 0; i < parts_.size(); ++i) {
      Part& part = parts_[i];
      QueryView logits = QueryOfLists(ItemOf(part.item));
      const uint64_t length = part.length, heads = shape_.query_heads;
      logits.queries = {
          .data = reinterpret_cast<const std::byte*>(part.logits.data()),
          .ndim = 3,
          .shape = {ItemOf(part.item).query_length, heads, length},
          .strides = {static_cast<int64_t>(heads * length), static_cast<int64_t>(length), 1}};
      attends[i] = {.logits = logits,
                    .positions = {part.positions.data(), part.length},
                    .out = OutOfPart(part)};
    }
    return remote_.AttendScored(attends.data(), static_cast<uint32_t>(attends.size()), error);
  }

  // Returns whether a sidecar took the lists of query heads for those of kv heads. Then it refuses
  // their order or their number, which are right.
  bool IsOlderSidecar(pqc_status status, const RefusalBuffer& error) const {
    if (status != PQC_INVALID_ARGUMENT || shape_.kv_heads == call_.shape.kv_heads) return false;
    const std::string_view field = error.field;
    return field.find(".positions.positions") != field.npos ||
           field.ends_with(".positions.logits.shape");
  }

  // Names the step's item in place of the request's.
  pqc_status ReportPart(pqc_status status, const RefusalBuffer& error) const {
    size_t index = 0;
    if (std::sscanf(error.field, "items[%zu]", &index) != 1 || index >= parts_.size()) {
      return Report(status, error);
    }
    char sent[64], sent_query[64], sent_logits[64], own_logits[64], own[64];
    std::snprintf(sent, sizeof(sent), "items[%zu]", index);
    std::snprintf(sent_query, sizeof(sent_query), "items[%zu].query", index);
    std::snprintf(sent_logits, sizeof(sent_logits), "items[%zu].positions.logits", index);
    std::snprintf(own, sizeof(own), "items[%zu]", parts_[index].item);
    std::snprintf(own_logits, sizeof(own_logits), "items[%zu].logits", parts_[index].item);
    return Report(status, error, {{sent_query, own}, {sent_logits, own_logits}, {sent, own}});
  }

  // Copies the results of the heads whose lists have the part's length.
  void StoreHeads(const Part& part) const {
    const StepItem& item = ItemOf(part.item);
    const std::span<const PositionList> lists = ListsOf(call_, item);
    const kvstore::AttentionOut out = OutOf(call_, item);
    for (uint64_t row = 0; row < part.lse.size(); ++row) {
      const auto head = static_cast<uint32_t>(row % shape_.query_heads);
      if (lists[head / shape_.group_size()].size() != part.length) continue;
      out.Store(row / shape_.query_heads, head, &part.output[row * shape_.value_dim],
                shape_.value_dim, part.lse[row]);
    }
  }

  // Stores the attention of the query heads of one list over no rows.
  void StoreNothing(const StepItem& item, uint32_t list) const {
    const std::vector<float> zeros(shape_.value_dim);
    const kvstore::AttentionOut out = OutOf(call_, item);
    for (uint32_t token = 0; token < item.query_length; ++token) {
      for (uint32_t i = 0; i < shape_.group_size(); ++i) {
        out.Store(token, list * shape_.group_size() + i, zeros.data(), shape_.value_dim,
                  -std::numeric_limits<float>::infinity());
      }
    }
  }

  Remote& remote_;
  const LayerCall& call_;
  LayerShape shape_;         // with a kv head for each list
  std::vector<Part> parts_;  // not sent yet
  uint64_t bytes_ = 0;       // of their positions
};

}  // namespace

pqc_status AttendListsByRpc(Remote& remote, const LayerCall& call) {
  if (call.has_logits && call.step->client->remote_version < kScoredVersion) {
    return Fail(PQC_UNIMPLEMENTED, "lists.logits",
                "libpqcached_rpc is older than logits of positions on the remote path; install the "
                "library of the client's release");
  }
  return ListCall(remote, call).Run();
}

}  // namespace pqcached::client
