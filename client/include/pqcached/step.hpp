// pqcached client: decode steps over a batch of sequences, and Decoder for engines without a KV
// cache of their own. Included by client.hpp.
//
// Example, which decodes one token of a sequence whose only stored layer is 0:
//
//     const pqcached::StepItem item = {.sequence = &sequence, .query_position = 4096};
//     const pqcached::Selection selection = {.sink_tokens = 16, .window_tokens = 64, .ratio = 0.1};
//     auto step = client.BeginStep({&item, 1}, &selection);
//     if (!step.ok()) return step.status();
//
//     // Per layer, once its query is computed; the engine merges its sink and window.
//     pqcached::Status status = step->Attend(0, {q, {1, 32, 128}}, output, lse);
//     if (!status.ok()) return status;
//
//     // The new token's rows in all stored layers; the step is closed in any case.
//     return step->End({&rows, 1});
#ifndef PQCACHED_STEP_HPP_
#define PQCACHED_STEP_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pqcached/client.h"
#include "pqcached/decode.h"
#include "pqcached/sequence.hpp"
#include "pqcached/values.hpp"

namespace pqcached {

// One sequence of a step (pqc_step_item).
struct StepItem {
  const Sequence* sequence = nullptr;
  uint64_t query_position = 0;  // absolute position of the first query token
  uint32_t query_length = 1;    // query tokens, 1..8
};

// Positions of each item of a step that the engine gives (pqc_position_lists).
struct PositionLists {
  // [items, list_count, capacity], padded with -1 behind each list; a list may have any order.
  std::span<const int32_t> positions = {};
  // Of an item: 1 for all heads of the layer, one for each kv head, or one for each query head.
  uint32_t list_count = 1;
  // [items, list_count]; empty = a list ends before its first -1, or at its capacity.
  std::span<const uint32_t> lengths = {};
  // [query tokens of all items, query_heads, capacity], in place of the queries: logits of the
  // positions, which must then ascend within a list. null = from the stored keys.
  const Tensor* logits = nullptr;
};

// Options of a selection of pages (pqc_page_options).
struct PageOptions {
  uint32_t page_tokens = 16;  // 16, 32 or 64
  pqc_head_rule heads = PQC_HEADS_EACH;
  uint64_t flags = 0;  // a sum of pqc_page_flag

  pqc_page_options c() const {
    pqc_page_options options = PQC_INIT(pqc_page_options);
    options.page_tokens = page_tokens;
    options.heads = heads;
    options.flags = flags;
    return options;
  }
};

// One decode position, or several (speculation), over all layers for a batch of sequences. Made by
// Client::BeginStep and Gpu::BeginStep; abandoned when it is destroyed before End. One thread at a
// time.
class Step {
 public:
  struct Positions {
    // Item i's begin at offsets[i], of kv heads or with PQC_PER_QUERY_HEAD of query heads:
    // [kv_heads, counts[i]], or [its query tokens, kv_heads,
    // counts[i]] with PQC_STEP_SELECT_PER_TOKEN.
    std::vector<uint32_t> positions = {};
    std::vector<uint64_t> offsets = {};  // [items]
    std::vector<uint32_t> counts = {};   // [items], k per kv head
  };

  // Returns the k best tokens of each item in one layer. queries: [query tokens of all items,
  // query_heads, key_dim]; `selection` null = the step's (pqc_step_topk).
  Result<Positions> TopK(uint32_t layer, const Tensor& queries,
                         const Selection* selection = nullptr) {
    const pqc_tensor q = queries.c();
    const pqc_selection s = ToC(selection);
    Positions selected;
    selected.offsets.resize(item_count_);
    selected.counts.resize(item_count_);
    pqc_step_positions out = PQC_INIT(pqc_step_positions);
    out.offsets = selected.offsets.data();
    out.counts = selected.counts.data();
    pqc_status status = pqc_step_topk(handle_.get(), layer, &q, selection ? &s : nullptr, &out);
    if (status != PQC_OK) return Status(status);
    selected.positions.resize(out.count);
    selected.positions.reserve(1);  // so that it is not NULL, which only asks for counts
    out.positions = selected.positions.data();
    out.capacity = out.count;
    status = pqc_step_topk(handle_.get(), layer, &q, selection ? &s : nullptr, &out);
    if (status != PQC_OK) return Status(status);
    return selected;
  }

  struct Pages {
    std::vector<int32_t> pages = {};  // [items, list_count, capacity], each ascending, then -1
    uint32_t list_count = 0;          // kv_heads of the layer, or 1
    uint32_t capacity = 0;
    std::vector<uint32_t> lengths = {};  // [items]: pages in each list of an item
  };

