// Begins and ends steps.
#include "client/step/step.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "client/base/arguments.h"
#include "client/base/deadline.h"
#include "client/base/error.h"
#include "client/base/pack.h"
#include "client/base/token_names.h"
#include "client/step/decode.h"
#include "client/step/layer_rows.h"
#include "client/step/offload.h"
#include "client/step/read_backend.h"
#include "client/step/sender.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/resolve.h"

namespace pqcached::client {
namespace {

constexpr uint32_t kMaxStepItems = 4096;
constexpr size_t kMaxIdleSteps = 16;
constexpr uint32_t kCheckConnectedVersion = 14;  // of Remote
using LongLong = unsigned long long;             // for %llu

// Adds the sequence to the step.
pqc_status Enter(pqc_step& step, const pqc_step_item& from, StepItem& item) {
  if (!from.sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  item.sequence = from.sequence->state;
  const CacheState& cache = *item.sequence->cache;
  if (cache.client != step.client) {
    return Fail(PQC_INVALID_ARGUMENT, "sequence", "it belongs to another client");
  }
  if (!step.cache) step.cache = item.sequence->cache;
  if (step.cache->cache_id != cache.cache_id) {
    return Fail(PQC_INVALID_ARGUMENT, "sequence", "it belongs to another cache than items[0]'s");
  }
  item.query_position = from.query_position;
  item.query_length = from.query_length == 0 ? 1 : from.query_length;
  if (item.query_length > kMaxQueryLength) {
    return Fail(PQC_INVALID_ARGUMENT, "query_length", "%u, must be at most %u", item.query_length,
                kMaxQueryLength);
  }
  if (item.query_position > kMaxSequenceTokens - item.query_length) {
    return Fail(PQC_INVALID_ARGUMENT, "query_position",
                "%llu and %u tokens, but a sequence has at most 2^30",
                LongLong{item.query_position}, item.query_length);
  }
  if (item.sequence->in_step.exchange(true)) {
    return Fail(PQC_ABORTED, "sequence", "it is in another step");
  }
  item.holds = true;
  // The order matters: ChangeScope sets and checks the two flags in the opposite order.
  if (!item.sequence->changing) return PQC_OK;
  return SetRetry(kRetryConflict,
                  Fail(PQC_ABORTED, "sequence", "another thread is changing it; repeat later"));
}

pqc_status Prepare(const pqc_step& step, StepItem& item) {
  const ClientState& client = *step.client;
  if (item.sequence->suspended) {
    return Fail(PQC_FAILED_PRECONDITION, "sequence", "it is suspended; resume it first");
  }
  RETURN_IF_ERROR(client.sender->Check(*item.sequence));
  RETURN_IF_ERROR(client.offload->Flush(*item.sequence, step.deadline));
  uint64_t queued_end = 0;
  const bool queued = client.sender->QueuedEnd(*item.sequence, &queued_end);
  RETURN_IF_ERROR(client.reads->Begin(step, item, &item.end_before_step));
  if (queued) item.end_before_step = queued_end;
  if (item.query_position > item.end_before_step) {
    return Fail(PQC_INVALID_ARGUMENT, "query_position",
                "%llu is beyond the sequence's end, %llu tokens", LongLong{item.query_position},
                LongLong{item.end_before_step});
  }
  return PQC_OK;
}

// Reads how long the step may wait, and finds a worker that answers.
pqc_status ReadWaits(const pqc_step_options& options, const StepTarget& target, pqc_step& step) {
  constexpr uint64_t kFlags = PQC_STEP_NO_WAIT | PQC_STEP_EXACT_UNTIL_INDEXED |
                              PQC_STEP_SELECT_PER_TOKEN | PQC_STEP_DECODES;
  if (options.flags & ~kFlags) {
    return Fail(PQC_UNIMPLEMENTED, "options.flags", "%llu has flags that this version lacks",
                LongLong{options.flags});
  }
  const ClientState& client = *step.client;
  Remote* remote = nullptr;
  const bool polls = options.timeout_ms == PQC_TIMEOUT_POLL;
  step.no_wait = (options.flags & PQC_STEP_NO_WAIT) != 0 || polls;
  step.exact_until_indexed = (options.flags & PQC_STEP_EXACT_UNTIL_INDEXED) != 0;
  step.select_per_token = (options.flags & PQC_STEP_SELECT_PER_TOKEN) != 0;
  step.decodes = (options.flags & PQC_STEP_DECODES) != 0;
  if (target.gpu && step.exact_until_indexed) {
    return Fail(PQC_UNIMPLEMENTED, "options.flags",
                "PQC_STEP_EXACT_UNTIL_INDEXED is not for steps on a GPU");
  }
  if (!step.no_wait) {
    step.deadline = CallDeadline(options.timeout_ms ? options.timeout_ms : client.timeout_ms);
    return GetRemote(client, &remote);
  }
  const char* const field = polls ? "options.timeout_ms" : "options.flags";
  if (target.gpu) {
    return Fail(PQC_UNIMPLEMENTED, field, "steps that do not wait are not for a GPU");
  }
  if (!client.local && client.remote_version < kCheckConnectedVersion) {
    return Fail(PQC_UNIMPLEMENTED, field,
                "libpqcached_rpc is older than steps that do not wait on the remote path; install "
                "the library of the client's release");
  }
  step.deadline = StepClock::now();
  RETURN_IF_ERROR(FindRemote(client, &remote));
  return CheckServed(client);
}

// Checks the selection of a step on a GPU that decodes, before rows are waited for.
pqc_status CheckDecodesOnGpu(const pqc_step& step) {
  if (!step.has_selection) {
    return Fail(PQC_INVALID_ARGUMENT, "options.selection",
                "must not be NULL in a step on a GPU with PQC_STEP_DECODES");
  }
  if (step.selection.window_tokens > 0) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, "options.selection.window_tokens",
              "0, must be at least 1 with PQC_STEP_DECODES: a token attends to itself");
}

// Excludes other steps from the GPU until this one has ended.
pqc_status AcquireGpu(pqc_step& step, const std::shared_ptr<StepDevice>& gpu) {
  if (step.cache->cache_id != gpu->cache_state().cache_id) {
    return Fail(PQC_INVALID_ARGUMENT, "items[0].sequence",
                "it belongs to another cache than the GPU");
  }
  if (!gpu->TryAcquire()) {
    return SetRetry(kRetryConflict,
                    Fail(PQC_ABORTED, "gpu", "another step is in progress; repeat later"));
  }
  step.gpu = gpu;
  return PQC_OK;
}

// Reads the rows of a step's tokens: each stored layer exactly once. On a GPU, the rows of decoded
// layers are added later, when the work of the step is done.
pqc_status ReadStepRows(const pqc_step& step, const pqc_layer_rows* layers, uint32_t layer_count,
                        std::vector<RowBlock>* blocks) {
  // All tensors are on the device, or all are on the host: the first one decides.
  const bool on_device = step.gpu && layers && RawEnum(layers->keys.device) == PQC_CUDA;
  const TensorPlace place = on_device ? TensorPlace{PQC_CUDA, step.stream} : kOnHost;
  const bool has_decoded = step.gpu ? step.decodes : !step.decode.layers.empty();
  if (!has_decoded) {
    RETURN_IF_ERROR(ReadAllLayers(*step.cache, layers, layer_count, place, blocks));
  } else if (layer_count > 0) {
    RETURN_IF_ERROR(ReadDistinctLayers(*step.cache, layers, layer_count, place, blocks));
  } else {
    blocks->clear();
  }
  for (uint32_t i = 0; i < layer_count; ++i) {
    const RowBlock& block = (*blocks)[i];
    if (block.keys.shape[0] != step.query_tokens) {
      return Fail(PQC_INVALID_ARGUMENT,
                  FieldPath::Of("layers[%u].%s.shape[0]", i, FirstPart(block)),
                  "%llu tokens, but the step has %llu", LongLong{block.keys.shape[0]},
                  LongLong{step.query_tokens});
    }
  }
  return has_decoded && !step.gpu ? AddDecodedRows(step, blocks) : PQC_OK;
}

// Waits for the work of a step on a GPU, and completes the rows.
pqc_status FinishOnGpu(pqc_step& step, const pqc_layer_rows* layers, uint32_t layer_count) {
  const bool on_device = layer_count > 0 && RawEnum(layers->keys.device) == PQC_CUDA;
  RETURN_IF_ERROR(step.gpu->Finish(step, on_device ? &step.blocks : nullptr));
  return step.decodes ? AddDecodedRows(step, &step.blocks) : PQC_OK;
}

// Reads the names of tokens that the caller passes, one element per item.
pqc_status ReadStepNames(pqc_step& step, const pqc_row_options* options) {
  if (!options) return PQC_OK;
  step.names.resize(step.items.size());
  const auto* bytes = reinterpret_cast<const std::byte*>(options);
  for (size_t i = 0; i < step.items.size(); ++i) {
    char name[32];
    std::snprintf(name, sizeof(name), "options[%zu]", i);
    RETURN_IF_ERROR(
        ReadRowOptions(bytes + i * options->struct_size, name, kStepNames, &step.names[i]));
  }
  return PQC_OK;
}

// Creates the handover of an item: its roll-back, if any, and its new rows.
std::shared_ptr<Handover> MakePendingUpdate(const pqc_step& step, const StepItem& item,
                                            const pqc_row_options* names, uint64_t token_count) {
  Sender& sender = *step.client->sender;
  std::shared_ptr<Handover> handover = sender.Lend();
  handover->sequence = item.sequence;
  handover->first_position = item.query_position;
  handover->token_count = token_count;
  if (item.query_position < item.end_before_step) handover->roll_back_to = item.query_position;
  if (token_count > 0) {
    handover->CopyTokens(step.blocks, *step.cache, item.query_begin, sender.slots());
    const bool all = token_count == item.query_length;
    if (names) handover->names.Assign(*names, all ? UINT64_MAX : item.query_position + token_count);
  }
  return handover;
}

pqc_status CheckNoneInProgress(const pqc_step& step) {
  if (!step.begun) return PQC_OK;
  return Fail(PQC_FAILED_PRECONDITION, "step",
              "an attention is in progress; call pqc_step_attend_wait first");
}

// Checks that what the step has read was valid.
pqc_status ConfirmItems(const pqc_step& step) {
  for (size_t i = 0; i < step.items.size(); ++i) {
    const pqc_status status = step.client->reads->Confirm(step, step.items[i]);
    if (status != PQC_OK) return PrefixItem(i, status);
  }
  return PQC_OK;
}

}  // namespace

pqc_status BeginStep(const StepTarget& target, const pqc_step_item* caller_items,
                     uint32_t item_count, const pqc_step_options* caller_options,
                     pqc_step** caller_step) {
  const std::shared_ptr<ClientState>& client = target.client;
  if (!caller_step) return Fail(PQC_INVALID_ARGUMENT, "step", "must not be NULL");
  *caller_step = nullptr;
  if (!caller_items) return Fail(PQC_INVALID_ARGUMENT, "items", "must not be NULL");
  if (item_count < 1 || item_count > kMaxStepItems) {
    return Fail(PQC_INVALID_ARGUMENT, "item_count", "%u, must be 1 to %u", item_count,
                kMaxStepItems);
  }
  pqc_step_options options{};
  if (caller_options) {
    RETURN_IF_ERROR(ReadStruct(caller_options, "options", &options));
  }
  OwnedStep step(client->steps->Lend().release());
  step->client = client;
  RETURN_IF_ERROR(ReadWaits(options, target, *step));
  step->items.resize(item_count);
  for (uint32_t i = 0; i < item_count; ++i) {
    StepItem& item = step->items[i];
    pqc_step_item from;
    char name[32];
    std::snprintf(name, sizeof(name), "items[%u]", i);
    RETURN_IF_ERROR(ReadElement(caller_items, i, name, &from));
    for (uint32_t j = 0; from.sequence && j < i; ++j) {
      if (step->items[j].sequence != from.sequence->state) continue;
      return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("items[%u].sequence", i),
                  "listed twice, first in items[%u]", j);
    }
    if (const pqc_status status = Enter(*step, from, item); status != PQC_OK) {
      return PrefixItem(i, status);
    }
    item.query_begin = step->query_tokens;
    step->query_tokens += item.query_length;
    item.scratch.emplace(client->scratch);
  }
  if (options.selection) {
    step->has_selection = true;
    RETURN_IF_ERROR(ReadSelection(options.selection, step->cache->default_index, &step->selection));
  }
  if (target.gpu) {
    if (step->decodes) RETURN_IF_ERROR(CheckDecodesOnGpu(*step));
    RETURN_IF_ERROR(AcquireGpu(*step, target.gpu));
  }
  RETURN_IF_ERROR(client->sender->WaitForRoom(step->deadline));
  for (uint32_t i = 0; i < item_count; ++i) {
    StepItem& item = step->items[i];
    pqc_status status = Prepare(*step, item);
    if (status == PQC_OK && step->has_selection) {
      status = ClosePrefill(*step, step->selection, item);
    }
    if (status == PQC_OK && step->has_selection) {
      const bool needs_index = step->cache->has_indexed_layers;
      status = needs_index ? client->reads->CheckIndex(*step, item, step->selection.index) : PQC_OK;
    }
    if (status == PQC_OK && step->has_selection) {
      status = WaitReady(*step, step->selection, nullptr, &item);
    }
    if (status != PQC_OK) return PrefixItem(i, status);
  }
  if (step->gpu) {
    RETURN_IF_ERROR(step->gpu->Begin(*step, target.stream));
  }
  *caller_step = step.release();
  return PQC_OK;
}

