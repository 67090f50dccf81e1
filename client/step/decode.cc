#include "client/step/decode.h"

#include <algorithm>
#include <cmath>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/step/read_backend.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/resolve.h"

namespace pqcached::client {
namespace {

using LongLong = unsigned long long;  // for %llu

// Makes [heads, dim] of a step of one token [1, heads, dim].
pqc_tensor WithTokens(const pqc_tensor& tensor, uint64_t* shape, int64_t* strides) {
  pqc_tensor with = tensor;
  if (tensor.ndim != 2 || !tensor.shape || tensor.block_table) return with;
  shape[0] = 1;
  strides[0] = 0;
  std::copy_n(tensor.shape, 2, shape + 1);
  with.ndim = 3;
  with.shape = shape;
  if (!tensor.strides) return with;
  std::copy_n(tensor.strides, 2, strides + 1);
  with.strides = strides;
  return with;
}

pqc_status ReadDecodeRows(const pqc_step& step, const pqc_tensor* keys, const pqc_tensor* values,
                          const LayerCall& call, RowBlock* rows) {
  if (!keys) return Fail(PQC_INVALID_ARGUMENT, "keys", "must not be NULL");
  if (!values) return Fail(PQC_INVALID_ARGUMENT, "values", "must not be NULL");
  uint64_t shapes[2][3];
  int64_t strides[2][3];
  const bool one = step.query_tokens == 1;
  rows->layer = call.layer;
  const TensorPlace place = step.gpu ? TensorPlace{PQC_CUDA, step.stream} : kOnHost;
  RETURN_IF_ERROR(ReadRows(one ? WithTokens(*keys, shapes[0], strides[0]) : *keys,
                           one ? WithTokens(*values, shapes[1], strides[1]) : *values, call.shape,
                           "", rows, place));
  if (rows->keys.shape[0] == step.query_tokens) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, "keys.shape[0]", "%llu tokens, but the step has %llu",
              LongLong{rows->keys.shape[0]}, LongLong{step.query_tokens});
}

// Reads where the attention is written; an lse that the caller does not want goes to the step.
pqc_status ReadDecodeOut(pqc_step& step, const pqc_step_attention* caller_out) {
  LayerCall& call = step.call;
  pqc_step_attention out;
  RETURN_IF_ERROR(ReadStruct(caller_out, "out", &out));
  if (!out.lse && !out.lse_tensor) {
    step.decode.unwanted_lse.resize(step.query_tokens * call.shape.query_heads);
    out.lse = step.decode.unwanted_lse.data();
    out.lse_capacity = step.decode.unwanted_lse.size();
  }
  call.counts = out.counts;
  return ReadAttentionOut(AttentionOutFields(out), call.shape, step.query_tokens, &call.out);
}

// Waits until the candidates of items that select are stored, so that the queue holds few rows.
pqc_status WaitForCandidates(const LayerCall& call) {
  for (StepItem& item : call.step->items) {
    const pqc_status status = SkipsSelection(call, item)
                                  ? CheckUnusedTerms(*call.selection, item)
                                  : WaitReady(*call.step, *call.selection, nullptr, &item);
    if (status == PQC_OK) continue;
    return PrefixItem(static_cast<size_t>(&item - call.step->items.data()), status);
  }
  return PQC_OK;
}

// Waits until all rows that are not in row tables can be read.
pqc_status WaitForStored(const LayerCall& call) {
  pqc_step& step = *call.step;
  if (!step.no_wait) SetCallDeadline(step.deadline);
  for (size_t i = 0; i < step.items.size(); ++i) {
    const auto needed = static_cast<uint32_t>(step.decode.unstored[i].begin);
    const pqc_status status =
        step.client->reads->Wait(step, *call.selection, nullptr, needed, &step.items[i]);
    if (status != PQC_OK) return PrefixItem(i, status);
  }
  return PQC_OK;
}

// Attends to the selected tokens, into the step's packed memory.
pqc_status AttendToSelected(LayerCall& call) {
  pqc_step& step = *call.step;
  DecodeState& state = step.decode;
  const size_t rows = step.query_tokens * call.shape.query_heads;
  state.output.resize(rows * call.shape.value_dim);
  state.lse.assign(rows, -INFINITY);
  step.counts.assign(step.items.size(), 0);
  const bool selects = std::any_of(state.own.begin(), state.own.end(),
                                   [](const DecodeState::Own& own) { return own.selects; });
  if (!selects) return PQC_OK;
  const kvstore::AttentionOut out = call.out;
  call.out = kvstore::AttentionOut::Packed(state.output.data(), state.lse.data(),
                                           call.shape.query_heads, call.shape.value_dim);
  const pqc_status status = step.client->reads->StepAttend(call, step.counts.data());
  call.out = out;
  return status;
}

pqc_status RunDecode(LayerCall& call) {
  pqc_step& step = *call.step;
  FindOwnRanges(call, &step.decode);
  RETURN_IF_ERROR(WaitForCandidates(call));
  RETURN_IF_ERROR(CopyUnstored(&step));
  RETURN_IF_ERROR(WaitForStored(call));
  RETURN_IF_ERROR(AttendToSelected(call));
  RETURN_IF_ERROR(step.client->reads->StepDecode(call));
  if (call.counts) std::copy(step.counts.begin(), step.counts.end(), call.counts);
  return PQC_OK;
}

// Removes the newest row table, unless the call has succeeded.
class TableOfCall {
 public:
  explicit TableOfCall(DecodeState& state) : state_(state), layers_(state.layers.size()) {}
  ~TableOfCall() {
    if (kept_ || state_.layers.size() == layers_) return;
    state_.rows.resize(state_.layers.back().table_begin);
    state_.layers.pop_back();
  }
  TableOfCall(const TableOfCall&) = delete;
  TableOfCall& operator=(const TableOfCall&) = delete;
  void Keep() { kept_ = true; }

