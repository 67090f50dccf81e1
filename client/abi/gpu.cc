// Implements the calls on GPUs.
#include "client/gpu/gpu.h"
#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/step/offload.h"
#include "client/step/step.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

pqc_status Count(pqc_gpu* gpu, pqc_gpu_counts* caller_counts) {
  if (!gpu) return Fail(PQC_INVALID_ARGUMENT, "gpu", "must not be NULL");
  pqc_gpu_counts counts;
  RETURN_IF_ERROR(ReadStruct(caller_counts, "counts", &counts));
  gpu::StepsCounts found;
  RETURN_IF_ERROR(Report(gpu->state->steps->Count(&found), "gpu"));
  counts.hits = found.hits;
  counts.misses = found.misses;
  counts.loaded = found.loaded;
  counts.evicted = found.evicted;
  counts.device_bytes = found.device_bytes;
  counts.locked_bytes = found.locked_bytes;
  counts.generation = found.generation;
  counts.has_staged_rows = found.has_staged_rows ? 1 : 0;
  counts.resident_layers = found.resident_layers;
  WriteStruct(counts, caller_counts);
  return PQC_OK;
}

pqc_status SelectOnGpu(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                       const pqc_gpu_positions* caller_out) {
  RETURN_IF_ERROR(ReadLayerCall(step, layer, queries));
  RETURN_IF_ERROR(ReadCallSelection(step, nullptr));
  if (!step->gpu) {
    return Fail(PQC_FAILED_PRECONDITION, "step", "it is on the CPU; use pqc_step_topk");
  }
  pqc_gpu_positions out;
  RETURN_IF_ERROR(ReadStruct(caller_out, "out", &out));
  if (!out.positions) return Fail(PQC_INVALID_ARGUMENT, "out.positions", "must not be NULL");
  if (!out.counts) return Fail(PQC_INVALID_ARGUMENT, "out.counts", "must not be NULL");
  return step->gpu->Select(step->call, out);
}

}  // namespace
}  // namespace pqcached::client

using pqcached::client::Call;
using pqcached::client::CallRecord;
using pqcached::client::Fail;
using pqcached::client::RecordedCall;
using pqcached::client::RecordedClose;

extern "C" {

pqc_status pqc_gpu_open(pqc_cache* cache, const pqc_gpu_options* options, pqc_gpu** gpu) {
  return RecordedCall(
      "pqc_gpu_open", [&](CallRecord& call) { call.Handle("cache", cache).Opens("gpu", gpu); },
      [&] { return pqcached::client::OpenGpu(cache, options, nullptr, gpu); });
}

void pqc_gpu_close(pqc_gpu* gpu) {
  if (!gpu) return;
  RecordedClose("pqc_gpu_close", "gpu", gpu, [&] {
    const pqcached::client::GpuState& state = *gpu->state;
    if (state.cache->client->offload) state.cache->client->offload->Drain(state.steps.get());
    delete gpu;
  });
}

pqc_status pqc_gpu_count(pqc_gpu* gpu, pqc_gpu_counts* counts) {
  return RecordedCall(
      "pqc_gpu_count", [&](CallRecord& call) { call.Handle("gpu", gpu); },
      [&] { return pqcached::client::Count(gpu, counts); });
}

pqc_status pqc_gpu_ingest(pqc_gpu* gpu, pqc_sequence* sequence, uint32_t layer,
                          uint64_t first_position, const pqc_tensor* keys, const pqc_tensor* values,
                          void* stream) {
  return RecordedCall(
      "pqc_gpu_ingest",
      [&](CallRecord& call) {
        call.Handle("gpu", gpu)
            .Handle("sequence", sequence)
            .Number("layer", layer)
            .Number("first_position", first_position)
            .Tokens(keys);
      },
      [&] {
        return pqcached::client::IngestOnGpu(gpu, sequence, layer, first_position, keys, values,
                                             nullptr, stream);
      });
}

pqc_status pqc_gpu_ingest_with(pqc_gpu* gpu, pqc_sequence* sequence, uint32_t layer,
                               uint64_t first_position, const pqc_tensor* keys,
                               const pqc_tensor* values, const pqc_row_options* options,
                               void* stream) {
  return RecordedCall(
      "pqc_gpu_ingest_with",
      [&](CallRecord& call) {
        call.Handle("gpu", gpu)
            .Handle("sequence", sequence)
            .Number("layer", layer)
            .Number("first_position", first_position)
            .Tokens(keys);
      },
      [&] {
        return pqcached::client::IngestOnGpu(gpu, sequence, layer, first_position, keys, values,
                                             options, stream);
      });
}

pqc_status pqc_gpu_add_query_samples(pqc_gpu* gpu, pqc_sequence* sequence,
                                     const pqc_query_samples* samples, uint32_t sample_count,
                                     void* stream) {
  return RecordedCall(
      "pqc_gpu_add_query_samples",
      [&](CallRecord& call) {
        call.Handle("gpu", gpu).Handle("sequence", sequence).Number("sample_count", sample_count);
      },
      [&] {
        return pqcached::client::AddSamplesOnGpu(gpu, sequence, samples, sample_count, stream);
      });
}

pqc_status pqc_gpu_step_begin(pqc_gpu* gpu, const pqc_step_item* items, uint32_t item_count,
                              const pqc_step_options* options, void* stream, pqc_step** step) {
  return RecordedCall(
      "pqc_gpu_step_begin",
      [&](CallRecord& call) {
        call.Handle("gpu", gpu).Items(items, item_count).Options(options).Opens("step", step);
      },
      [&] {
        if (!gpu) return Fail(PQC_INVALID_ARGUMENT, "gpu", "must not be NULL");
        return pqcached::client::BeginStep(
            {.client = gpu->state->cache->client, .gpu = gpu->state, .stream = stream}, items,
            item_count, options, step);
      });
}

pqc_status pqc_gpu_step_topk(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                             const pqc_gpu_positions* out) {
  return RecordedCall(
      "pqc_gpu_step_topk",
      [&](CallRecord& call) { call.Handle("step", step).Number("layer", layer); },
      [&] { return pqcached::client::SelectOnGpu(step, layer, queries, out); });
}

pqc_status pqc_gpu_merge_tensors(pqc_gpu* gpu, const pqc_partial* a, const pqc_partial* b,
                                 void* stream) {
  return Call([&] { return pqcached::client::MergeOnGpu(gpu, a, b, stream); });
}

}  // extern "C"
