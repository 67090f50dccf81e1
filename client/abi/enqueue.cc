// Implements pqc_enqueue_rows.

#include <algorithm>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/deadline.h"
#include "client/base/error.h"
#include "client/base/pack.h"
#include "client/base/token_names.h"
#include "client/step/handover.h"
#include "client/step/layer_rows.h"
#include "client/step/offload.h"
#include "client/step/sender.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

// Rows of one message. Each of its tensors is aligned (Handover::CopyTokens).
constexpr uint64_t kMaxChunkBytes = uint64_t{4} << 20;
constexpr uint64_t kMaxPadding = 64;

pqc_status CheckTokenCounts(const std::vector<RowBlock>& blocks) {
  const uint64_t token_count = blocks[0].keys.shape[0];
  for (size_t i = 1; i < blocks.size(); ++i) {
    if (blocks[i].keys.shape[0] == token_count) continue;
    return Fail(PQC_INVALID_ARGUMENT,
                FieldPath::Of("layers[%zu].%s.shape[0]", i, FirstPart(blocks[i])),
                "%llu tokens, but layers[0] has %llu",
                static_cast<unsigned long long>(blocks[i].keys.shape[0]),
                static_cast<unsigned long long>(token_count));
  }
  return PQC_OK;
}

// Refuses a gap behind rows that are on their way. The sidecar refuses one behind stored rows.
pqc_status CheckGap(Sender& sender, const SequenceState& state, uint64_t first_position) {
  uint64_t end = 0;
  if (!sender.QueuedEnd(state, &end) || first_position <= end) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, "first_position", "%llu, a gap; the sequence continues at %llu",
              static_cast<unsigned long long>(first_position),
              static_cast<unsigned long long>(end));
}

// Waits until nothing of a GPU precedes the rows, and there is room for more.
pqc_status WaitForTurn(SequenceState& state, DeadlineClock::time_point deadline) {
  ClientState& client = *state.cache->client;
  RETURN_IF_ERROR(client.sender->Check(state));
  RETURN_IF_ERROR(client.offload->Flush(state, deadline));
  return client.sender->WaitForRoom(deadline);
}

// Returns the number of tokens whose rows one message carries; they fit into a staging slot.
uint64_t ChunkTokens(Sender& sender, const std::vector<RowBlock>& blocks) {
  const uint64_t padding = 2 * kMaxPadding * blocks.size();
  const uint64_t slot_bytes = sender.slots().max_bytes();
  uint64_t token_bytes = 1;  // more than none, whatever the shapes are
  for (const RowBlock& block : blocks) {
    token_bytes += BytesPerIndex(block.keys) + BytesPerIndex(block.values);
  }
  const uint64_t bytes =
      slot_bytes > padding ? std::min(kMaxChunkBytes, slot_bytes - padding) : kMaxChunkBytes;
  return std::max<uint64_t>(1, bytes / token_bytes);
}

pqc_status EnqueueRows(pqc_sequence* sequence, uint64_t first_position,
                       const pqc_layer_rows* layers, uint32_t layer_count,
                       const pqc_row_options* caller_options) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  SequenceState& state = *sequence->state;
  std::vector<RowBlock> blocks;
  RETURN_IF_ERROR(ReadAllLayers(*state.cache, layers, layer_count, kOnHost, &blocks));
  RETURN_IF_ERROR(CheckTokenCounts(blocks));
  const uint64_t token_count = blocks[0].keys.shape[0];
  RETURN_IF_ERROR(CheckPositions(first_position, token_count));
  pqc_row_options names;
  RETURN_IF_ERROR(ReadRowOptions(caller_options, "options", {}, &names));
  Remote* remote = nullptr;
  RETURN_IF_ERROR(FindRemote(*state.cache->client, &remote));
  const ChangeLock changing(state);
  RETURN_IF_ERROR(changing.status());
  if (state.in_step) {
    return SetRetry(kRetryConflict,
                    Fail(PQC_ABORTED, "sequence", "it is in a step; end that step first"));
  }
  if (state.suspended) {
    return Fail(PQC_FAILED_PRECONDITION, "sequence", "it is suspended; resume it first");
  }
  Sender& sender = *state.cache->client->sender;
  RETURN_IF_ERROR(CheckGap(sender, state, first_position));
  const auto deadline = CallDeadline(state.cache->client->timeout_ms);
  const uint64_t chunk_tokens = ChunkTokens(sender, blocks);
  for (uint64_t begin = 0; begin < token_count; begin += chunk_tokens) {
    RETURN_IF_ERROR(WaitForTurn(state, deadline));
    std::shared_ptr<Handover> handover = sender.Lend();
    handover->sequence = sequence->state;
    handover->is_prefill = true;
    handover->first_position = first_position + begin;
    handover->token_count = std::min(chunk_tokens, token_count - begin);
    handover->CopyTokens(blocks, *state.cache, begin, sender.slots());
    if (begin == 0 && HasNames(names)) handover->names.Assign(names);
    sender.Add({&handover, 1});
    state.OpenPrefill();
  }
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

extern "C" pqc_status pqc_enqueue_rows(pqc_sequence* sequence, uint64_t first_position,
                                       const pqc_layer_rows* layers, uint32_t layer_count,
                                       const pqc_row_options* options) {
  return pqcached::client::RecordedCall(
      "pqc_enqueue_rows",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("sequence", sequence)
            .Number("first_position", first_position)
            .Layers(layers, layer_count);
      },
      [&] {
        return pqcached::client::EnqueueRows(sequence, first_position, layers, layer_count,
                                             options);
      });
}