 private:
  DecodeState& state_;
  const size_t layers_;
  bool kept_ = false;
};

// A view of the keys or values in a row table of all query tokens of a step, which has room for
// `token_room` tokens.
TensorView TableView(const pqc_step& step, const LayerShape& shape, const std::byte* rows,
                     uint64_t token_room, uint32_t dim) {
  const auto row = static_cast<int64_t>(shape.row_bytes / kernels::DTypeBytes(shape.dtype));
  return {.data = rows,
          .dtype = shape.dtype,
          .ndim = 3,
          .shape = {step.query_tokens, shape.kv_heads, dim},
          .strides = {row, row * static_cast<int64_t>(token_room), 1}};
}

// Finds the row table of a layer that was decoded in the step, or null.
const std::byte* FindDecodedRows(const pqc_step& step, uint32_t layer, uint64_t* token_room) {
  if (step.gpu) return step.gpu->DecodedRows(layer, token_room);
  const DecodeState::Layer* decoded = step.decode.Find(layer);
  *token_room = step.query_tokens;
  return decoded ? step.decode.rows.data() + decoded->table_begin : nullptr;
}

// Reads the arguments that decode calls have on the CPU and on a GPU alike.
pqc_status ReadDecode(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                      const pqc_tensor* keys, const pqc_tensor* values,
                      const pqc_selection* selection, RowBlock* rows) {
  RETURN_IF_ERROR(ReadLayerCall(step, layer, queries));
  LayerCall& call = step->call;
  if (step->decode.Find(layer)) {
    return Fail(PQC_INVALID_ARGUMENT, "layer", "%u was decoded in this step already", layer);
  }
  RETURN_IF_ERROR(ReadCallSelection(step, selection));
  if (call.selection->window_tokens == 0) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.window_tokens",
                "0, must be at least 1: a token attends to itself");
  }
  RETURN_IF_ERROR(ReadDecodeRows(*step, keys, values, call, rows));
  call.decodes = true;
  return PQC_OK;
}

// Launches a decode call on the step's GPU.
pqc_status DecodeOnDevice(pqc_step* step, const RowBlock& rows, const pqc_step_attention* out) {
  LayerCall& call = step->call;
  RETURN_IF_ERROR(ReadStepOut(out, &call));
  RETURN_IF_ERROR(step->gpu->Decode(call, rows));
  step->decode.layers.push_back({.number = call.layer});
  return PQC_OK;
}

}  // namespace

// A count of tokens refers to candidates, of which such items have none.
pqc_status CheckUnusedTerms(const kvstore::Selection& given, StepItem& item) {
  kvstore::ResolvedSelection& resolved = (*item.scratch)->resolved;
  kvstore::Selection terms = given;
  if (terms.budget_kind == kvstore::BudgetKind::kCount) {
    terms.budget_kind = kvstore::BudgetKind::kRatio;
    terms.budget_ratio = 1.0;
  }
  kvstore::Resolve(terms, item.query_position, kvstore::kMaxSequenceTokens, &resolved);
  return resolved.refusal.ok() ? PQC_OK : FailInStep(resolved.refusal);
}

pqc_status DecodeInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                        const pqc_tensor* keys, const pqc_tensor* values,
                        const pqc_selection* selection, pqc_step_attention* out) {
  if (!step) return Fail(PQC_INVALID_ARGUMENT, "step", "must not be NULL");
  if (step->gpu && !step->decodes) {
    return Fail(PQC_FAILED_PRECONDITION, "step",
                "it is on a GPU, where pqc_step_decode needs PQC_STEP_DECODES in options.flags");
  }
  RowBlock rows;
  RETURN_IF_ERROR(ReadDecode(step, layer, queries, keys, values, selection, &rows));
  if (step->gpu) return DecodeOnDevice(step, rows, out);
  LayerCall& call = step->call;
  RETURN_IF_ERROR(ReadDecodeOut(*step, out));
  call.attends = true;
  TableOfCall table(step->decode);
  RETURN_IF_ERROR(KeepRows(step, rows, call.shape));
  const pqc_status status = RunDecode(call);
  if (status != PQC_OK) return AdviseInStep(status, step->no_wait, /*ended=*/false);
  table.Keep();
  return PQC_OK;
}

pqc_status AddDecodedRows(const pqc_step& step, std::vector<RowBlock>* blocks) {
  uint64_t token_room = 0;
  for (size_t i = 0; i < blocks->size(); ++i) {
    if (!FindDecodedRows(step, (*blocks)[i].layer, &token_room)) continue;
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("layers[%zu].layer", i),
                "%u was decoded in this step, which has its rows", (*blocks)[i].layer);
  }
  const size_t listed = blocks->size();
  for (const auto& [number, shape] : step.cache->stored_layers) {
    if (const std::byte* rows = FindDecodedRows(step, number, &token_room)) {
      const size_t key_bytes = shape.key_dim * kernels::DTypeBytes(shape.dtype);
      blocks->push_back(
          {.layer = number,
           .keys = TableView(step, shape, rows, token_room, shape.key_dim),
           .values = TableView(step, shape, rows + key_bytes, token_room, shape.value_dim)});
      continue;
    }
    const bool has_rows =
        std::any_of(blocks->begin(), blocks->begin() + static_cast<ptrdiff_t>(listed),
                    [number = number](const RowBlock& block) { return block.layer == number; });
    if (has_rows) continue;
    return Fail(PQC_INVALID_ARGUMENT, "layers",
                "layer %u is missing: it was not decoded in this step, and is not listed", number);
  }
  return PQC_OK;
}

}  // namespace pqcached::client
