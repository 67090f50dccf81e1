// One layer of a step: selects and attends over all its items.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/base/pack.h"
#include "client/step/read_backend.h"
#include "client/step/step.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/resolve.h"

namespace pqcached::client {
namespace {

using LongLong = unsigned long long;  // for %llu

// A tensor of numbers of each query token and head: queries, or logits.
struct QueryTensor {
  const char* name = "";
  const char* dim_name = "";
  uint32_t dim = 0;
};

pqc_status ReadStepQueries(const pqc_step& step, const pqc_tensor* queries, const LayerShape& shape,
                           const QueryTensor& expected, TensorView* view) {
  const char* const name = expected.name;
  if (!queries) return Fail(PQC_INVALID_ARGUMENT, name, "must not be NULL");
  const TensorPlace place = step.gpu ? TensorPlace{PQC_CUDA, step.stream} : kOnHost;
  RETURN_IF_ERROR(ReadTensor(*queries, name, view, place));
  if (view->ndim == 2 && step.query_tokens == 1) {
    *view = {.data = view->data,
             .dtype = view->dtype,
             .ndim = 3,
             .shape = {1, view->shape[0], view->shape[1]},
             .strides = {0, view->strides[0], view->strides[1]}};
  }
  if (view->ndim != 3 || view->shape[0] != step.query_tokens ||
      view->shape[1] != shape.query_heads || view->shape[2] != expected.dim) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape", name),
                "must be [%llu, %u, %u]: query tokens of all items, query_heads, %s",
                LongLong{step.query_tokens}, shape.query_heads, expected.dim, expected.dim_name);
  }
  for (const StepItem& item : step.items) {
    RETURN_IF_ERROR(CheckQueryLength(item.query_length, shape, name));
  }
  return PQC_OK;
}

// Begins a call for one layer.
pqc_status FindLayerOfCall(pqc_step* step, uint32_t layer) {
  if (!step) return Fail(PQC_INVALID_ARGUMENT, "step", "must not be NULL");
  if (step->begun) {
    return Fail(PQC_FAILED_PRECONDITION, "step",
                "an attention is in progress; call pqc_step_attend_wait first");
  }
  Remote* remote = nullptr;
  RETURN_IF_ERROR(FindRemote(*step->client, &remote));
  LayerCall& call = step->call;
  call = LayerCall();
  call.step = step;
  call.layer = layer;
  RETURN_IF_ERROR(FindLayer(*step->cache, layer, "layer", &call.shape));
  if (call.shape.kind == kvstore::LayerKind::kWindow) {
    call.window_tokens = step->cache->windows.at(layer);
  }
  return PQC_OK;
}

}  // namespace

pqc_status ReadLayerCall(pqc_step* step, uint32_t layer, const pqc_tensor* queries) {
  RETURN_IF_ERROR(FindLayerOfCall(step, layer));
  LayerCall& call = step->call;
  RETURN_IF_ERROR(CheckHasKeys(call.shape, "layer"));
  return ReadStepQueries(*step, queries, call.shape, {"queries", "key_dim", call.shape.key_dim},
                         &call.queries);
}

pqc_status ReadLayerCall(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                         const pqc_position_lists& lists) {
  if (!lists.logits) return ReadLayerCall(step, layer, queries);
  RETURN_IF_ERROR(FindLayerOfCall(step, layer));
  LayerCall& call = step->call;
  call.has_logits = true;
  return ReadStepQueries(*step, lists.logits, call.shape,
                         {"lists.logits", "lists.capacity", lists.capacity}, &call.queries);
}

pqc_status ReadCallSelection(pqc_step* step, const pqc_selection* selection) {
  if (selection && step->gpu) {
    return Fail(PQC_UNIMPLEMENTED, "selection",
                "must be NULL on a GPU: the selection of pqc_gpu_step_begin is used");
  }
  LayerCall& call = step->call;
  call.given = selection ? &step->call_selection : &step->selection;
  if (selection) {
    RETURN_IF_ERROR(ReadSelection(selection, step->cache->default_index, &step->call_selection));
  } else if (!step->has_selection) {
    return Fail(PQC_INVALID_ARGUMENT, "selection",
                step->gpu ? "the step has none, and on a GPU pqc_gpu_step_begin takes it"
                          : "must not be NULL, because the step has no selection");
  }
  call.selection = call.given;
  if (call.shape.has_index()) return PQC_OK;
  step->kind_selection = kvstore::TermsOf(call.shape.kind, *call.given);
  call.selection = &step->kind_selection;
  return PQC_OK;
}

