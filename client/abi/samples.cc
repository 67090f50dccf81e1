// Implements the call that adds query samples.
#include <vector>

#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/step/handles.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

constexpr uint32_t kMaxSamples = 1024;       // of one call, as many as layers
constexpr uint32_t kSamplesVersion = 19;     // the first kRemoteVersion whose library adds them
constexpr uint64_t kMaxPositions = 1 << 20;  // of one layer in one call

pqc_status CheckSamplePositions(const pqc_query_samples& samples, const FieldPath& name) {
  const uint64_t count = samples.position_count;
  if (count == 0 || count > kMaxPositions) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.position_count", name.c_str()),
                "%llu, must lie in [1, %llu]", static_cast<unsigned long long>(count),
                static_cast<unsigned long long>(kMaxPositions));
  }
  if (!samples.positions) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.positions", name.c_str()),
                "must not be NULL");
  }
  for (uint64_t i = 1; i < count; ++i) {
    if (samples.positions[i] > samples.positions[i - 1]) continue;
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.positions", name.c_str()),
                "[%llu] is %llu, must be above the one before, %llu",
                static_cast<unsigned long long>(i),
                static_cast<unsigned long long>(samples.positions[i]),
                static_cast<unsigned long long>(samples.positions[i - 1]));
  }
  return PQC_OK;
}

pqc_status ReadSamples(const CacheState& cache, const pqc_query_samples& caller,
                       const FieldPath& name, SampleBlock* block) {
  pqc_query_samples samples;
  RETURN_IF_ERROR(ReadStruct(&caller, name.c_str(), &samples));
  LayerShape shape;
  RETURN_IF_ERROR(
      FindLayer(cache, samples.layer, FieldPath::Of("%s.layer", name.c_str()).c_str(), &shape));
  if (!shape.has_index()) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.layer", name.c_str()),
                "%u, must be a layer that indexes have", samples.layer);
  }
  RETURN_IF_ERROR(CheckSamplePositions(samples, name));
  *block = {.layer = samples.layer, .positions = samples.positions, .queries = {}};
  const FieldPath queries = FieldPath::Of("%s.queries", name.c_str());
  RETURN_IF_ERROR(ReadTensor(samples.queries, queries.c_str(), &block->queries));
  const TensorView& view = block->queries;
  if (view.ndim == 3 && view.shape[0] == samples.position_count &&
      view.shape[1] == shape.query_heads && view.shape[2] == shape.key_dim) {
    return PQC_OK;
  }
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape", queries.c_str()),
              "must be [%llu, %u, %u]: positions, query heads, key_dim",
              static_cast<unsigned long long>(samples.position_count), shape.query_heads,
              shape.key_dim);
}

pqc_status AddSamples(pqc_sequence* sequence, const pqc_query_samples* samples,
                      uint32_t sample_count) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  if (!samples) return Fail(PQC_INVALID_ARGUMENT, "samples", "must not be NULL");
  if (sample_count == 0 || sample_count > kMaxSamples) {
    return Fail(PQC_INVALID_ARGUMENT, "sample_count", "%u, must lie in [1, %u]", sample_count,
                kMaxSamples);
  }
  const CacheState& cache = *sequence->state->cache;
  if (cache.client->remote_version < kSamplesVersion) {
    return Fail(PQC_UNIMPLEMENTED, "samples",
                "libpqcached_rpc is older than query samples; install the library of the client's "
                "release");
  }
  std::vector<SampleBlock> blocks(sample_count);
  for (uint32_t i = 0; i < sample_count; ++i) {
    RETURN_IF_ERROR(ReadSamples(cache, samples[i], FieldPath::Of("samples[%u]", i), &blocks[i]));
  }
  const ChangeScope changing(sequence);
  if (changing.status() != PQC_OK) return changing.status();
  RefusalBuffer error;
  const pqc_status status = changing.remote().AddSamples(sequence->state->sequence_id,
                                                         blocks.data(), sample_count, &error);
  return Report(status, error,
                {{"chunk.query_samples[0]", "samples"},
                 {"chunk.query_samples", "samples"},
                 {"query_samples", "samples"},
                 {"header", ""}});
}

}  // namespace
}  // namespace pqcached::client

extern "C" {

pqc_status pqc_add_query_samples(pqc_sequence* sequence, const pqc_query_samples* samples,
                                 uint32_t sample_count) {
  return pqcached::client::RecordedCall(
      "pqc_add_query_samples",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("sequence", sequence).Number("sample_count", sample_count);
      },
      [&] { return pqcached::client::AddSamples(sequence, samples, sample_count); });
}

}  // extern "C"
