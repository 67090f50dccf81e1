// Implements calls in begin / poll / wait form, and a client's events.
#include "client/abi/operations.h"

#include <cstring>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/base/token_names.h"
#include "client/step/handles.h"
#include "client/step/layer_rows.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

using Reserved = pqc_sequence::Reserved;

// An operation's own handle of its sequence. Ends the reservation, unless a call has done so. The
// sequence is free before the operation's end is known, so that the engine can begin the next one.
struct OwnSequence {
  explicit OwnSequence(std::shared_ptr<SequenceState> state) : handle{.state = std::move(state)} {}
  ~OwnSequence() {
    if (handle.reserved != Reserved::kNone) handle.state->changing = false;
  }
  OwnSequence(const OwnSequence&) = delete;
  OwnSequence& operator=(const OwnSequence&) = delete;

  pqc_sequence handle;
};

// Reserves the sequence for an operation that changes it.
pqc_status Reserve(SequenceState& sequence) {
  RETURN_IF_ERROR(ReserveChange(sequence));
  // The order matters, as in ChangeScope: a step sets and checks the two flags the other way round.
  if (!sequence.in_step) return PQC_OK;
  sequence.changing = false;
  return Fail(PQC_ABORTED, "sequence", "it is in a step; end that step first");
}

}  // namespace