QueryView QueryOf(const LayerCall& call, const StepItem& item) {
  QueryView query{.sequence_id = item.sequence->sequence_id,
                  .layer = call.layer,
                  .query_position = item.query_position,
                  .queries = call.queries,
                  .shape = call.shape};
  query.queries.shape[0] = item.query_length;
  query.queries.data += static_cast<int64_t>(item.query_begin) * call.queries.strides[0] *
                        static_cast<int64_t>(kernels::DTypeBytes(call.queries.dtype));
  return query;
}

kvstore::LayerQuery LayerQueryOf(const QueryView& query, bool has_logits) {
  const TensorView& tensor = query.queries;
  return {.layer = query.layer,
          .query_position = query.query_position,
          .query_length = static_cast<uint32_t>(tensor.shape[0]),
          .data = tensor.data,
          .dtype = tensor.dtype,
          .strides_bytes = {StrideBytes(tensor, 0), StrideBytes(tensor, 1), StrideBytes(tensor, 2)},
          .has_logits = has_logits};
}

bool SkipsSelection(const LayerCall& call, const StepItem& item) {
  return call.decodes &&
         !call.step->decode.own[static_cast<size_t>(&item - call.step->items.data())].selects;
}

kvstore::AttentionOut OutOf(const LayerCall& call, const StepItem& item, uint32_t token) {
  return call.out.From(item.query_begin + token);
}

QueryView TokenQueryOf(const LayerCall& call, const StepItem& item, uint32_t token) {
  QueryView query = QueryOf(call, item);
  query.queries.shape[0] = 1;
  query.queries.data += int64_t{token} * query.queries.strides[0] *
                        static_cast<int64_t>(kernels::DTypeBytes(query.queries.dtype));
  return query;
}

uint32_t SelectionCount(const LayerCall& call, StepItem& item, const kvstore::Selection& terms) {
  if (!call.step->select_per_token || call.ranges || call.lists || call.pages) return 1;
  if (!call.attends) return item.query_length;
  kvstore::ResolvedSelection& resolved = (*item.scratch)->resolved;
  kvstore::Resolve(terms, item.query_position, kvstore::kMaxSequenceTokens, &resolved);
  return resolved.takes_all() ? 1 : item.query_length;
}

kvstore::TokenRange RangeOf(const LayerCall& call, const StepItem& item) {
  const pqc_token_range& range = call.ranges[&item - call.step->items.data()];
  return {range.begin, range.end};
}

std::span<const PositionList> ListsOf(const LayerCall& call, const StepItem& item) {
  const auto index = static_cast<size_t>(&item - call.step->items.data());
  return {call.lists + index * call.lists_per_item, call.lists_per_item};
}

namespace {

// Reads where the attention of a step on a GPU is written: contiguous floats there.
pqc_status ReadDeviceOut(const pqc_step_attention& out, LayerCall* call) {
  if (out.output_tensor || out.lse_tensor || RawEnum(out.lse_base) != PQC_LOG_NATURAL) {
    return Fail(PQC_UNIMPLEMENTED,
                out.output_tensor ? "out.output_tensor"
                : out.lse_tensor  ? "out.lse_tensor"
                                  : "out.lse_base",
                "not supported on a GPU in this version; must be zero");
  }
  if (!out.output) return Fail(PQC_INVALID_ARGUMENT, "out.output", "must not be NULL");
  if (!out.lse && !call->decodes) {
    return Fail(PQC_INVALID_ARGUMENT, "out.lse", "must not be NULL");
  }
  const uint64_t rows = call->step->query_tokens * call->shape.query_heads;
  RETURN_IF_ERROR(
      CheckCapacity("out.output_capacity", out.output_capacity, rows * call->shape.value_dim));
  if (out.lse) RETURN_IF_ERROR(CheckCapacity("out.lse_capacity", out.lse_capacity, rows));
  call->output = out.output;
  call->lse = out.lse;
  return PQC_OK;
}

}  // namespace

