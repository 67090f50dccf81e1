// pqcached client: Sequence, the tokens of one request. Included by client.hpp.
//
// Example, which selects a tenth of 4095 tokens of one layer:
//
//     auto selected = sequence.TopK(
//         {.layer = 0, .query_position = 4095, .queries = {q, {32, 128}}},
//         {.sink_tokens = 16, .window_tokens = 64, .ratio = 0.1});
//     if (!selected.ok()) return selected.status();
//     for (uint32_t head = 0; head < selected->kv_heads; ++head) {
//       const uint32_t* positions = selected->positions.data() + size_t{head} * selected->count;
//       Load(head, {positions, selected->count});  // the engine's own gather of these tokens
//     }
#ifndef PQCACHED_SEQUENCE_HPP_
#define PQCACHED_SEQUENCE_HPP_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "pqcached/client.h"
#include "pqcached/load.h"
#include "pqcached/values.hpp"

namespace pqcached {

// The tokens of one request, with their rows and indexes (pqc_sequence). Made by Cache and Fork.
// Thread-safe as client.h says, but for moves, Drop and Detach; the destructor drops the sequence,
// or detaches what Cache::Attach has made.
class Sequence {
 public:
  // Returns the sidecar's id of the sequence (pqc_sequence_id).
  uint64_t id() const { return pqc_sequence_id(handle_.get()); }
  // Returns the handle for calls of the C ABI; this object still owns it.
  pqc_sequence* get() const { return handle_.get(); }

  // Stores the rows of consecutive prefill tokens of one layer, from `first_position` on: keys
  // [tokens, kv_heads, key_dim], values [tokens, kv_heads, value_dim], copied before it returns.
  // Repeating it is harmless. `names`: of any tokens of the sequence (pqc_ingest_with).
  Status Ingest(uint32_t layer, uint64_t first_position, const Tensor& keys, const Tensor& values,
                const TokenNames& names = {}) {
    const pqc_tensor k = keys.c();
    const pqc_tensor v = values.c();
    const pqc_row_options options = names.c();
    return Status(pqc_ingest_with(handle_.get(), layer, first_position, &k, &v, &options));
  }

  // Names tokens without storing rows (pqc_sequence_name_tokens).
  Status NameTokens(const TokenNames& names) {
    const pqc_row_options options = names.c();
    return Status(pqc_sequence_name_tokens(handle_.get(), &options));
  }

  // Appends new tokens to all stored layers at once, each layer listed exactly once; returns the
  // sequence's tokens. Repeating it is harmless. `names`: of any tokens of the sequence
  // (pqc_append_with).
  Result<uint64_t> Append(uint64_t first_position, std::span<const LayerRows> layers,
                          const TokenNames& names = {}) {
    const std::vector<pqc_layer_rows> rows = LayerRowsToC(layers);
    uint64_t token_count = 0;
    const pqc_row_options options = names.c();
    const pqc_status status =
        pqc_append_with(handle_.get(), first_position, rows.data(),
                        static_cast<uint32_t>(rows.size()), &options, &token_count);
    if (status != PQC_OK) return Status(status);
    return token_count;
  }

  // Passes on the prefill rows of all stored layers, and returns when they are copied; Flush
  // returns their error (pqc_enqueue_rows).
  Status EnqueueRows(uint64_t first_position, std::span<const LayerRows> layers,
                     const TokenNames& names = {}) {
    const std::vector<pqc_layer_rows> rows = LayerRowsToC(layers);
    const pqc_row_options options = names.c();
    return Status(pqc_enqueue_rows(handle_.get(), first_position, rows.data(),
                                   static_cast<uint32_t>(rows.size()), &options));
  }

  // Adds queries of tokens that are stored, for indexes of layout PQC_SUBSPACES_WEIGHTED: all or
  // none (pqc_add_query_samples).
  Status AddQuerySamples(std::span<const QuerySamples> samples) {
    std::vector<pqc_query_samples> c;
    for (const QuerySamples& each : samples) c.push_back(each.c());
    return Status(pqc_add_query_samples(handle_.get(), c.data(), static_cast<uint32_t>(c.size())));
  }

  // Trains and codes the index of all layers; returns when it is complete (pqc_build_index).
  // PQC_ALREADY_EXISTS says that the index was built before.
  Status BuildIndex(const BuildOptions& options = {}) {
    const pqc_build_options c = BuildOptionsToC(options);
    return Status(pqc_build_index(handle_.get(), &c));
  }