pqc_status CheckBeginning(const Beginning& beginning) {
  if (!beginning.operation) return Fail(PQC_INVALID_ARGUMENT, "operation", "must not be NULL");
  *beginning.operation = nullptr;
  if (!beginning.sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  Remote* remote = nullptr;
  return FindRemote(*beginning.sequence->state->cache->client, &remote);
}

pqc_status BeginOperation(const Beginning& beginning, const OperationTerms& terms,
                          const OperationCalls& calls) {
  const std::shared_ptr<SequenceState>& state = beginning.sequence->state;
  ClientState& client = *state->cache->client;
  const auto own = std::make_shared<OwnSequence>(state);
  if (terms.reserved != Reserved::kNone) RETURN_IF_ERROR(Reserve(*state));
  own->handle.reserved = terms.reserved;
  auto handle = std::make_unique<pqc_operation>();
  handle->operation = std::make_shared<Operation>(
      Operation::Options{.kind = terms.kind,
                         .sequence = state.get(),
                         .timeout_ms = client.timeout_ms,
                         .layer_count = terms.layer_count,
                         .events = client.events},
      [own, calls](Operation& operation) { return calls(operation, &own->handle); });
  handle->operation->SetHandle(handle.get(), beginning.context);
  RETURN_IF_ERROR(client.operations->Start(handle->operation));
  *beginning.operation = handle.release();
  return PQC_OK;
}

namespace {

pqc_status BeginFlush(const Beginning& beginning) {
  RETURN_IF_ERROR(CheckBeginning(beginning));
  return BeginOperation(beginning, {}, [](Operation&, pqc_sequence* sequence) {
    return pqc_sequence_flush(sequence);
  });
}

// A build whose callback also looks for a cancellation.
struct CancellableBuild {
  const pqc_build_options* options;
  const Operation* operation;

  static int Continue(void* context, const pqc_build_progress* progress) {
    const auto& build = *static_cast<const CancellableBuild*>(context);
    if (build.operation->cancelled()) return 0;
    const pqc_build_callback callback = build.options->callback;
    return callback ? callback(build.options->callback_context, progress) : 1;
  }
};

pqc_status BeginBuild(const Beginning& beginning, const pqc_build_options* caller_options) {
  RETURN_IF_ERROR(CheckBeginning(beginning));
  pqc_build_options options;
  RETURN_IF_ERROR(ReadStruct(caller_options, "options", &options));
  RETURN_IF_ERROR(CheckIndex(options.index, "options.index"));
  return BeginOperation(beginning,
                        {.kind = Operation::Kind::kBuild, .reserved = Reserved::kNextCall},
                        [options](Operation& operation, pqc_sequence* sequence) {
                          CancellableBuild build{.options = &options, .operation = &operation};
                          pqc_build_options cancellable = options;
                          cancellable.callback = &CancellableBuild::Continue;
                          cancellable.callback_context = &build;
                          return pqc_build_index(sequence, &cancellable);
                        });
}

// A copy of all of a tensor's description; the elements, blocks and slots are the caller's.
class TensorCopy {
 public:
  // REQUIRES: ReadRows has accepted the tensor.
  explicit TensorCopy(const pqc_tensor& from) : tensor_(from) {
    if (from.ndim > 0) std::memcpy(shape_, from.shape, from.ndim * sizeof(shape_[0]));
    if (from.strides) std::memcpy(strides_, from.strides, from.ndim * sizeof(strides_[0]));
    if (from.block_table) {
      CopyStruct(from.block_table, SizeOf(from.block_table), &block_table_);
    }
  }
  // Returns a tensor that refers to this object.
  pqc_tensor c() const {
    pqc_tensor tensor = tensor_;
    tensor.shape = shape_;
    if (tensor.strides) tensor.strides = strides_;
    if (tensor.block_table) tensor.block_table = &block_table_;
    return tensor;
  }

 private:
  pqc_tensor tensor_;
  uint64_t shape_[4] = {};
  int64_t strides_[4] = {};
  pqc_block_table block_table_{};
};

// The rows of an ingest.
struct IngestWork {
  struct LayerCopy {
    uint32_t layer;
    TensorCopy keys, values;
  };
  uint64_t first_position = 0;
  std::vector<LayerCopy> layers;
  OwnedNames names;

  pqc_status Run(const Operation& operation, pqc_sequence* sequence) const {
    const pqc_row_options options = names.view();
    for (size_t i = 0; i < layers.size(); ++i) {
      if (operation.cancelled()) {
        return Fail(PQC_CANCELLED, "operation", "it was cancelled before layer %zu of %zu", i,
                    layers.size());
      }
      const pqc_tensor keys = layers[i].keys.c(), values = layers[i].values.c();
      const bool named = i == 0 && !names.empty();
      const pqc_status status = pqc_ingest_with(sequence, layers[i].layer, first_position, &keys,
                                                &values, named ? &options : nullptr);
      if (status != PQC_OK) return NameLayer(i, status);
    }
    return PQC_OK;
  }

 private:
  // Puts the layer before the field of an error that is about its rows.
  static pqc_status NameLayer(size_t i, pqc_status status) {
    const std::string_view field = LastRefusal().field;
    for (const char* own : {"layer", "keys", "values"}) {
      if (field.starts_with(own)) return PrefixField(FieldPath::Of("layers[%zu]", i), status);
    }
    return status;
  }
};

pqc_status BeginIngest(const Beginning& beginning, uint64_t first_position,
                       const pqc_layer_rows* layers, uint32_t layer_count,
                       const pqc_row_options* caller_options) {
  RETURN_IF_ERROR(CheckBeginning(beginning));
  std::vector<RowBlock> blocks;
  RETURN_IF_ERROR(
      ReadLayers(*beginning.sequence->state->cache, layers, layer_count, kOnHost, &blocks));
  for (const RowBlock& block : blocks) {
    RETURN_IF_ERROR(CheckPositions(first_position, block.keys.shape[0]));
  }
  pqc_row_options names;
  RETURN_IF_ERROR(ReadRowOptions(caller_options, "options", {}, &names));
  const auto work = std::make_shared<IngestWork>();  // std::function copies what it captures
  work->first_position = first_position;
  work->layers.reserve(layer_count);
  for (uint32_t i = 0; i < layer_count; ++i) {
    pqc_layer_rows rows;
    RETURN_IF_ERROR(ReadElement(layers, i, "layers", &rows));
    work->layers.push_back({rows.layer, TensorCopy(rows.keys), TensorCopy(rows.values)});
  }
  work->names.Assign(names);
  return BeginOperation(beginning, {.reserved = Reserved::kAllCalls},
                        [work](Operation& operation, pqc_sequence* sequence) {
                          return work->Run(operation, sequence);
                        });
}

pqc_status Poll(pqc_operation* operation, uint32_t* done) {
  if (!done) return Fail(PQC_INVALID_ARGUMENT, "done", "must not be NULL");
  *done = 0;
  if (!operation) return Fail(PQC_INVALID_ARGUMENT, "operation", "must not be NULL");
  bool ended = false;
  const pqc_status status = operation->operation->Poll(&ended);
  *done = ended ? 1 : 0;
  return status;
}

pqc_status Wait(pqc_operation* operation, uint32_t timeout_ms) {
  if (!operation) return Fail(PQC_INVALID_ARGUMENT, "operation", "must not be NULL");
  return operation->operation->Wait(timeout_ms);
}

pqc_status Cancel(pqc_operation* operation) {
  if (!operation) return Fail(PQC_INVALID_ARGUMENT, "operation", "must not be NULL");
  operation->operation->Cancel();
  return PQC_OK;
}

pqc_status Close(pqc_operation* operation, uint32_t timeout_ms) {
  if (!operation) return PQC_OK;
  operation->operation->Cancel();
  const pqc_status waited = operation->operation->Wait(timeout_ms);
  bool done = false;
  operation->operation->Poll(&done);
  if (!done) return waited;
  ClearLastError();
  operation->operation->RemoveEvent();
  delete operation;
  return PQC_OK;
}

pqc_status GetEventFd(pqc_client* client, int* fd) {
  if (!client) return Fail(PQC_INVALID_ARGUMENT, "client", "must not be NULL");
  if (!fd) return Fail(PQC_INVALID_ARGUMENT, "fd", "must not be NULL");
  *fd = -1;
  RETURN_IF_ERROR(client->state->events->Open(fd));
  if (client->state->local) client->state->local->AddEarlierEvents();
  return PQC_OK;
}

pqc_status NextEvent(pqc_client* client, pqc_event* caller_event) {
  if (!client) return Fail(PQC_INVALID_ARGUMENT, "client", "must not be NULL");
  pqc_event event;
  RETURN_IF_ERROR(ReadStruct(caller_event, "event", &event));
  if (!client->state->events->Take(&event)) event = {};
  WriteStruct(event, caller_event);
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

using pqcached::client::CallRecord;
using pqcached::client::RecordedCall;

extern "C" {

pqc_status pqc_sequence_flush_begin(pqc_sequence* sequence, void* context,
                                    pqc_operation** operation) {
  return RecordedCall(
      "pqc_sequence_flush_begin",
      [&](CallRecord& call) { call.Handle("sequence", sequence).Opens("operation", operation); },
      [&] {
        return pqcached::client::BeginFlush({sequence, context, operation});
      });
}

pqc_status pqc_build_index_begin(pqc_sequence* sequence, const pqc_build_options* options,
                                 void* context, pqc_operation** operation) {
  return RecordedCall(
      "pqc_build_index_begin",
      [&](CallRecord& call) { call.Handle("sequence", sequence).Opens("operation", operation); },
      [&] {
        return pqcached::client::BeginBuild({sequence, context, operation}, options);
      });
}

pqc_status pqc_ingest_begin(pqc_sequence* sequence, uint64_t first_position,
                            const pqc_layer_rows* layers, uint32_t layer_count,
                            const pqc_row_options* options, void* context,
                            pqc_operation** operation) {
  return RecordedCall(
      "pqc_ingest_begin",
      [&](CallRecord& call) {
        call.Handle("sequence", sequence)
            .Number("first_position", first_position)
            .Layers(layers, layer_count)
            .Opens("operation", operation);
      },
      [&] {
        return pqcached::client::BeginIngest({sequence, context, operation}, first_position, layers,
                                             layer_count, options);
      });
}

pqc_status pqc_operation_poll(pqc_operation* operation, uint32_t* done) {
  return RecordedCall(
      "pqc_operation_poll",
      [&](CallRecord& call) { call.Handle("operation", operation).Gives("done", done); },
      [&] { return pqcached::client::Poll(operation, done); });
}

pqc_status pqc_operation_wait(pqc_operation* operation, uint32_t timeout_ms) {
  return RecordedCall(
      "pqc_operation_wait",
      [&](CallRecord& call) {
        call.Handle("operation", operation).Number("timeout_ms", timeout_ms);
      },
      [&] { return pqcached::client::Wait(operation, timeout_ms); });
}

pqc_status pqc_operation_cancel(pqc_operation* operation) {
  return RecordedCall(
      "pqc_operation_cancel", [&](CallRecord& call) { call.Handle("operation", operation); },
      [&] { return pqcached::client::Cancel(operation); });
}

pqc_status pqc_operation_close(pqc_operation* operation, uint32_t timeout_ms) {
  return RecordedCall(
      "pqc_operation_close",
      [&](CallRecord& call) {
        call.ClosesIfOk("operation", operation).Number("timeout_ms", timeout_ms);
      },
      [&] { return pqcached::client::Close(operation, timeout_ms); });
}

pqc_status pqc_client_event_fd(pqc_client* client, int* fd) {
  return RecordedCall(
      "pqc_client_event_fd", [&](CallRecord& call) { call.Handle("client", client); },
      [&] { return pqcached::client::GetEventFd(client, fd); });
}

pqc_status pqc_client_next_event(pqc_client* client, pqc_event* event) {
  return RecordedCall(
      "pqc_client_next_event", [&](CallRecord& call) { call.Handle("client", client); },
      [&] { return pqcached::client::NextEvent(client, event); });
}

}  // extern "C"
