// Implements attach.h.
#include <memory>

#include "client/abi/sequence_handles.h"
#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/deadline.h"
#include "client/base/error.h"
#include "client/step/handles.h"
#include "client/step/offload.h"
#include "client/step/sender.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

constexpr uint32_t kFindSequenceVersion = 13;  // of Remote

pqc_status Attach(pqc_cache* cache, uint64_t sequence_id, pqc_sequence** sequence,
                  uint64_t* token_count) {
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache", "must not be NULL");
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  *sequence = nullptr;
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*cache->state->client, &remote));
  if (cache->state->client->remote_version < kFindSequenceVersion) {
    return Fail(PQC_UNIMPLEMENTED, "",
                "libpqcached_rpc is older than pqc_sequence_attach; install the library of the "
                "client's release");
  }
  std::unique_ptr<pqc_sequence> attached = NewHandle(cache->state);
  uint64_t tokens = 0;
  pqc_index live_index = {};
  RefusalBuffer error;
  const pqc_status status =
      remote->FindSequence(cache->state->cache_id, sequence_id, &tokens, &live_index, &error);
  if (status != PQC_OK) return Fail(status, error);  // the sidecar names it as this call does
  Adopt(sequence_id, tokens, *attached);
  if (live_index.kind != PQC_INDEX_DEFAULT) {
    attached->state->live_index = ToDescriptor(live_index);
    attached->state->OpenPrefill();
  }
  if (token_count) *token_count = tokens;
  *sequence = attached.release();
  return PQC_OK;
}

pqc_status FlushRows(const SequenceState& state) {
  const ClientState& client = *state.cache->client;
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(client, &remote));
  const auto deadline = CallDeadline(client.timeout_ms);
  RETURN_IF_ERROR(client.sender->Flush(state, deadline));
  return client.offload->Flush(state, deadline);
}

pqc_status DetachHandle(pqc_sequence* sequence) {
  if (!sequence) return PQC_OK;
  std::unique_ptr<pqc_sequence> owned(sequence);
  const std::shared_ptr<SequenceState> state = owned->state;
  const pqc_status status = FlushRows(*state);
  Forget(std::move(owned));
  return status;
}

}  // namespace
}  // namespace pqcached::client

extern "C" {

pqc_status pqc_sequence_attach(pqc_cache* cache, uint64_t sequence_id, pqc_sequence** sequence,
                               uint64_t* token_count) {
  return pqcached::client::RecordedCall(
      "pqc_sequence_attach",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("cache", cache)
            .Number("sequence_id", sequence_id)
            .Opens("sequence", sequence)
            .Gives("token_count", token_count);
      },
      [&] { return pqcached::client::Attach(cache, sequence_id, sequence, token_count); });
}

pqc_status pqc_sequence_detach(pqc_sequence* sequence) {
  return pqcached::client::RecordedCall(
      "pqc_sequence_detach",
      [&](pqcached::client::CallRecord& call) { call.Closes("sequence", sequence); },
      [&] { return pqcached::client::DetachHandle(sequence); });
}

}  // extern "C"
