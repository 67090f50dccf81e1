// Reads by RPCs.
#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "client/base/error.h"
#include "client/step/read_backend.h"
#include "client/step/sender.h"
#include "client/step/step.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

pqc_status WaitAllStored(const LayerCall& call) {
  for (size_t i = 0; i < call.step->items.size(); ++i) {
    const pqc_status status = WaitReady(*call.step, *call.selection, nullptr, &call.step->items[i]);
    if (status != PQC_OK) return PrefixItem(i, status);
  }
  return PQC_OK;
}

// Repeats a call while the layer's index is being built.
template <typename Ask>
pqc_status UntilIndexed(const pqc_step& step, Ask ask) {
  constexpr auto kLongestPause = std::chrono::milliseconds(5);
  auto pause = std::chrono::milliseconds(1);
  for (;;) {
    RefusalBuffer error;
    const pqc_status status = ask(&error);
    if (status != PQC_ABORTED) return Report(status, error);
    if (StepClock::now() + pause >= step.deadline) {
      for (const StepItem& item : step.items) item.sequence->OpenPrefill();
      return SetRetry(kRetryConflict, Fail(PQC_DEADLINE_EXCEEDED, error));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

class RemoteReads final : public ReadBackend {
 public:
  explicit RemoteReads(ClientState& client) : client_(client) {}

  pqc_status TopK(SequenceState&, const TopKItem& item) override {
    RefusalBuffer error;
    return Report(remote().TopK(&item, 1, &error), error, {{"items[0]", ""}});
  }

  pqc_status Attend(SequenceState&, const AttendItem& item) override {
    RefusalBuffer error;
    return Report(remote().Attend(&item, 1, &error), error,
                  {{"items[0].positions.positions", "positions"},
                   {"items[0].positions.count", "count"},
                   {"items[0]", ""}});
  }

  pqc_status AttendRange(SequenceState&, const AttendRangeItem& item) override {
    RefusalBuffer error;
    return Report(remote().AttendRange(&item, 1, &error), error, {{"items[0]", ""}});
  }

  pqc_status Score(SequenceState&, const QueryView& query, const kvstore::IndexDescriptor& index,
                   kvstore::TokenRange tokens, const ScoresOut& out) override {
    RefusalBuffer error;
    return Report(remote().Score(query, index, tokens, out, &error), error, {{"items[0]", ""}});
  }

  pqc_status FetchBlocks(SequenceState&, const FetchView& fetch, kvstore::TokenRange tokens,
                         std::byte* out) override {
    RefusalBuffer error;
    return Report(remote().FetchBlocks(fetch, tokens, out, &error), error,
                  {{"ranges[0]", "tokens"}});
  }

  pqc_status FetchTokens(SequenceState&, const FetchView& fetch, const PositionsView& positions,
                         std::byte* out) override {
    RefusalBuffer error;
    return Report(remote().FetchTokens(fetch, positions, out, &error), error);
  }

  pqc_status Begin(const pqc_step&, StepItem& item, uint64_t* token_count) override {
    SequenceState& sequence = *item.sequence;
    if (sequence.token_count < item.query_position) {  // other calls may have added rows
      pqc_sequence_info info = PQC_INIT(pqc_sequence_info);
      RefusalBuffer error;
      const pqc_status status = remote().DescribeSequence(sequence.sequence_id, &info, &error);
      if (status != PQC_OK) return Report(status, error);
      sequence.token_count = info.token_count;
    }
    *token_count = sequence.token_count;
    return PQC_OK;
  }

  pqc_status CheckIndex(const pqc_step&, StepItem&, const kvstore::IndexDescriptor&) override {
    return PQC_OK;
  }

  pqc_status Wait(const pqc_step& step, const kvstore::Selection&, const uint32_t*, uint32_t needed,
                  StepItem* item) override {
    return client_.sender->WaitStored(*item->sequence, needed, step.deadline);
  }

  pqc_status StepTopK(const LayerCall& call, const uint64_t* offsets,
                      uint32_t* positions) override {
    const std::vector<StepItem>& items = call.step->items;
    RETURN_IF_ERROR(WaitAllStored(call));
    std::vector<pqc_positions> outs(items.size(), pqc_positions{});
    std::vector<TopKItem> selects(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      outs[i].positions = positions + offsets[i];
      outs[i].capacity = offsets[i + 1] - offsets[i];
      selects[i] = {QueryOf(call, items[i]), call.selection, &outs[i]};
    }
    return UntilIndexed(*call.step, [&](RefusalBuffer* error) {
      return remote().TopK(selects.data(), static_cast<uint32_t>(selects.size()), error);
    });
  }

  pqc_status StepAttend(const LayerCall& call, uint32_t* counts) override {
    const std::vector<StepItem>& items = call.step->items;
    RETURN_IF_ERROR(WaitAllStored(call));
    std::vector<pqc_positions> selected(items.size(), pqc_positions{});
    std::vector<AttendItem> attends(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      attends[i] = {.query = QueryOf(call, items[i]),
                    .selection = call.selection,
                    .out = OutOf(call, items[i]),
                    .selected = &selected[i]};
    }
    const kvstore::Selection all = AllCandidates(*call.selection);
    bool takes_all = false;
    const pqc_status status = UntilIndexed(*call.step, [&](RefusalBuffer* error) {
      const auto attend = [&] {
        return remote().Attend(attends.data(), static_cast<uint32_t>(attends.size()), error);
      };
      const pqc_status by_index = attend();
      const bool lacks_index = by_index == PQC_ABORTED || by_index == PQC_FAILED_PRECONDITION;
      if (!call.step->exact_until_indexed || takes_all || !lacks_index) return by_index;
      for (AttendItem& attend_item : attends) attend_item.selection = &all;
      takes_all = true;
      return attend();
    });
    for (size_t i = 0; i < items.size(); ++i) counts[i] = selected[i].count;
    return status;
  }

  pqc_status StepAttendRange(const LayerCall& call) override {
    const std::vector<StepItem>& items = call.step->items;
    std::vector<AttendRangeItem> attends(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      attends[i] = {.query = QueryOf(call, items[i]),
                    .tokens = RangeOf(call, items[i]),
                    .out = OutOf(call, items[i])};
    }
    RefusalBuffer error;
    return Report(
        remote().AttendRange(attends.data(), static_cast<uint32_t>(attends.size()), &error), error);
  }

  pqc_status Check(const StepItem&) override { return PQC_OK; }

 private:
  Remote& remote() const { return *client_.remote; }

  ClientState& client_;
};

}  // namespace

std::unique_ptr<ReadBackend> MakeRemoteReads(ClientState& client) {
  return std::make_unique<RemoteReads>(client);
}

}  // namespace pqcached::client
