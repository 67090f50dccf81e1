// Implements the call that adds query samples.
#include "client/step/layer_rows.h"

#include "client/base/call_log.h"
#include "client/base/error.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

pqc_status AddSamples(pqc_sequence* sequence, const pqc_query_samples* samples,
                      uint32_t sample_count) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  std::vector<SampleBlock> blocks;
  RETURN_IF_ERROR(ReadSamples(*sequence->state->cache, samples, sample_count, kOnHost, &blocks));
  const ChangeScope changing(sequence);
  if (changing.status() != PQC_OK) return changing.status();
  return SendSamples(changing, sequence->state->sequence_id, blocks);
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