  // Returns the pages of each item in one layer, for engines with a page table: block n of a
  // sequence holds its tokens [n page_tokens, (n + 1) page_tokens) (pqc_step_topk_pages). On a GPU,
  // Gpu::TopKPages.
  Result<Pages> TopKPages(uint32_t layer, const Tensor& queries, const PageOptions& options,
                          const Selection* selection = nullptr) {
    const pqc_tensor q = queries.c();
    const pqc_selection s = ToC(selection);
    const pqc_page_options o = options.c();
    Pages selected;
    selected.lengths.resize(item_count_);
    pqc_step_pages out = PQC_INIT(pqc_step_pages);
    out.lengths = selected.lengths.data();
    const auto call = [&] {
      return pqc_step_topk_pages(handle_.get(), layer, &q, selection ? &s : nullptr, &o, &out);
    };
    pqc_status status = call();
    if (status != PQC_OK) return Status(status);
    selected.list_count = out.list_count;
    selected.capacity = out.capacity = out.needed;
    selected.pages.resize(item_count_ * out.list_count * out.needed);
    selected.pages.reserve(1);  // so that it is not NULL, which only asks for lengths
    out.pages = selected.pages.data();
    status = call();
    if (status != PQC_OK) return Status(status);
    return selected;
  }

  // Writes the partial attention over the selected tokens of one layer to the caller's memory:
  // output [query tokens of all items, query_heads, value_dim] and lse [query tokens of all items,
  // query_heads]. counts, empty or one per item, receives how many tokens were attended to. Results
  // may be used only after End has succeeded (pqc_step_attend).
  Status Attend(uint32_t layer, const Tensor& queries, std::span<float> output,
                std::span<float> lse, const Selection* selection = nullptr,
                std::span<uint32_t> counts = {}) {
    const pqc_tensor q = queries.c();
    const pqc_selection s = ToC(selection);
    pqc_step_attention out = ToC(output, lse);
    out.counts = counts.empty() ? nullptr : counts.data();
    return Status(pqc_step_attend(handle_.get(), layer, &q, selection ? &s : nullptr, &out));
  }

  // Attends like Attend, and writes to the engine's memory.
  Status Attend(uint32_t layer, const Tensor& queries, const AttentionMemory& memory,
                const Selection* selection = nullptr, std::span<uint32_t> counts = {}) {
    const pqc_tensor q = queries.c();
    const pqc_selection s = ToC(selection);
    const pqc_partial place = memory.c();
    pqc_step_attention out = ToC(place);
    out.counts = counts.empty() ? nullptr : counts.data();
    return Status(pqc_step_attend(handle_.get(), layer, &q, selection ? &s : nullptr, &out));
  }

  // Attends exactly to the rows of ranges[i] for item i, causally: ranges [items], each empty or
  // below the item's query_position. Waits until they are stored (pqc_step_attend_range).
  Status AttendRange(uint32_t layer, const Tensor& queries, std::span<const pqc_token_range> ranges,
                     std::span<float> output, std::span<float> lse) {
    pqc_step_attention out = ToC(output, lse);
    return AttendRange(layer, queries, ranges, &out);
  }
  // Attends like AttendRange, and writes to the engine's memory.
  Status AttendRange(uint32_t layer, const Tensor& queries, std::span<const pqc_token_range> ranges,
                     const AttentionMemory& memory) {
    const pqc_partial place = memory.c();
    pqc_step_attention out = ToC(place);
    return AttendRange(layer, queries, ranges, &out);
  }

  // Writes the complete attention of one layer over sink, selected tokens and window to the
  // caller's memory: output and counts as in Attend, lse likewise or empty. keys and values, [query
  // tokens of all items, kv_heads, dim], are kept for End, which takes no rows of this layer
  // (pqc_step_decode). In a step on a GPU, with PQC_STEP_DECODES and with tensors on the device.
  Status Decode(uint32_t layer, const Tensor& queries, const Tensor& keys, const Tensor& values,
                std::span<float> output, std::span<float> lse = {},
                const Selection* selection = nullptr, std::span<uint32_t> counts = {}) {
    pqc_step_attention out = ToC(output, lse);
    out.counts = counts.empty() ? nullptr : counts.data();
    return Decode(layer, queries, keys, values, selection, &out);
  }
  // Decodes like Decode, and writes to the engine's memory; without `memory.lse` no lse.
  Status Decode(uint32_t layer, const Tensor& queries, const Tensor& keys, const Tensor& values,
                const AttentionMemory& memory, const Selection* selection = nullptr) {
    const pqc_partial place = memory.c();
    pqc_step_attention out = ToC(place);
    if (memory.lse.ndim() == 0) out.lse_tensor = nullptr;
    return Decode(layer, queries, keys, values, selection, &out);
  }