  // Returns the k best tokens for a query, positions [kv_heads, count] ascending per kv head
  // (pqc_topk). Calls it twice when there are more than kExpectedPositions.
  Result<Selected> TopK(const Query& query, const Selection& selection) {
    const pqc_query q = ToC(query);
    const pqc_selection s = selection.c();
    Selected selected;
    pqc_positions out = PQC_INIT(pqc_positions);
    pqc_status status = PQC_OUT_OF_RANGE;
    for (size_t capacity = kExpectedPositions; status == PQC_OUT_OF_RANGE;) {
      selected.positions.resize(capacity);
      out.positions = selected.positions.data();
      out.capacity = capacity;
      status = pqc_topk(handle_.get(), &q, &s, &out);
      const size_t needed = size_t{out.kv_heads} * out.count;
      if (status == PQC_OUT_OF_RANGE && needed <= capacity)
        break;  // something else is out of range
      capacity = needed;
    }
    if (status != PQC_OK) return Status(status);
    selected = FromC(out, std::move(selected.positions));
    selected.positions.resize(size_t{out.kv_heads} * out.count);
    return selected;
  }

  // Selects tokens and returns the partial attention over them: output [query_length, query_heads,
  // value_dim] and lse [query_length, query_heads], to be merged with the engine's own over sink
  // and window (pqc_attend, Attention::Merge).
  Result<Attention> Attend(const Query& query, const Selection& selection) {
    const pqc_query q = ToC(query);
    const pqc_selection s = selection.c();
    return Attend(query,
                  [&](pqc_attention* out) { return pqc_attend(handle_.get(), &q, &s, out); });
  }

  // Returns the partial attention over given positions, [kv_heads, count] and ascending per kv head
  // (pqc_attend_positions). PQC_INVALID_ARGUMENT also when `positions` is shorter.
  Result<Attention> Attend(const Query& query, std::span<const uint32_t> positions,
                           uint32_t count) {
    if (Status status = CheckPositions(query.layer, positions, count); !status.ok()) return status;
    const pqc_query q = ToC(query);
    return Attend(query, [&](pqc_attention* out) {
      return pqc_attend_positions(handle_.get(), &q, positions.data(), count, out);
    });
  }

  // Selects and attends like Attend, and writes to the engine's memory. Returns the selected
  // tokens, without positions (pqc_attend).
  Result<Selected> Attend(const Query& query, const Selection& selection,
                          const AttentionMemory& memory) {
    const pqc_query q = ToC(query);
    const pqc_selection s = selection.c();
    return Attend(memory,
                  [&](pqc_attention* out) { return pqc_attend(handle_.get(), &q, &s, out); });
  }

  // Returns the exact attention over all stored rows of a range, which may be empty, causal by
  // query position; `query.queries`: [tokens, query_heads, key_dim] of up to 8192 tokens
  // (pqc_attend_range).
  Result<Attention> AttendRange(const Query& query, pqc_token_range tokens) {
    const pqc_query q = ToC(query);
    return Attend(query, [&](pqc_attention* out) {
      return pqc_attend_range(handle_.get(), &q, tokens, out);
    });
  }
  // Attends like AttendRange, and writes to the engine's memory.
  Status AttendRange(const Query& query, pqc_token_range tokens, const AttentionMemory& memory) {
    const pqc_query q = ToC(query);
    return Attend(
               memory,
               [&](pqc_attention* out) { return pqc_attend_range(handle_.get(), &q, tokens, out); })
        .status();
  }

  // Returns the logits of the tokens of a range under an index, [query_heads, tokens], and their
  // maximum and sum of exponentials per query head (pqc_score). For a query of one token.
  Result<Scores> Score(const Query& query, const Index& index, pqc_token_range tokens) {
    const pqc_query q = ToC(query);
    const size_t heads = QueryHeads(query);
    const size_t count = tokens.end > tokens.begin ? tokens.end - tokens.begin : 0;
    Scores scores{std::vector<float>(heads * count), std::vector<float>(heads),
                  std::vector<float>(heads)};
    const pqc_status status =
        pqc_score(handle_.get(), &q, &index, tokens, scores.logits.data(), scores.logits.size(),
                  scores.max.data(), scores.sum_exp.data());
    if (status != PQC_OK) return Status(status);
    return scores;
  }

  // Copies the rows of a token range to `out`: [kv_heads, tokens, dim] of the cache's dtype
  // (pqc_fetch_blocks).
  Status FetchBlocks(uint32_t layer, pqc_token_range tokens, pqc_row_part part,
                     std::span<std::byte> out) {
    return Status(pqc_fetch_blocks(handle_.get(), layer, tokens, part, out.data(), out.size()));
  }

