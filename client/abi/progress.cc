// Implements pqc_sequence_progress.
#include <algorithm>

#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/local/sequence.h"
#include "client/step/preparer.h"
#include "client/step/sender.h"
#include "kvstore/read/indexes/index_types.h"

namespace pqcached::client {
namespace {

// Fills in what the newest image says about rows and index.
void ReadImage(const SequenceState& state, Image& image, pqc_progress* progress) {
  const kvstore::IndexDescriptor& index =
      kvstore::NeedsBuild(state.live_index) ? state.live_index : state.cache->default_index;
  uint32_t index_slot = 0;
  // An image lists no index of a plug-in.
  progress->has_index = !kvstore::IsPlugin(index) && image.FindIndex(index, &index_slot) == PQC_OK;
  ClearLastError();
  uint64_t covered = progress->stored_tokens;
  for (const auto& [layer, shape] : state.cache->stored_layers) {
    if (!shape.has_index()) {
      ++progress->layers_ready;
      continue;
    }
    if (!progress->has_index) continue;
    const uint64_t coded = image.CodedTokens(layer, index_slot);
    covered = std::min(covered, coded);
    if (coded >= progress->stored_tokens) ++progress->layers_ready;
  }
  if (progress->has_index) progress->indexed_tokens = covered;
}

void ReadMapped(const std::shared_ptr<SequenceState>& state, pqc_progress* progress) {
  LocalSequence& local = *state->local;
  const LocalSession& session = local.session();
  progress->is_lost = session.lost();
  progress->is_restarting = !session.lost() && !session.link()->CheckAlive();
  progress->is_revoked = local.revoked();
  if (local.suspended()) progress->is_suspended = 1;
  std::shared_ptr<Image> image;
  uint64_t lease_epoch = 0;
  const bool pinned = local.TryPin(&image, &lease_epoch);
  if (pinned) {
    progress->stored_tokens = local.token_count();
    ReadImage(*state, *image, progress);
  }
  progress->is_unattached = !pinned || local.HasNewer();
  const bool is_serving = !progress->is_lost && !progress->is_restarting;
  if (progress->is_unattached && is_serving && !progress->is_suspended) {
    state->cache->client->preparer->Request(state, {.newer_image = true});
    ClearLastError();
  }
}

pqc_status ReadProgress(const std::shared_ptr<SequenceState>& state, pqc_progress* progress) {
  ClientState& client = *state->cache->client;
  Remote* remote = nullptr;
  if (const pqc_status status = FindRemote(client, &remote); status != PQC_OK) return status;
  progress->layer_count = static_cast<uint32_t>(state->cache->stored_layers.size());
  progress->is_changing = state->changing;
  progress->is_suspended = state->suspended;
  progress->stored_tokens = state->token_count;
  progress->row_status = client.sender->Check(*state);
  if (state->local) ReadMapped(state, progress);
  uint64_t queued_end = 0;
  progress->passed_tokens =
      client.sender->QueuedEnd(*state, &queued_end) ? queued_end : progress->stored_tokens;
  ClearLastError();
  return PQC_OK;
}

pqc_status GetProgress(pqc_sequence* sequence, pqc_progress* caller_progress) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  pqc_progress progress;
  RETURN_IF_ERROR(ReadStruct(caller_progress, "progress", &progress));
  const size_t size = progress.struct_size;
  progress = {};
  progress.struct_size = size;
  RETURN_IF_ERROR(ReadProgress(sequence->state, &progress));
  WriteStruct(progress, caller_progress);
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

extern "C" pqc_status pqc_sequence_progress(pqc_sequence* sequence, pqc_progress* progress) {
  return pqcached::client::RecordedCall(
      "pqc_sequence_progress",
      [&](pqcached::client::CallRecord& call) { call.Handle("sequence", sequence); },
      [&] { return pqcached::client::GetProgress(sequence, progress); });
}