pqc_status CheckStep(pqc_step* step) {
  if (!step) return Fail(PQC_INVALID_ARGUMENT, "step", "must not be NULL");
  if (step->gpu) return Fail(PQC_UNIMPLEMENTED, "step", "it is a step on a GPU");
  RETURN_IF_ERROR(CheckNoneInProgress(*step));
  return AdviseInStep(ConfirmItems(*step), step->no_wait, false);
}

pqc_status EndStep(pqc_step* step, const pqc_layer_rows* layers, uint32_t layer_count,
                   const uint32_t* accepted, const pqc_row_options* caller_options) {
  if (!step) return Fail(PQC_INVALID_ARGUMENT, "step", "must not be NULL");
  const OwnedStep owned(step);
  RETURN_IF_ERROR(CheckNoneInProgress(*step));
  Remote* remote = nullptr;
  RETURN_IF_ERROR(FindRemote(*step->client, &remote));
  RETURN_IF_ERROR(ReadStepRows(*step, layers, layer_count, &step->blocks));
  for (size_t i = 0; accepted && i < step->items.size(); ++i) {
    const StepItem& item = step->items[i];
    if (accepted[i] <= item.query_length) continue;
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("accepted[%zu]", i),
                "%u, but the item has %u query tokens", accepted[i], item.query_length);
  }
  RETURN_IF_ERROR(ReadStepNames(*step, caller_options));
  if (step->gpu) {
    RETURN_IF_ERROR(FinishOnGpu(*step, layers, layer_count));
  }
  RETURN_IF_ERROR(AdviseInStep(ConfirmItems(*step), step->no_wait, true));
  for (size_t i = 0; i < step->items.size(); ++i) {
    const StepItem& item = step->items[i];
    step->handovers.push_back(MakePendingUpdate(*step, item,
                                                step->names.empty() ? nullptr : &step->names[i],
                                                accepted ? accepted[i] : item.query_length));
  }
  for (const std::shared_ptr<Handover>& handover : step->handovers) {
    LocalSequence* local = handover->sequence->local.get();
    if (!local || !handover->rolls_back()) continue;
    local->BeginRollBack(static_cast<uint32_t>(handover->roll_back_to));
  }
  step->client->sender->Add(step->handovers);
  return PQC_OK;
}