pqc_status ReadStepOut(const pqc_step_attention* caller_out, LayerCall* call) {
  pqc_step_attention out;
  RETURN_IF_ERROR(ReadStruct(caller_out, "out", &out));
  call->attends = true;
  call->counts = out.counts;
  if (call->step->gpu) return ReadDeviceOut(out, call);
  return ReadAttentionOut(AttentionOutFields(out), call->shape, call->step->query_tokens,
                          &call->out);
}

pqc_status CheckNoCounts(const LayerCall& call) {
  if (!call.counts) return PQC_OK;
  return Fail(PQC_UNIMPLEMENTED, "out.counts",
              "must be NULL in a step on a GPU, where only the device knows them");
}

pqc_status WaitForTokens(pqc_step& step, size_t i, uint32_t needed) {
  if (!step.no_wait) SetCallDeadline(step.deadline);
  const pqc_status status =
      step.client->reads->Wait(step, step.selection, nullptr, needed, &step.items[i]);
  return status == PQC_OK ? PQC_OK : PrefixItem(i, status);
}

namespace {

pqc_status ReadAttend(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                      const pqc_selection* selection, const pqc_step_attention* caller_out) {
  RETURN_IF_ERROR(ReadLayerCall(step, layer, queries));
  RETURN_IF_ERROR(ReadCallSelection(step, selection));
  return ReadStepOut(caller_out, &step->call);
}

pqc_status CheckStepRange(const StepItem& item, const pqc_token_range& range) {
  if (range.begin > range.end) {
    return Fail(PQC_INVALID_ARGUMENT, "", "begins at %llu, behind its end, %llu",
                LongLong{range.begin}, LongLong{range.end});
  }
  if (range.end <= item.query_position) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, "", "ends at %llu, beyond the item's query_position, %llu",
              LongLong{range.end}, LongLong{item.query_position});
}

// Checks the ranges, and waits until their rows are stored.
pqc_status WaitForRanges(const LayerCall& call) {
  std::vector<StepItem>& items = call.step->items;
  for (size_t i = 0; i < items.size(); ++i) {
    if (const pqc_status status = CheckStepRange(items[i], call.ranges[i]); status != PQC_OK) {
      return PrefixField(FieldPath::Of("ranges[%zu]", i), status);
    }
  }
  for (size_t i = 0; i < items.size(); ++i) {
    RETURN_IF_ERROR(WaitForTokens(*call.step, i, static_cast<uint32_t>(call.ranges[i].end)));
  }
  return PQC_OK;
}

pqc_status RunAttend(const LayerCall& call) {
  const bool is_no_wait = call.step->no_wait;
  if (call.step->gpu) {
    return AdviseInStep(call.step->gpu->Attend(call), is_no_wait, /*ended=*/false);
  }
  std::vector<uint32_t>& counts = call.step->counts;
  counts.assign(call.step->items.size(), 0);
  const pqc_status status = call.step->client->reads->StepAttend(call, counts.data());
  if (status == PQC_OK && call.counts) std::copy(counts.begin(), counts.end(), call.counts);
  return AdviseInStep(status, is_no_wait, /*ended=*/false);
}

}  // namespace