  // Attends to the rows at the positions that the engine gives, without an index: all query tokens
  // of an item to all positions of its lists, which are below its query_position. Waits until they
  // are stored. With lists.logits only values are read, and `queries` has no effect
  // (pqc_step_attend_positions).
  Status AttendPositions(uint32_t layer, const Tensor& queries, const PositionLists& lists,
                         std::span<float> output, std::span<float> lse) {
    pqc_step_attention out = ToC(output, lse);
    return AttendPositions(layer, queries, lists, &out);
  }
  // Attends like AttendPositions, and writes to the engine's memory.
  Status AttendPositions(uint32_t layer, const Tensor& queries, const PositionLists& lists,
                         const AttentionMemory& memory) {
    const pqc_partial place = memory.c();
    pqc_step_attention out = ToC(place);
    return AttendPositions(layer, queries, lists, &out);
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

  // Checks that what the step has read so far was valid: then results may be used before End
  // (pqc_step_check).
  Status Check() { return Status(pqc_step_check(handle_.get())); }

  // Passes the rows of the step's tokens, [query tokens of all items, kv_heads, dim] of every
  // stored layer that was not decoded, and closes the step, whatever the status is. `accepted`,
  // [items]: how many query tokens of each item remain; empty = all. `names`, [items]: names of
  // tokens of each item's sequence; empty = none. The step's results may be used only when it
  // succeeds (pqc_step_end_with).
  Status End(std::span<const LayerRows> layers = {}, std::span<const uint32_t> accepted = {},
             std::span<const TokenNames> names = {}) {
    if (!accepted.empty() && accepted.size() != item_count_) {
      return {PQC_INVALID_ARGUMENT, "accepted",
              std::to_string(accepted.size()) + ", but " + std::to_string(item_count_) +
                  " are needed: [items]"};
    }
    if (!names.empty() && names.size() != item_count_) {
      return {PQC_INVALID_ARGUMENT, "names",
              std::to_string(names.size()) + ", but " + std::to_string(item_count_) +
                  " are needed: [items]"};
    }
    std::vector<pqc_row_options> options(names.size());
    for (size_t i = 0; i < names.size(); ++i) options[i] = names[i].c();
    const std::vector<pqc_layer_rows> rows = LayerRowsToC(layers);
    return Status(pqc_step_end_with(
        handle_.release(), rows.data(), static_cast<uint32_t>(rows.size()),
        accepted.empty() ? nullptr : accepted.data(), options.empty() ? nullptr : options.data()));
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
                   uint32_t timeout_ms, uint64_t flags = 0)
        : items(step_items.size(), PQC_INIT(pqc_step_item)) {
      for (size_t i = 0; i < items.size(); ++i) {
        items[i].sequence = step_items[i].sequence ? step_items[i].sequence->get() : nullptr;
        items[i].query_position = step_items[i].query_position;
        items[i].query_length = step_items[i].query_length;
      }
      if (step_selection) selection = step_selection->c();
      options.selection = step_selection ? &selection : nullptr;
      options.timeout_ms = timeout_ms;
      options.flags = flags;
    }
    BeginArguments(const BeginArguments&) = delete;
    BeginArguments& operator=(const BeginArguments&) = delete;

    std::vector<pqc_step_item> items;
    pqc_selection selection{};
    pqc_step_options options = PQC_INIT(pqc_step_options);
  };

  Step(pqc_step* handle, size_t item_count) : handle_(handle), item_count_(item_count) {}

  static pqc_selection ToC(const Selection* selection) {
    return selection ? selection->c() : pqc_selection{};
  }
  static pqc_step_attention ToC(std::span<float> output, std::span<float> lse) {
    pqc_step_attention out = PQC_INIT(pqc_step_attention);
    out.output = output.data();
    out.output_capacity = output.size();
    out.lse = lse.data();
    out.lse_capacity = lse.size();
    return out;
  }

  // Borrows from `place`.
  static pqc_step_attention ToC(const pqc_partial& place) {
    pqc_step_attention out = PQC_INIT(pqc_step_attention);
    out.output_tensor = &place.output;
    out.lse_tensor = &place.lse;
    out.lse_base = place.lse_base;
    return out;
  }
  Status AttendRange(uint32_t layer, const Tensor& queries, std::span<const pqc_token_range> ranges,
                     pqc_step_attention* out) {
    if (ranges.size() != item_count_) {
      return {PQC_INVALID_ARGUMENT, "ranges",
              std::to_string(ranges.size()) + ", but " + std::to_string(item_count_) +
                  " are needed: [items]"};
    }
    const pqc_tensor q = queries.c();
    return Status(pqc_step_attend_range(handle_.get(), layer, &q, ranges.data(), out));
  }