std::unique_ptr<pqc_step> StepPool::Lend() {
  {
    const base::MutexLock lock(&mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<pqc_step> step = std::move(idle_.back());
      idle_.pop_back();
      return step;
    }
  }
  return std::make_unique<pqc_step>();
}

void StepPool::Return(std::unique_ptr<pqc_step> step) {
  step->Clear();
  const base::MutexLock lock(&mutex_);
  if (idle_.size() < kMaxIdleSteps) idle_.push_back(std::move(step));
}

void StepReturner::operator()(pqc_step* step) const {
  const std::shared_ptr<ClientState> client = step->client;  // the client owns the pool
  if (client)
    client->steps->Return(std::unique_ptr<pqc_step>(step));
  else
    delete step;
}

pqc_status FailInStep(const kvstore::Refusal& refusal) {
  constexpr std::string_view kOwnPath = "query.";
  Fail(refusal);
  if (!refusal.field.starts_with(kOwnPath)) return static_cast<pqc_status>(refusal.code);
  RefusalBuffer moved = LastRefusal();
  SetRefusal(&moved, refusal.field.c_str() + kOwnPath.size(), refusal.text.c_str());
  return Fail(static_cast<pqc_status>(refusal.code), moved);
}

pqc_status PrefixItem(size_t item, pqc_status status) {
  if (status == PQC_UNAVAILABLE) return status;  // about the sidecar, not about the item
  return PrefixField(FieldPath::Of("items[%zu]", item), status);
}

