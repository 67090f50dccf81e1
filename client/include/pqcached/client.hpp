// pqcached client: C++20 over the C ABI of client.h, in two headers: this one, and values.hpp,
// which it includes, with statuses, tensors, options and results. gpu.hpp adds steps and prefill on
// a GPU.
//
// Client, Cache, Sequence, Step and Decoder own their handle and move; they may be destroyed in any
// order. Nothing throws except std::bad_alloc: a function that may fail returns a Status or a
// Result<T>. Each function calls the function of the C ABI that its comment names; its errors,
// thread-safety and deadline, and whether repeating it can help, are written there, and the table
// of status codes at the top of client.h. A row is a KV entry: [key, value] of one token, layer and
// kv head.
//
// Example, which stores the rows of a prompt in one layer and attends to a tenth of them:
//
//     auto client = pqcached::Client::Open({.endpoint = "unix:///run/pqcached/pqcached.sock"});
//     if (!client.ok()) return client.status();
//     const pqcached::LayerGroup layers{.layers = {0}, .kv_heads = 8, .query_heads = 32,
//                                       .key_dim = 128, .value_dim = 128};
//     auto cache = client->OpenCache({.name = "demo", .model_fingerprint = "demo-1",
//                                     .groups = {layers}, .capacity_bytes = 64 << 20});
//     if (!cache.ok()) return cache.status();
//     auto sequence = cache->CreateSequence();
//     if (!sequence.ok()) return sequence.status();
//
//     pqcached::Status status = sequence->Ingest(0, 0, {k, {4096, 8, 128}}, {v, {4096, 8, 128}});
//     if (status.ok()) status = sequence->BuildIndex({.sink_tokens = 16});
//     if (!status.ok()) return status;
//
//     auto attention = sequence->Attend(
//         {.layer = 0, .query_position = 4095, .queries = {q, {32, 128}}},
//         {.sink_tokens = 16, .window_tokens = 64, .ratio = 0.1});
//     if (!attention.ok()) return attention.status();
//     attention->Merge(own);  // the engine's part: sink and window
#ifndef PQCACHED_CLIENT_HPP_
#define PQCACHED_CLIENT_HPP_

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pqcached/client.h"
#include "pqcached/values.hpp"

namespace pqcached {

// The tokens of one request, with their rows and indexes (pqc_sequence). Made by Cache and Fork.
// Thread-safe as client.h says, but for moves and Drop; the destructor drops the sequence.
class Sequence {
 public:
  // Returns the sidecar's id of the sequence (pqc_sequence_id).
  uint64_t id() const { return pqc_sequence_id(handle_.get()); }
  // Returns the handle for calls of the C ABI; this object still owns it.
  pqc_sequence* get() const { return handle_.get(); }

  // Stores the rows of consecutive prefill tokens of one layer, from `first_position` on: keys
  // [tokens, kv_heads, key_dim], values [tokens, kv_heads, value_dim], copied before it returns.
  // Repeating it is harmless (pqc_ingest).
  Status Ingest(uint32_t layer, uint64_t first_position, const Tensor& keys, const Tensor& values) {
    const pqc_tensor k = keys.c();
    const pqc_tensor v = values.c();
    return Status(pqc_ingest(handle_.get(), layer, first_position, &k, &v));
  }

  // Appends new tokens to all stored layers at once, each layer listed exactly once; returns the
  // sequence's tokens. Repeating it is harmless (pqc_append).
  Result<uint64_t> Append(uint64_t first_position, std::span<const LayerRows> layers) {
    std::vector<pqc_layer_rows> rows(layers.size(), PQC_INIT(pqc_layer_rows));
    for (size_t i = 0; i < layers.size(); ++i) {
      rows[i].layer = layers[i].layer;
      rows[i].keys = layers[i].keys.c();
      rows[i].values = layers[i].values.c();
    }
    uint64_t token_count = 0;
    const pqc_status status = pqc_append(handle_.get(), first_position, rows.data(),
                                         static_cast<uint32_t>(rows.size()), &token_count);
    if (status != PQC_OK) return Status(status);
    return token_count;
  }