  // Copies the rows at positions [kv_heads, count], in any order, to `out`: [kv_heads, count, dim]
  // of the cache's dtype (pqc_fetch_tokens).
  Status FetchTokens(uint32_t layer, std::span<const uint32_t> positions, uint32_t count,
                     pqc_row_part part, std::span<std::byte> out) {
    if (Status status = CheckPositions(layer, positions, count); !status.ok()) return status;
    return Status(pqc_fetch_tokens(handle_.get(), layer, positions.data(), count, part, out.data(),
                                   out.size()));
  }

  // Copies the rows of a range of tokens of any stored layers to the tensors of `layers`, which are
  // of any layout, paged or not, on the host or on a GPU (pqc_load). Operation::Load begins it.
  Status Load(pqc_token_range tokens, std::span<const LayerRows> layers) {
    const std::vector<pqc_layer_rows> rows = LayerRowsToC(layers);
    return Status(pqc_load(handle_.get(), tokens, rows.data(), static_cast<uint32_t>(rows.size())));
  }
  // A hint that rows will be read soon; never waits (pqc_prefetch).
  Status Prefetch(pqc_token_range tokens) { return Status(pqc_prefetch(handle_.get(), tokens)); }

  // Removes the tokens from `token_count` on, in all layers (pqc_sequence_truncate).
  Status Truncate(uint64_t token_count) {
    return Status(pqc_sequence_truncate(handle_.get(), token_count));
  }

  // Returns a new sequence that shares the first `token_count` tokens (0 = all) and their indexes,
  // copy-on-write (pqc_sequence_fork).
  Result<Sequence> Fork(uint64_t token_count = 0) {
    pqc_sequence* child = nullptr;
    const pqc_status status = pqc_sequence_fork(handle_.get(), token_count, &child);
    if (status != PQC_OK) return Status(status);
    return Sequence(child, sizes_);
  }

  // Replaces the sequences of one cache by from.size() ones, of which number i continues number
  // from[i]: itself at its first mention, a fork at further ones. Those without a mention are
  // dropped. After an error `sequences` is as before (pqc_sequences_reorder).
  static Status Reorder(std::vector<Sequence>* sequences, std::span<const uint32_t> from) {
    std::vector<pqc_sequence*> handles;
    handles.reserve(sequences->size());
    for (const Sequence& sequence : *sequences) handles.push_back(sequence.get());
    std::vector<pqc_sequence*> reordered(from.size());
    const pqc_status status =
        pqc_sequences_reorder(handles.data(), static_cast<uint32_t>(handles.size()), from.data(),
                              static_cast<uint32_t>(from.size()), reordered.data());
    if (status != PQC_OK) return Status(status);
    std::vector<Sequence> made;
    made.reserve(reordered.size());
    for (pqc_sequence* handle : reordered)
      made.push_back(Sequence(handle, sequences->front().sizes_));
    for (Sequence& sequence : *sequences) (void)sequence.handle_.release();
    *sequences = std::move(made);
    return Status();
  }

  // Suspends the sequence: it keeps its tokens, and until Resume calls that read or change it
  // return PQC_FAILED_PRECONDITION (pqc_sequence_suspend).
  Status Suspend() { return Status(pqc_sequence_suspend(handle_.get())); }
  // Protects the sequence, and the cached prefix that remains of it, from eviction for `ttl_ms`
  // milliseconds, at most 30 days; 0 ends the protection (pqc_sequence_pin).
  Status Pin(uint64_t ttl_ms) { return Status(pqc_sequence_pin(handle_.get(), ttl_ms)); }
  // Ends a suspension; returns the sequence's tokens (pqc_sequence_resume).
  Result<uint64_t> Resume() {
    uint64_t token_count = 0;
    const pqc_status status = pqc_sequence_resume(handle_.get(), &token_count);
    if (status != PQC_OK) return Status(status);
    return token_count;
  }

  // Waits until the rows of finished steps, and of Gpu::Ingest, are stored; returns and clears
  // their pending error (pqc_sequence_flush).
  Status Flush() { return Status(pqc_sequence_flush(handle_.get())); }

  // Returns the sequence's state in the sidecar: tokens, bytes, segments (pqc_sequence_describe).
  Result<pqc_sequence_info> Describe() {
    pqc_sequence_info info = PQC_INIT(pqc_sequence_info);
    const pqc_status status = pqc_sequence_describe(handle_.get(), &info);
    if (status != PQC_OK) return Status(status);
    return info;
  }