pqc_status AdviseInStep(pqc_status status, bool no_wait, bool ended) {
  const bool repeats_the_call = status == PQC_DEADLINE_EXCEEDED && no_wait && !ended;
  const bool begins_again =
      status == PQC_UNAVAILABLE || status == PQC_ABORTED || status == PQC_DEADLINE_EXCEEDED;
  if (!begins_again || LastRefusal().retry_ms == kNoRetry) return status;
  if (repeats_the_call) return AppendText("; repeat the call later", status);
  return AppendText(ended ? "; begin the step again" : "; abandon the step, and begin it again",
                    status);
}

pqc_status CountSelected(StepItem& item, const kvstore::Selection& terms, uint32_t* count) {
  kvstore::ResolvedSelection& resolved = (*item.scratch)->resolved;
  kvstore::Resolve(terms, item.query_position, kvstore::kMaxSequenceTokens, &resolved);
  *count = resolved.select_count;
  return resolved.refusal.ok() ? PQC_OK : FailInStep(resolved.refusal);
}

}  // namespace pqcached::client

void pqc_step::Clear() {
  {
    const pqcached::base::MutexLock lock(&mutex);
    finished.Wait(&mutex, [this]() PQCACHED_REQUIRES(mutex) { return !running; });
  }
  if (gpu) gpu->Release(*this);
  gpu.reset();
  stream = nullptr;
  for (pqcached::client::StepItem& item : items) {
    if (item.holds) item.sequence->in_step = false;
  }
  items.clear();
  names.clear();
  handovers.clear();
  decode.Clear();
  cache.reset();
  client.reset();
  query_tokens = 0;
  has_selection = begun = no_wait = exact_until_indexed = select_per_token = false;
  decodes = false;
}
