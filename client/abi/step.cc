// Implements the calls on steps.
#include "client/step/step.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/step/decode.h"
#include "client/step/offload.h"
#include "client/step/sender.h"
#include "kernels/base/status_macros.h"
#include "pqcached/decode.h"

namespace pqcached::client {
namespace {

pqc_status Flush(pqc_sequence* sequence) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  const ClientState& client = *sequence->state->cache->client;
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(client, &remote));
  const auto deadline = CallDeadline(client.timeout_ms);
  const pqc_status status = client.sender->Flush(*sequence->state, deadline);
  return status == PQC_OK ? client.offload->Flush(*sequence->state, deadline) : status;
}

}  // namespace
}  // namespace pqcached::client

using pqcached::client::CallRecord;
using pqcached::client::Fail;
using pqcached::client::RecordedCall;
using pqcached::client::RecordedClose;

extern "C" {

pqc_status pqc_step_begin(pqc_client* client, const pqc_step_item* items, uint32_t item_count,
                          const pqc_step_options* options, pqc_step** step) {
  return RecordedCall(
      "pqc_step_begin",
      [&](CallRecord& call) {
        call.Handle("client", client).Items(items, item_count).Options(options).Opens("step", step);
      },
      [&] {
        if (!client) return Fail(PQC_INVALID_ARGUMENT, "client", "must not be NULL");
        return pqcached::client::BeginStep({.client = client->state}, items, item_count, options,
                                           step);
      });
}

pqc_status pqc_step_topk(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                         const pqc_selection* selection, pqc_step_positions* out) {
  return RecordedCall(
      "pqc_step_topk",
      [&](CallRecord& call) { call.Handle("step", step).Number("layer", layer).Room(out); },
      [&] { return pqcached::client::SelectInStep(step, layer, queries, selection, out); });
}

pqc_status pqc_step_topk_pages(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                               const pqc_selection* selection, const pqc_page_options* options,
                               pqc_step_pages* out) {
  return RecordedCall(
      "pqc_step_topk_pages",
      [&](CallRecord& call) { call.Handle("step", step).Number("layer", layer).Room(out); },
      [&] {
        return pqcached::client::SelectPagesInStep(step, layer, queries, selection, options, out);
      });
}

pqc_status pqc_step_attend(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                           const pqc_selection* selection, pqc_step_attention* out) {
  return RecordedCall(
      "pqc_step_attend",
      [&](CallRecord& call) { call.Handle("step", step).Number("layer", layer).Room(out); },
      [&] { return pqcached::client::AttendInStep(step, layer, queries, selection, out); });
}

pqc_status pqc_step_attend_range(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                 const pqc_token_range* ranges, pqc_step_attention* out) {
  return RecordedCall(
      "pqc_step_attend_range",
      [&](CallRecord& call) { call.Handle("step", step).Number("layer", layer).Room(out); },
      [&] { return pqcached::client::AttendRangeInStep(step, layer, queries, ranges, out); });
}

pqc_status pqc_step_decode(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                           const pqc_tensor* keys, const pqc_tensor* values,
                           const pqc_selection* selection, pqc_step_attention* out) {
  return RecordedCall(
      "pqc_step_decode",
      [&](CallRecord& call) { call.Handle("step", step).Number("layer", layer).Room(out); },
      [&] {
        return pqcached::client::DecodeInStep(step, layer, queries, keys, values, selection, out);
      });
}

pqc_status pqc_step_attend_positions(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                     const pqc_position_lists* lists, pqc_step_attention* out) {
  return RecordedCall(
      "pqc_step_attend_positions",
      [&](CallRecord& call) { call.Handle("step", step).Number("layer", layer).Room(out); },
      [&] { return pqcached::client::AttendPositionsInStep(step, layer, queries, lists, out); });
}

pqc_status pqc_step_attend_begin(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                 const pqc_selection* selection, pqc_step_attention* out) {
  return RecordedCall(
      "pqc_step_attend_begin",
      [&](CallRecord& call) { call.Handle("step", step).Number("layer", layer).Room(out); },
      [&] { return pqcached::client::BeginAttendInStep(step, layer, queries, selection, out); });
}

pqc_status pqc_step_attend_wait(pqc_step* step) {
  return RecordedCall(
      "pqc_step_attend_wait", [&](CallRecord& call) { call.Handle("step", step); },
      [&] { return pqcached::client::WaitAttendInStep(step); });
}

pqc_status pqc_step_check(pqc_step* step) {
  return RecordedCall(
      "pqc_step_check", [&](CallRecord& call) { call.Handle("step", step); },
      [&] { return pqcached::client::CheckStep(step); });
}

pqc_status pqc_step_end(pqc_step* step, const pqc_layer_rows* layers, uint32_t layer_count,
                        const uint32_t* accepted) {
  return RecordedCall(
      "pqc_step_end",
      [&](CallRecord& call) {
        call.Closes("step", step)
            .Layers(layers, layer_count)
            .Number("has_accepted", accepted ? 1 : 0);
      },
      [&] { return pqcached::client::EndStep(step, layers, layer_count, accepted, nullptr); });
}

pqc_status pqc_step_end_with(pqc_step* step, const pqc_layer_rows* layers, uint32_t layer_count,
                             const uint32_t* accepted, const pqc_row_options* options) {
  return RecordedCall(
      "pqc_step_end_with",
      [&](CallRecord& call) {
        call.Closes("step", step)
            .Layers(layers, layer_count)
            .Number("has_accepted", accepted ? 1 : 0);
      },
      [&] { return pqcached::client::EndStep(step, layers, layer_count, accepted, options); });
}

void pqc_step_abandon(pqc_step* step) {
  RecordedClose("pqc_step_abandon", "step", step,
                [&] { const pqcached::client::OwnedStep owned(step); });
}

pqc_status pqc_sequence_flush(pqc_sequence* sequence) {
  return RecordedCall(
      "pqc_sequence_flush", [&](CallRecord& call) { call.Handle("sequence", sequence); },
      [&] { return pqcached::client::Flush(sequence); });
}

}  // extern "C"