pqc_status SelectInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                        const pqc_selection* selection, pqc_step_positions* caller_out) {
  RETURN_IF_ERROR(ReadLayerCall(step, layer, queries));
  RETURN_IF_ERROR(ReadCallSelection(step, selection));
  if (step->gpu) {
    return Fail(PQC_FAILED_PRECONDITION, "step",
                "it is on a GPU; use pqc_gpu_step_topk, which leaves the positions there");
  }
  LayerCall& call = step->call;
  pqc_step_positions out;
  RETURN_IF_ERROR(ReadStruct(caller_out, "out", &out));
  if (!out.offsets) return Fail(PQC_INVALID_ARGUMENT, "out.offsets", "must not be NULL");
  if (!out.counts) return Fail(PQC_INVALID_ARGUMENT, "out.counts", "must not be NULL");
  std::vector<StepItem>& items = step->items;
  std::vector<uint64_t>& offsets = step->offsets;
  offsets.assign(items.size() + 1, 0);
  const uint32_t sets = call.selection->SetCount(call.shape.kv_heads, call.shape.query_heads);
  const bool by_mass = call.selection->budget_kind == kvstore::BudgetKind::kMass;
  for (size_t i = 0; i < items.size(); ++i) {
    const pqc_status status = CountSelected(items[i], *call.selection, &out.counts[i]);
    if (status != PQC_OK) return PrefixItem(i, status);
    if (by_mass && SelectionCount(call, items[i], *call.selection) > 1) {
      return PrefixItem(i, Fail(PQC_UNIMPLEMENTED, "selection.attention_mass",
                                "not with PQC_STEP_SELECT_PER_TOKEN for an item of several "
                                "tokens, whose counts differ"));
    }
    out.offsets[i] = offsets[i];
    offsets[i + 1] = offsets[i] + uint64_t{SelectionCount(call, items[i], *call.selection)} * sets *
                                      out.counts[i];
  }
  caller_out->count = offsets.back();
  if (!out.positions) return PQC_OK;  // the caller only asked for the counts
  RETURN_IF_ERROR(CheckCapacity("out.capacity", out.capacity, offsets.back()));
  call.positions = out.positions;
  step->counts.assign(items.size(), 0);
  const pqc_status status = step->client->reads->StepTopK(call);
  if (status == PQC_OK && by_mass) std::copy(step->counts.begin(), step->counts.end(), out.counts);
  return AdviseInStep(status, step->no_wait, /*ended=*/false);
}

pqc_status AttendInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                        const pqc_selection* selection, pqc_step_attention* out) {
  const pqc_status status = ReadAttend(step, layer, queries, selection, out);
  return status == PQC_OK ? RunAttend(step->call) : status;
}

pqc_status AttendRangeInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                             const pqc_token_range* ranges, pqc_step_attention* out) {
  RETURN_IF_ERROR(ReadLayerCall(step, layer, queries));
  LayerCall& call = step->call;
  if (!ranges) return Fail(PQC_INVALID_ARGUMENT, "ranges", "must not be NULL");
  RETURN_IF_ERROR(ReadStepOut(out, &call));
  if (step->gpu) {
    RETURN_IF_ERROR(CheckNoCounts(call));
    return step->gpu->AttendRanges(call, ranges);
  }
  call.ranges = ranges;
  pqc_status status = WaitForRanges(call);
  if (status == PQC_OK) status = step->client->reads->StepAttendRange(call);
  if (status != PQC_OK) return AdviseInStep(status, step->no_wait, /*ended=*/false);
  for (size_t i = 0; call.counts && i < step->items.size(); ++i) {
    call.counts[i] = static_cast<uint32_t>(ranges[i].end - ranges[i].begin);
  }
  return PQC_OK;
}

pqc_status BeginAttendInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                             const pqc_selection* selection, pqc_step_attention* out) {
  RETURN_IF_ERROR(ReadAttend(step, layer, queries, selection, out));
  if (step->gpu) {
    return Fail(PQC_FAILED_PRECONDITION, "step",
                "it is on a GPU, where pqc_step_attend is asynchronous already");
  }
  const base::MutexLock begin(
      &step->mutex);  // the job cannot finish before the flags below are set
  step->client->step_worker.Run([step] {
    const pqc_status status = Call([&] { return RunAttend(step->call); });
    const base::MutexLock lock(&step->mutex);
    step->async_status = status;
    step->async_error = LastRefusal();
    step->running = false;
    step->finished.SignalAll();
  });
  step->begun = step->running = true;
  return PQC_OK;
}

pqc_status WaitAttendInStep(pqc_step* step) {
  if (!step) return Fail(PQC_INVALID_ARGUMENT, "step", "must not be NULL");
  const base::MutexLock lock(&step->mutex);
  if (!step->begun) {
    return Fail(PQC_FAILED_PRECONDITION, "step",
                "no attention was begun; call pqc_step_attend_begin");
  }
  step->finished.Wait(&step->mutex,
                      [step]() PQCACHED_REQUIRES(step->mutex) { return !step->running; });
  step->begun = false;
  if (step->async_status == PQC_OK) return PQC_OK;
  return Fail(step->async_status, step->async_error);
}

}  // namespace pqcached::client