  // Trains and codes the index of all layers; returns when it is complete (pqc_build_index).
  // PQC_ALREADY_EXISTS says that the index was built before.
  Status BuildIndex(const BuildOptions& options = {}) {
    pqc_build_options c = PQC_INIT(pqc_build_options);
    c.index = options.index;
    c.iterations = options.iterations;
    c.seed = options.seed;
    c.train_tokens = options.train_tokens;
    c.sink_tokens = options.sink_tokens;
    c.timeout_ms = options.timeout_ms;
    if (options.progress) {
      c.callback = [](void* context, const pqc_build_progress* progress) {
        return static_cast<const BuildOptions*>(context)->progress(*progress) ? 1 : 0;
      };
      c.callback_context = const_cast<BuildOptions*>(&options);
    }
    return Status(pqc_build_index(handle_.get(), &c));
  }

  // Returns the k best tokens for a query, positions [kv_heads, count] ascending per kv head
  // (pqc_select). Calls it twice when there are more than kExpectedPositions.
  Result<Selected> Select(const Query& query, const Selection& selection) {
    const pqc_query q = ToC(query);
    const pqc_selection s = ToC(selection);
    Selected selected;
    pqc_positions out = PQC_INIT(pqc_positions);
    pqc_status status = PQC_OUT_OF_RANGE;
    for (size_t capacity = kExpectedPositions; status == PQC_OUT_OF_RANGE;) {
      selected.positions.resize(capacity);
      out.positions = selected.positions.data();
      out.capacity = capacity;
      status = pqc_select(handle_.get(), &q, &s, &out);
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
    const pqc_selection s = ToC(selection);
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

  // Drops the sequence now and returns the status, which the destructor would ignore. The object is
  // empty afterwards, whatever the status is (pqc_sequence_drop).
  Status Drop() { return Status(pqc_sequence_drop(handle_.release())); }

 private:
  friend class Cache;
  friend class Client;
  friend class Decoder;
  friend class Step;
  struct Dropper {
    void operator()(pqc_sequence* sequence) const { pqc_sequence_drop(sequence); }
  };
  struct Sizes {
    uint32_t kv_heads = 0;
    uint32_t value_dim = 0;
  };
  using SizesByLayer = std::map<uint32_t, Sizes>;

  static constexpr size_t kExpectedPositions = 16384;

  Sequence(pqc_sequence* handle, std::shared_ptr<const SizesByLayer> sizes)
      : handle_(handle), sizes_(std::move(sizes)) {}

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

  static pqc_selection ToC(const Selection& selection) {
    pqc_selection c = PQC_INIT(pqc_selection);
    c.index = selection.index;
    c.group_rule = selection.group_rule;
    c.sink_tokens = selection.sink_tokens;
    c.window_tokens = selection.window_tokens;
    c.excluded = selection.excluded.data();
    c.excluded_count = static_cast<uint32_t>(selection.excluded.size());
    c.budget = selection.token_count ? PQC_BUDGET_COUNT : PQC_BUDGET_RATIO;
    c.ratio = selection.ratio;
    c.token_count = selection.token_count;
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

  std::unique_ptr<pqc_sequence, Dropper> handle_;
  // Shared with its cache, which may be destroyed first.
  std::shared_ptr<const SizesByLayer> sizes_;
};

// One sequence of a step (pqc_step_item).
struct StepItem {
  const Sequence* sequence = nullptr;
  uint64_t query_position = 0;  // absolute position of the first query token
  uint32_t query_length = 1;    // query tokens, 1..8
};

// One decode position, or several (speculation), over all layers for a batch of sequences. Made by
// Client::BeginStep and Gpu::BeginStep; abandoned when it is destroyed before End. One thread at a
// time.
class Step {
 public:
  struct Positions {
    std::vector<uint32_t> positions = {};  // item i's begin at offsets[i]: [kv_heads, counts[i]]
    std::vector<uint64_t> offsets = {};    // [items]
    std::vector<uint32_t> counts = {};     // [items], k per kv head
  };

  // Returns the k best tokens of each item in one layer. queries: [query tokens of all items,
  // query_heads, key_dim]; `selection` null = the step's (pqc_step_select).
  Result<Positions> Select(uint32_t layer, const Tensor& queries,
                           const Selection* selection = nullptr) {
    const pqc_tensor q = queries.c();
    const pqc_selection s = ToC(selection);
    Positions selected;
    selected.offsets.resize(item_count_);
    selected.counts.resize(item_count_);
    pqc_step_positions out = PQC_INIT(pqc_step_positions);
    out.offsets = selected.offsets.data();
    out.counts = selected.counts.data();
    pqc_status status = pqc_step_select(handle_.get(), layer, &q, selection ? &s : nullptr, &out);
    if (status != PQC_OK) return Status(status);
    selected.positions.resize(out.count);
    selected.positions.reserve(1);  // so that it is not NULL, which only asks for counts
    out.positions = selected.positions.data();
    out.capacity = out.count;
    status = pqc_step_select(handle_.get(), layer, &q, selection ? &s : nullptr, &out);
    if (status != PQC_OK) return Status(status);
    return selected;
  }

  // Writes the partial attention over the selected tokens of one layer to the caller's memory:
  // output [query tokens of all items, query_heads, value_dim] and lse [query tokens of all items,
  // query_heads]. Results may be used only after End has succeeded (pqc_step_attend).
  Status Attend(uint32_t layer, const Tensor& queries, std::span<float> output,
                std::span<float> lse, const Selection* selection = nullptr) {
    const pqc_tensor q = queries.c();
    const pqc_selection s = ToC(selection);
    pqc_step_attention out = ToC(output, lse);
    return Status(pqc_step_attend(handle_.get(), layer, &q, selection ? &s : nullptr, &out));
  }

  // Starts Attend on other threads and returns; the arguments' memory must stay until AttendWait
  // returns (pqc_step_attend_begin). Not in a step on a GPU.
  Status AttendBegin(uint32_t layer, const Tensor& queries, std::span<float> output,
                     std::span<float> lse, const Selection* selection = nullptr) {
    const pqc_tensor q = queries.c();
    const pqc_selection s = ToC(selection);
    pqc_step_attention out = ToC(output, lse);
    return Status(pqc_step_attend_begin(handle_.get(), layer, &q, selection ? &s : nullptr, &out));
  }
  // Waits for the attention that AttendBegin started; returns its status (pqc_step_attend_wait).
  Status AttendWait() { return Status(pqc_step_attend_wait(handle_.get())); }

  // Passes the rows of the step's tokens, [query tokens of all items, kv_heads, dim] of every
  // stored layer, and closes the step, whatever the status is. `accepted`, [items]: how many query
  // tokens of each item remain; empty = all. The step's results may be used only when it succeeds
  // (pqc_step_end).
  Status End(std::span<const LayerRows> layers, std::span<const uint32_t> accepted = {}) {
    if (!accepted.empty() && accepted.size() != item_count_) {
      return {PQC_INVALID_ARGUMENT, "accepted",
              std::to_string(accepted.size()) + ", but " + std::to_string(item_count_) +
                  " are needed: [items]"};
    }
    std::vector<pqc_layer_rows> rows(layers.size(), PQC_INIT(pqc_layer_rows));
    for (size_t i = 0; i < layers.size(); ++i) {
      rows[i].layer = layers[i].layer;
      rows[i].keys = layers[i].keys.c();
      rows[i].values = layers[i].values.c();
    }
    return Status(pqc_step_end(handle_.release(), rows.data(), static_cast<uint32_t>(rows.size()),
                               accepted.empty() ? nullptr : accepted.data()));
  }

 private:
  friend class Client;
  friend class Gpu;
  struct Abandoner {
    void operator()(pqc_step* step) const { pqc_step_abandon(step); }
  };
  // Arguments of a step's begin for the C ABI. Points into itself.
  struct BeginArguments {
    BeginArguments(std::span<const StepItem> step_items, const Selection* step_selection,
                   uint32_t timeout_ms)
        : items(step_items.size(), PQC_INIT(pqc_step_item)) {
      for (size_t i = 0; i < items.size(); ++i) {
        items[i].sequence = step_items[i].sequence ? step_items[i].sequence->get() : nullptr;
        items[i].query_position = step_items[i].query_position;
        items[i].query_length = step_items[i].query_length;
      }
      if (step_selection) selection = Sequence::ToC(*step_selection);
      options.selection = step_selection ? &selection : nullptr;
      options.timeout_ms = timeout_ms;
    }
    BeginArguments(const BeginArguments&) = delete;
    BeginArguments& operator=(const BeginArguments&) = delete;

    std::vector<pqc_step_item> items;
    pqc_selection selection{};
    pqc_step_options options = PQC_INIT(pqc_step_options);
  };

  Step(pqc_step* handle, size_t item_count) : handle_(handle), item_count_(item_count) {}

  static pqc_selection ToC(const Selection* selection) {
    return selection ? Sequence::ToC(*selection) : pqc_selection{};
  }
  static pqc_step_attention ToC(std::span<float> output, std::span<float> lse) {
    pqc_step_attention out = PQC_INIT(pqc_step_attention);
    out.output = output.data();
    out.output_capacity = output.size();
    out.lse = lse.data();
    out.lse_capacity = lse.size();
    return out;
  }

  std::unique_ptr<pqc_step, Abandoner> handle_;
  size_t item_count_ = 0;
};

// Keeps sink and window too: for engines without a KV cache of their own (pqc_decoder). One thread
// at a time.
class Decoder {
 public:
  // Opens a decoder with one selection for all layers; its window_tokens must be at least 1. The
  // decoder uses the sequence until it is destroyed (pqc_decoder_open).
  static Result<Decoder> Open(Sequence& sequence, const Selection& selection) {
    const pqc_selection s = Sequence::ToC(selection);
    pqc_decoder* decoder = nullptr;
    const pqc_status status = pqc_decoder_open(sequence.get(), &s, &decoder);
    if (status != PQC_OK) return Status(status);
    return Decoder(decoder);
  }

  // Stores the rows of the next prefill tokens of a layer: keys [tokens, kv_heads, key_dim], values
  // [tokens, kv_heads, value_dim] (pqc_decoder_prefill).
  Status Prefill(uint32_t layer, const Tensor& keys, const Tensor& values) {
    const pqc_tensor k = keys.c();
    const pqc_tensor v = values.c();
    return Status(pqc_decoder_prefill(handle_.get(), layer, &k, &v));
  }

  // Decodes the next token in one layer: query [query_heads, key_dim], key [kv_heads, key_dim],
  // value [kv_heads, value_dim]; output [query_heads, value_dim], the attention over sink, selected
  // tokens and window, the token itself included. Layers are called in ascending order
  // (pqc_decoder_decode).
  Status Decode(uint32_t layer, const Tensor& query, const Tensor& key, const Tensor& value,
                std::span<float> output) {
    const pqc_tensor q = query.c();
    const pqc_tensor k = key.c();
    const pqc_tensor v = value.c();
    return Status(
        pqc_decoder_decode(handle_.get(), layer, &q, &k, &v, output.data(), output.size()));
  }

 private:
  struct Closer {
    void operator()(pqc_decoder* decoder) const { pqc_decoder_close(decoder); }
  };
  explicit Decoder(pqc_decoder* handle) : handle_(handle) {}

  std::unique_ptr<pqc_decoder, Closer> handle_;
};

// One tenant's KV space for one model (pqc_cache). Made by Client::OpenCache. Thread-safe, but for
// moves; the destructor closes the handle, and the cache remains in the sidecar.
class Cache {
 public:
  // Returns the handle for calls of the C ABI; this object still owns it.
  pqc_cache* get() const { return handle_.get(); }

  // Creates an empty sequence (pqc_sequence_create).
  Result<Sequence> CreateSequence() {
    pqc_sequence* sequence = nullptr;
    const pqc_status status = pqc_sequence_create(handle_.get(), &sequence);
    if (status != PQC_OK) return Status(status);
    return Sequence(sequence, sizes_);
  }

  // Creates a sequence that begins with the longest stored prefix of its prompt. *token_count (may
  // be null) receives the tokens of that prefix: the next position to ingest
  // (pqc_sequence_create_with).
  Result<Sequence> CreateSequence(const SequenceOptions& options, uint64_t* token_count = nullptr) {
    pqc_sequence_options c = PQC_INIT(pqc_sequence_options);
    c.token_ids = options.prompt.token_ids.data();
    c.token_id_count = options.prompt.token_ids.size();
    c.extra_key = options.prompt.extra_key.data();
    c.extra_key_bytes = options.prompt.extra_key.size();
    c.group_key = options.group_key.data();
    c.group_key_bytes = options.group_key.size();
    if (options.live_index) {
      c.has_live_index = 1;
      c.iterations = options.live_index->iterations;
      c.index = options.live_index->index;
      c.seed = options.live_index->seed;
      c.train_tokens = options.live_index->train_tokens;
      c.sink_tokens = options.live_index->sink_tokens;
    }
    pqc_sequence* sequence = nullptr;
    const pqc_status status = pqc_sequence_create_with(handle_.get(), &c, &sequence, token_count);
    if (status != PQC_OK) return Status(status);
    return Sequence(sequence, sizes_);
  }

  // Returns whether a request fits: `token_count` prefill tokens that MatchPrefix has not found,
  // and `output_token_count` expected tokens. Reserves nothing (pqc_admit).
  Result<pqc_admission> Admit(uint64_t token_count, uint64_t output_token_count = 0) {
    pqc_admission admission = PQC_INIT(pqc_admission);
    const pqc_status status = pqc_admit(handle_.get(), token_count, output_token_count, &admission);
    if (status != PQC_OK) return Status(status);
    return admission;
  }

  // Returns how many tokens of the prompt are stored: a multiple of 128 (pqc_match_prefix).
  Result<uint64_t> MatchPrefix(const Prompt& prompt) {
    uint64_t token_count = 0;
    const pqc_status status =
        pqc_match_prefix(handle_.get(), prompt.token_ids.data(), prompt.token_ids.size(),
                         prompt.extra_key.data(), prompt.extra_key.size(), &token_count);
    if (status != PQC_OK) return Status(status);
    return token_count;
  }

 private:
  friend class Client;
  struct Closer {
    void operator()(pqc_cache* cache) const { pqc_cache_close(cache); }
  };

  Cache(pqc_cache* handle, const CacheSpec& spec) : handle_(handle) {
    auto sizes = std::make_shared<Sequence::SizesByLayer>();
    for (const LayerGroup& group : spec.groups) {
      for (const uint32_t layer : group.layers) (*sizes)[layer] = {group.kv_heads, group.value_dim};
    }
    sizes_ = std::move(sizes);
  }

  std::unique_ptr<pqc_cache, Closer> handle_;
  std::shared_ptr<const Sequence::SizesByLayer> sizes_;  // shared with the sequences
};

// A connection and session with the sidecar (pqc_client). Thread-safe, but for moves; the
// destructor ends the session, which drops its sequences.
class Client {
 public:
  // Connects to the sidecar and opens a session (pqc_client_open).
  static Result<Client> Open(const ClientOptions& options) {
    pqc_client_options c = PQC_INIT(pqc_client_options);
    c.endpoint = options.endpoint.c_str();
    c.tenant = options.tenant.empty() ? nullptr : options.tenant.c_str();
    c.client_name = options.client_name.empty() ? nullptr : options.client_name.c_str();
    c.timeout_ms = options.timeout_ms;
    c.rpc_library_path =
        options.rpc_library_path.empty() ? nullptr : options.rpc_library_path.c_str();
    c.path = options.path;
    c.thread_count = options.thread_count;
    c.parallel_for = options.parallel_for;
    c.parallel_for_context = options.parallel_for_context;
    c.staging_slot_bytes = options.staging_slot_bytes;
    c.staging_slot_count = options.staging_slot_count;
    pqc_client* client = nullptr;
    const pqc_status status = pqc_client_open(&c, &client);
    if (status != PQC_OK) return Status(status);
    return Client(client);
  }

  // Takes ownership of a handle of the C ABI.
  static Client Adopt(pqc_client* handle) { return Client(handle); }

  // Returns how this client reaches the rows: by RPC, or in mapped memory (pqc_client_path).
  pqc_path path() const { return pqc_client_path(handle_.get()); }

  // Returns the client's counters: RPCs, mapped bytes, leases (pqc_client_count).
  Result<pqc_client_counts> Count() const {
    pqc_client_counts counts = PQC_INIT(pqc_client_counts);
    const pqc_status status = pqc_client_count(handle_.get(), &counts);
    if (status != PQC_OK) return Status(status);
    return counts;
  }

  // Begins a step for `items`. `selection` holds for all layers; null = each call passes one.
  // timeout_ms: deadline of all the step's waits, in milliseconds; 0 = the client's
  // (pqc_step_begin).
  Result<Step> BeginStep(std::span<const StepItem> items, const Selection* selection = nullptr,
                         uint32_t timeout_ms = 0) {
    const Step::BeginArguments terms(items, selection, timeout_ms);
    pqc_step* step = nullptr;
    const pqc_status status =
        pqc_step_begin(handle_.get(), terms.items.data(), static_cast<uint32_t>(items.size()),
                       &terms.options, &step);
    if (status != PQC_OK) return Status(status);
    return Step(step, items.size());
  }

  // Opens the tenant's cache of this name, or joins it when it is open with the same spec
  // (pqc_cache_open).
  Result<Cache> OpenCache(const CacheSpec& spec) {
    std::vector<pqc_layer_group> groups(spec.groups.size(), PQC_INIT(pqc_layer_group));
    for (size_t i = 0; i < groups.size(); ++i) {
      const LayerGroup& group = spec.groups[i];
      groups[i].kind = group.kind;
      groups[i].layers = group.layers.data();
      groups[i].layer_count = static_cast<uint32_t>(group.layers.size());
      groups[i].kv_heads = group.kv_heads;
      groups[i].query_heads = group.query_heads;
      groups[i].key_dim = group.key_dim;
      groups[i].value_dim = group.value_dim;
      groups[i].dtype = group.dtype;
      groups[i].softmax_scale = group.softmax_scale;
      groups[i].softcap = group.softcap;
    }
    pqc_cache_spec c = PQC_INIT(pqc_cache_spec);
    c.name = spec.name.c_str();
    c.model_fingerprint = spec.model_fingerprint.c_str();
    c.groups = groups.data();
    c.group_count = static_cast<uint32_t>(groups.size());
    c.capacity_bytes = spec.capacity_bytes;
    c.default_index = spec.default_index;
    c.rank_group = spec.rank_group.empty() ? nullptr : spec.rank_group.c_str();
    c.rank = spec.rank;
    c.rank_count = spec.rank_count;
    c.kv_head_begin = spec.kv_head_begin;
    c.layer_begin = spec.layer_begin;
    pqc_cache* cache = nullptr;
    const pqc_status status = pqc_cache_open(handle_.get(), &c, &cache);
    if (status != PQC_OK) return Status(status);
    return Cache(cache, spec);
  }

  // Calls a unary Admin RPC by its name, for example "Stats", and returns its answer; both
  // messages are JSON with the proto's field names (pqc_admin_json).
  Result<std::string> AdminJson(const std::string& method, const std::string& request = "{}") {
    char* answer = nullptr;
    const pqc_status status =
        pqc_admin_json(handle_.get(), method.c_str(), request.c_str(), &answer);
    if (status != PQC_OK) return Status(status);
    std::string text = answer;
    pqc_free(answer);
    return text;
  }

 private:
  struct Closer {
    void operator()(pqc_client* client) const { pqc_client_close(client); }
  };
  explicit Client(pqc_client* handle) : handle_(handle) {}

  std::unique_ptr<pqc_client, Closer> handle_;
};

}  // namespace pqcached

#endif  // PQCACHED_CLIENT_HPP_
