// Implements the calls that copy rows back into the engine's memory.
#include "pqcached/load.h"

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "client/abi/operations.h"
#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/base/load.h"
#include "client/gpu/load.h"
#include "client/step/handles.h"
#include "client/step/layer_rows.h"
#include "client/step/read_backend.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

// The checked arguments of a load.
struct LoadWork {
  kvstore::TokenRange tokens;
  std::vector<LoadLayer> layers;
  std::shared_ptr<LoadSink> sink;  // shared with copies of an operation's body

  pqc_status Run(pqc_sequence* sequence, const std::function<pqc_status()>& layer_done) const {
    SequenceState& state = *sequence->state;
    ReadBackend* reads = nullptr;
    RETURN_IF_ERROR(GetReads(state, &reads));
    return reads->Load(
        state, {.tokens = tokens, .layers = layers, .sink = *sink, .layer_done = layer_done});
  }
};

// Finds the device and stream of the tensors of all layers: those of the first one.
pqc_status FindLoadPlace(const pqc_layer_rows* layers, uint32_t layer_count, pqc_device* device,
                         void** stream) {
  *device = PQC_CPU;
  *stream = nullptr;
  if (!layers || layer_count == 0) return PQC_OK;  // refused by ReadLoadLayers
  pqc_layer_rows first;
  RETURN_IF_ERROR(ReadElement(layers, 0, "layers[0]", &first));
  const pqc_tensor& rows = first.keys.ptr ? first.keys : first.values;  // layers of values
  if (RawEnum(rows.device) != PQC_CUDA) return PQC_OK;
  *device = PQC_CUDA;
  *stream = rows.stream;
  return PQC_OK;
}

pqc_status ReadLoad(const pqc_sequence* sequence, pqc_token_range tokens,
                    const pqc_layer_rows* layers, uint32_t layer_count, LoadWork* work) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  RETURN_IF_ERROR(CheckTokenRange(tokens));
  work->tokens = {tokens.begin, tokens.end};
  pqc_device device = PQC_CPU;
  void* stream = nullptr;
  RETURN_IF_ERROR(FindLoadPlace(layers, layer_count, &device, &stream));
  const CacheState& cache = *sequence->state->cache;
  RETURN_IF_ERROR(
      ReadLoadLayers(cache, layers, layer_count, work->tokens, {device, stream}, &work->layers));
  if (device == PQC_CPU) {
    work->sink = std::make_shared<HostSink>();
    return PQC_OK;
  }
  Remote* remote = nullptr;
  RETURN_IF_ERROR(FindRemote(*cache.client, &remote));
  return OpenDeviceSink(*cache.client, work->layers, stream, &work->sink);
}

pqc_status Load(pqc_sequence* sequence, pqc_token_range tokens, const pqc_layer_rows* layers,
                uint32_t layer_count) {
  LoadWork work;
  RETURN_IF_ERROR(ReadLoad(sequence, tokens, layers, layer_count, &work));
  return work.Run(sequence, [] { return PQC_OK; });
}

pqc_status BeginLoad(const Beginning& beginning, pqc_token_range tokens,
                     const pqc_layer_rows* layers, uint32_t layer_count) {
  RETURN_IF_ERROR(CheckBeginning(beginning));
  const auto work = std::make_shared<LoadWork>();  // std::function copies what it captures
  RETURN_IF_ERROR(ReadLoad(beginning.sequence, tokens, layers, layer_count, work.get()));
  return BeginOperation(beginning, {.layer_count = layer_count},
                        [work](Operation& operation, pqc_sequence* sequence) {
                          size_t left = work->layers.size();
                          return Call([&] {
                            return work->Run(sequence, [&] {
                              operation.AddLayer();
                              if (--left == 0 || !operation.cancelled()) return PQC_OK;
                              return Fail(PQC_CANCELLED, "operation",
                                          "it was cancelled; %zu layers are not loaded", left);
                            });
                          });
                        });
}

pqc_status WaitLayers(pqc_operation* operation, uint32_t layer_count, uint32_t timeout_ms) {
  if (!operation) return Fail(PQC_INVALID_ARGUMENT, "operation", "must not be NULL");
  return operation->operation->WaitLayers(layer_count, timeout_ms);
}

pqc_status Prefetch(pqc_sequence* sequence, pqc_token_range tokens) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  RETURN_IF_ERROR(CheckTokenRange(tokens));
  const std::shared_ptr<SequenceState>& state = sequence->state;
  Remote* remote = nullptr;
  RETURN_IF_ERROR(FindRemote(*state->cache->client, &remote));
  if (!state->local) return PQC_OK;
  const kvstore::TokenRange range{tokens.begin, tokens.end};
  const auto operation = std::make_shared<Operation>(
      Operation::Options{.sequence = state.get(), .events = nullptr},
      [state, range](Operation& running) {
        return Call([&] {
          ReadBackend* reads = nullptr;
          RETURN_IF_ERROR(GetReads(*state, &reads));
          return reads->Prefetch(*state, range, [&] { return running.cancelled(); });
        });
      });
  static_cast<void>(state->cache->client->operations->Start(operation));  // or no effect
  ClearLastError();
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

using pqcached::client::CallRecord;
using pqcached::client::RecordedCall;

extern "C" {

pqc_status pqc_load(pqc_sequence* sequence, pqc_token_range tokens, const pqc_layer_rows* layers,
                    uint32_t layer_count) {
  return RecordedCall(
      "pqc_load",
      [&](CallRecord& call) {
        call.Handle("sequence", sequence)
            .Number("tokens_begin", tokens.begin)
            .Number("tokens_end", tokens.end)
            .Layers(layers, layer_count);
      },
      [&] { return pqcached::client::Load(sequence, tokens, layers, layer_count); });
}

pqc_status pqc_load_begin(pqc_sequence* sequence, pqc_token_range tokens,
                          const pqc_layer_rows* layers, uint32_t layer_count, void* context,
                          pqc_operation** operation) {
  return RecordedCall(
      "pqc_load_begin",
      [&](CallRecord& call) {
        call.Handle("sequence", sequence)
            .Number("tokens_begin", tokens.begin)
            .Number("tokens_end", tokens.end)
            .Layers(layers, layer_count)
            .Opens("operation", operation);
      },
      [&] {
        return pqcached::client::BeginLoad({sequence, context, operation}, tokens, layers,
                                           layer_count);
      });
}

pqc_status pqc_load_wait(pqc_operation* operation, uint32_t layer_count, uint32_t timeout_ms) {
  return RecordedCall(
      "pqc_load_wait",
      [&](CallRecord& call) {
        call.Handle("operation", operation)
            .Number("layer_count", layer_count)
            .Number("timeout_ms", timeout_ms);
      },
      [&] { return pqcached::client::WaitLayers(operation, layer_count, timeout_ms); });
}

pqc_status pqc_prefetch(pqc_sequence* sequence, pqc_token_range tokens) {
  return RecordedCall(
      "pqc_prefetch",
      [&](CallRecord& call) {
        call.Handle("sequence", sequence)
            .Number("tokens_begin", tokens.begin)
            .Number("tokens_end", tokens.end);
      },
      [&] { return pqcached::client::Prefetch(sequence, tokens); });
}

}  // extern "C"