  // Returns what this client knows of the sequence, without waiting and without an RPC: tokens that
  // are stored and indexed, and whether it is suspended or lost (pqc_sequence_progress).
  Result<pqc_progress> Progress() {
    pqc_progress progress = PQC_INIT(pqc_progress);
    const pqc_status status = pqc_sequence_progress(handle_.get(), &progress);
    if (status != PQC_OK) return Status(status);
    return progress;
  }

  // Drops the sequence now and returns the status, which the destructor would ignore. The object is
  // empty afterwards, whatever the status is (pqc_sequence_drop).
  Status Drop() { return Status(pqc_sequence_drop(handle_.release())); }
  // Waits until the rows of finished steps are stored, and closes the handle without dropping the
  // sequence, which belongs to the session that created it. The object is empty afterwards,
  // whatever the status is (pqc_sequence_detach).
  Status Detach() { return Status(pqc_sequence_detach(handle_.release())); }

 private:
  friend class Cache;
  friend class Client;
  friend class Decoder;
  friend class Step;
  struct Closer {
    bool detaches = false;  // of a handle that Cache::Attach has made
    void operator()(pqc_sequence* sequence) const {
      (void)(detaches ? pqc_sequence_detach(sequence) : pqc_sequence_drop(sequence));
    }
  };
  struct Sizes {
    uint32_t kv_heads = 0;
    uint32_t value_dim = 0;
  };
  using SizesByLayer = std::map<uint32_t, Sizes>;

  static constexpr size_t kExpectedPositions = 16384;

  Sequence(pqc_sequence* handle, std::shared_ptr<const SizesByLayer> sizes, bool detaches = false)
      : handle_(handle, Closer{detaches}), sizes_(std::move(sizes)) {}

  // Returns zeros for a layer that is not stored: the call itself then names the field.
  Sizes SizesOf(uint32_t layer) const {
    const auto found = sizes_->find(layer);
    return found == sizes_->end() ? Sizes{} : found->second;
  }

  Status CheckPositions(uint32_t layer, std::span<const uint32_t> positions, uint32_t count) const {
    const size_t needed = size_t{SizesOf(layer).kv_heads} * count;
    if (positions.size() >= needed) return {};
    return {PQC_INVALID_ARGUMENT, "positions",
            std::to_string(positions.size()) + ", but " + std::to_string(needed) +
                " are needed: [kv_heads, count]"};
  }

  static pqc_query ToC(const Query& query) {
    pqc_query c = PQC_INIT(pqc_query);
    c.layer = query.layer;
    c.query_position = query.query_position;
    c.queries = query.queries.c();
    return c;
  }

  static Selected FromC(const pqc_positions& c, std::vector<uint32_t> positions) {
    return {c.kv_heads, c.count, std::move(positions), c.sink_tokens, c.window_tokens};
  }

  static size_t QueryHeads(const Query& query) {
    return query.queries.ndim() < 2 ? 0 : query.queries.dim(query.queries.ndim() - 2);
  }

  template <class CallAttend>
  Result<Attention> Attend(const Query& query, const CallAttend& call) {
    Attention attention;
    const bool several = query.queries.ndim() == 3;
    attention.lse.resize(QueryHeads(query) * (several ? query.queries.dim(0) : 1));
    attention.output.resize(attention.lse.size() * SizesOf(query.layer).value_dim);
    // Even an empty output must not be NULL, so that the error names the field that is wrong.
    attention.lse.reserve(1);
    attention.output.reserve(1);
    pqc_attention out = PQC_INIT(pqc_attention);
    out.output = attention.output.data();
    out.output_capacity = attention.output.size();
    out.lse = attention.lse.data();
    out.lse_capacity = attention.lse.size();
    if (const pqc_status status = call(&out); status != PQC_OK) return Status(status);
    attention.selected = FromC(out.selected, {});
    return attention;
  }

  template <class CallAttend>
  static Result<Selected> Attend(const AttentionMemory& memory, const CallAttend& call) {
    const pqc_partial place = memory.c();
    pqc_attention out = PQC_INIT(pqc_attention);
    out.output_tensor = &place.output;
    out.lse_tensor = &place.lse;
    out.lse_base = place.lse_base;
    if (const pqc_status status = call(&out); status != PQC_OK) return Status(status);
    return FromC(out.selected, {});
  }

  std::unique_ptr<pqc_sequence, Closer> handle_;
  // Shared with its cache, which may be destroyed first.
  std::shared_ptr<const SizesByLayer> sizes_;
};

}  // namespace pqcached

#endif  // PQCACHED_SEQUENCE_HPP_