  Status Decode(uint32_t layer, const Tensor& queries, const Tensor& keys, const Tensor& values,
                const Selection* selection, pqc_step_attention* out) {
    const pqc_tensor q = queries.c(), k = keys.c(), v = values.c();
    const pqc_selection s = ToC(selection);
    return Status(pqc_step_decode(handle_.get(), layer, &q, &k, &v, selection ? &s : nullptr, out));
  }

  Status AttendPositions(uint32_t layer, const Tensor& queries, const PositionLists& lists,
                         pqc_step_attention* out) {
    const size_t count = item_count_ * lists.list_count;
    if (count == 0 || lists.positions.size() % count != 0 ||
        lists.positions.size() / count > UINT32_MAX) {
      return {PQC_INVALID_ARGUMENT, "lists.positions",
              std::to_string(lists.positions.size()) +
                  ", must be [items, list_count, capacity] of " + std::to_string(count) + " lists"};
    }
    if (!lists.lengths.empty() && lists.lengths.size() != count) {
      return {PQC_INVALID_ARGUMENT, "lists.lengths",
              std::to_string(lists.lengths.size()) + ", but " + std::to_string(count) +
                  " are needed: [items, list_count]"};
    }
    pqc_position_lists c = PQC_INIT(pqc_position_lists);
    c.positions = lists.positions.data();
    c.list_count = lists.list_count;
    c.capacity = static_cast<uint32_t>(lists.positions.size() / count);
    c.lengths = lists.lengths.empty() ? nullptr : lists.lengths.data();
    const pqc_tensor logits = lists.logits ? lists.logits->c() : pqc_tensor{};
    c.logits = lists.logits ? &logits : nullptr;
    const pqc_tensor q = queries.c();
    return Status(pqc_step_attend_positions(handle_.get(), layer, &q, &c, out));
  }

  std::unique_ptr<pqc_step, Abandoner> handle_;
  size_t item_count_ = 0;
};

// Gives the complete attention for one sequence, for engines without a KV cache of their own
// (pqc_decoder). One thread at a time.
class Decoder {
 public:
  // Opens a decoder with one selection for all layers; its window_tokens must be at least 1. The
  // decoder uses the sequence until it is destroyed (pqc_decoder_open).
  static Result<Decoder> Open(Sequence& sequence, const Selection& selection) {
    const pqc_selection s = selection.c();
    pqc_decoder* decoder = nullptr;
    const pqc_status status = pqc_decoder_open(sequence.get(), &s, &decoder);
    if (status != PQC_OK) return Status(status);
    return Decoder(decoder);
  }

  // Stores the rows of the next prefill tokens of a layer: keys [tokens, kv_heads, key_dim], values
  // [tokens, kv_heads, value_dim]. `names`: of any tokens of the sequence
  // (pqc_decoder_prefill_with).
  Status Prefill(uint32_t layer, const Tensor& keys, const Tensor& values,
                 const TokenNames& names = {}) {
    const pqc_tensor k = keys.c();
    const pqc_tensor v = values.c();
    const pqc_row_options options = names.c();
    return Status(pqc_decoder_prefill_with(handle_.get(), layer, &k, &v, &options));
  }

  // Decodes the next token in one layer: query [query_heads, key_dim], key [kv_heads, key_dim],
  // value [kv_heads, value_dim]; output [query_heads, value_dim], the attention over sink, selected
  // tokens and window, the token itself included. Layers are called in ascending order. `names`,
  // of any tokens of the sequence, are recorded with the token (pqc_decoder_decode_with).
  Status Decode(uint32_t layer, const Tensor& query, const Tensor& key, const Tensor& value,
                std::span<float> output, const TokenNames& names = {}) {
    const pqc_tensor q = query.c();
    const pqc_tensor k = key.c();
    const pqc_tensor v = value.c();
    const pqc_row_options options = names.c();
    return Status(pqc_decoder_decode_with(handle_.get(), layer, &q, &k, &v, &options, output.data(),
                                          output.size()));
  }

 private:
  struct Closer {
    void operator()(pqc_decoder* decoder) const { pqc_decoder_close(decoder); }
  };
  explicit Decoder(pqc_decoder* handle) : handle_(handle) {}

  std::unique_ptr<pqc_decoder, Closer> handle_;
};

}  // namespace pqcached

#endif  // PQCACHED_STEP_HPP_
