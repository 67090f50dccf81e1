// Reads by RPCs.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/step/decode.h"
#include "client/step/preparer.h"
#include "client/step/read_backend.h"
#include "client/step/sender.h"
#include "client/step/step.h"
#include "kernels/attend/merge.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

// A poll takes an answer that is not older than this for what the sidecar knows now.
constexpr std::chrono::seconds kAnswerIsRecent(1);

constexpr uint32_t kTopPagesVersion = 14;  // of Remote
constexpr uint32_t kRerankVersion = 15;    // of Remote
constexpr uint32_t kPerQueryHeadVersion = 18;
constexpr uint32_t kTailVersion = 21;
constexpr uint32_t kMassVersion = 21;

pqc_status WaitAllStored(const LayerCall& call) {
  for (size_t i = 0; i < call.step->items.size(); ++i) {
    const pqc_status status = WaitReady(*call.step, *call.selection, nullptr, &call.step->items[i]);
    if (status != PQC_OK) return PrefixItem(i, status);
  }
  return PQC_OK;
}

// Repeats a call while the layer's index is being built. `names` are those of Report.
template <typename Ask>
pqc_status UntilIndexed(const pqc_step& step, Ask ask,
                        std::initializer_list<HeaderName> names = {}) {
  constexpr auto kLongestPause = std::chrono::milliseconds(5);
  auto pause = std::chrono::milliseconds(1);
  for (;;) {
    RefusalBuffer error;
    const pqc_status status = ask(&error);
    if (status != PQC_ABORTED) return Report(status, error, names);
    if (StepClock::now() + pause >= step.deadline) {
      for (const StepItem& item : step.items) {
        if (step.no_wait) {
          CloseAgainLater(*item.sequence);
        } else {
          item.sequence->OpenPrefill();
        }
      }
      return SetRetry(kRetryConflict, Fail(PQC_DEADLINE_EXCEEDED, error));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

// Query tokens of an item that share a selection: an item of an rpc.
struct QueryPart {
  size_t item = 0;          // of the step
  uint32_t number = 0;      // among the item's selections: the first token in the item
  uint32_t selections = 1;  // of the item
  QueryView query = {};
};

// Returns the parts of all items for which the call selects, in order.
std::vector<QueryPart> PartsOf(const LayerCall& call) {
  std::vector<QueryPart> parts;
  std::vector<StepItem>& items = call.step->items;
  for (size_t i = 0; i < items.size(); ++i) {
    if (SkipsSelection(call, items[i])) continue;
    const uint32_t selections = SelectionCount(call, items[i], *call.selection);
    for (uint32_t j = 0; j < selections; ++j) {
      parts.push_back(
          {i, j, selections,
           selections == 1 ? QueryOf(call, items[i]) : TokenQueryOf(call, items[i], j)});
    }
  }
  return parts;
}

// Replaces the number in the field "items[k]..." of a refused call by that of the step's item of
// parts[k].
void RenumberItem(const std::vector<QueryPart>& parts, RefusalBuffer* error) {
  constexpr std::string_view kItems = "items[";
  const std::string field = error->field;
  if (!field.starts_with(kItems)) return;
  size_t number = parts.size();
  const auto end =
      std::from_chars(field.data() + kItems.size(), field.data() + field.size(), number).ptr;
  if (number >= parts.size()) return;
  const std::string renumbered = std::string(kItems) + std::to_string(parts[number].item) + end;
  const std::string text = error->text;
  SetRefusal(error, renumbered.c_str(), text.c_str());
}

class RemoteReads final : public ReadBackend {
 public:
  explicit RemoteReads(ClientState& client) : client_(client) {}

  pqc_status TopK(SequenceState&, const TopKItem& item) override {
    RETURN_IF_ERROR(CheckSendable(*item.selection));
    RefusalBuffer error;
    return Report(remote().TopK(&item, 1, &error), error, {{"items[0]", ""}});
  }

  pqc_status Attend(SequenceState&, const AttendItem& item) override {
    if (item.selection) RETURN_IF_ERROR(CheckSendable(*item.selection));
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
    RETURN_IF_ERROR(client::CheckSendable(index, "index", client_.remote_version));
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

  pqc_status Load(SequenceState& sequence, const LoadItem& item) override {
    return LoadByRpc(remote(), client_.remote_version, sequence.sequence_id, item);
  }

  pqc_status Prefetch(SequenceState&, kvstore::TokenRange, const std::function<bool()>&) override {
    return PQC_OK;
  }

  pqc_status Begin(const pqc_step& step, StepItem& item, uint64_t* token_count) override {
    SequenceState& sequence = *item.sequence;
    if (step.no_wait && sequence.token_count >= item.query_position) {
      // An answer that a poll has not used says nothing about a later position.
      const base::MutexLock lock(&sequence.preparation.mutex);
      sequence.preparation.described_at = {};
    }
    if (sequence.token_count < item.query_position) {  // other calls may have added rows
      if (step.no_wait) return BeginByPolling(item, token_count);
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
    // The RPC that follows waits for the next worker where there is none.
    if (step.no_wait) RETURN_IF_ERROR(CheckServed(client_));
    return client_.sender->WaitStored(*item->sequence, needed, step.deadline);
  }

  pqc_status StepTopK(const LayerCall& call) override {
    RETURN_IF_ERROR(CheckSendable(*call.selection));
    RETURN_IF_ERROR(WaitAllStored(call));
    const std::vector<QueryPart> parts = PartsOf(call);
    std::vector<pqc_positions> outs(parts.size(), pqc_positions{});
    std::vector<TopKItem> selects(parts.size());
    const std::vector<uint64_t>& offsets = call.step->offsets;
    for (size_t i = 0; i < parts.size(); ++i) {
      const QueryPart& part = parts[i];
      outs[i].capacity = (offsets[part.item + 1] - offsets[part.item]) / part.selections;
      outs[i].positions = call.positions + offsets[part.item] + part.number * outs[i].capacity;
      selects[i] = {part.query, call.selection, &outs[i]};
    }
    return UntilIndexed(*call.step, [&](RefusalBuffer* error) {
      const pqc_status status =
          remote().TopK(selects.data(), static_cast<uint32_t>(selects.size()), error);
      if (status != PQC_OK) RenumberItem(parts, error);
      for (size_t i = 0; i < parts.size(); ++i) call.step->counts[parts[i].item] = outs[i].count;
      return status;
    });
  }

  pqc_status StepTopPages(const LayerCall& call) override {
    RETURN_IF_ERROR(WaitAllStored(call));
    if (client_.remote_version < kTopPagesVersion) {
      return Fail(PQC_UNIMPLEMENTED, "",
                  "libpqcached_rpc is older than pages on the remote path; install the library of "
                  "the client's release");
    }
    std::vector<QueryPart> parts;
    std::vector<TopPagesItem> selects;
    for (size_t i = 0; i < call.step->items.size(); ++i) {
      StepItem& item = call.step->items[i];
      kvstore::PageScratch& scratch = (*item.scratch)->pages;  // with the plan of this call
      if (scratch.plan.takes_all()) {
        ListPlannedPages(call, i, &scratch);
        continue;
      }
      parts.push_back({.item = i, .number = 0, .selections = 1, .query = QueryOf(call, item)});
      selects.push_back({.query = parts.back().query,
                         .selection = call.selection,
                         .terms = call.pages->terms,
                         .out = call.pages->ListsOf(i),
                         .length = scratch.plan.length()});
    }
    if (selects.empty()) return PQC_OK;
    return UntilIndexed(*call.step, [&](RefusalBuffer* error) {
      const pqc_status status =
          remote().TopPages(selects.data(), static_cast<uint32_t>(selects.size()), error);
      if (status != PQC_OK) RenumberItem(parts, error);
      return status;
    });
  }

  pqc_status StepAttend(const LayerCall& call, uint32_t* counts) override {
    RETURN_IF_ERROR(CheckSendable(*call.selection));
    const std::vector<StepItem>& items = call.step->items;
    RETURN_IF_ERROR(WaitAllStored(call));
    const std::vector<QueryPart> parts = PartsOf(call);
    std::vector<pqc_positions> selected(parts.size(), pqc_positions{});
    std::vector<AttendItem> attends(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      attends[i] = {.query = parts[i].query,
                    .selection = call.selection,
                    .out = OutOf(call, items[parts[i].item], parts[i].number),
                    .selected = &selected[i]};
    }
    const kvstore::Selection all = AllCandidates(*call.selection);
    bool takes_all = false;
    const pqc_status status = UntilIndexed(*call.step, [&](RefusalBuffer* error) {
      const auto attend = [&] {
        const pqc_status attended =
            remote().Attend(attends.data(), static_cast<uint32_t>(attends.size()), error);
        if (attended != PQC_OK) RenumberItem(parts, error);
        return attended;
      };
      const pqc_status by_index = attend();
      const bool lacks_index = by_index == PQC_ABORTED || by_index == PQC_FAILED_PRECONDITION;
      if (!call.step->exact_until_indexed || takes_all || !lacks_index) return by_index;
      for (AttendItem& attend_item : attends) attend_item.selection = &all;
      takes_all = true;
      return attend();
    });
    for (size_t i = 0; i < parts.size(); ++i) {  // of one token at a time, the largest
      counts[parts[i].item] = std::max(counts[parts[i].item], selected[i].count);
    }
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

  pqc_status StepDecode(const LayerCall& call) override {
    RETURN_IF_ERROR(AttendToStored(call));
    return AttendToOwnRows(call, {}, kvstore::SerialFor());
  }

  pqc_status StepAttendPositions(const LayerCall& call) override {
    return AttendListsByRpc(remote(), call);
  }

  pqc_status Confirm(const pqc_step&, const StepItem&) override { return PQC_OK; }

 private:
  Remote& remote() const { return *client_.remote; }

  // An older library would leave a part of the selection out.
  pqc_status CheckSendable(const kvstore::Selection& selection) const {
    RETURN_IF_ERROR(
        client::CheckSendable(selection.index, "selection.index", client_.remote_version));
    if (selection.per_query_head && client_.remote_version < kPerQueryHeadVersion) {
      return Fail(PQC_UNIMPLEMENTED, "selection.group_rule",
                  "libpqcached_rpc is older than sets per query head on the remote path; install "
                  "the library of the client's release");
    }
    if (selection.budget_kind == kvstore::BudgetKind::kMass &&
        client_.remote_version < kMassVersion) {
      return Fail(PQC_UNIMPLEMENTED, "selection.attention_mass",
                  "libpqcached_rpc is older than budgets of attention mass on the remote path; "
                  "install the library of the client's release");
    }
    if (selection.tail_estimate && client_.remote_version < kTailVersion) {
      return Fail(PQC_UNIMPLEMENTED, "selection.tail_estimate",
                  "libpqcached_rpc is older than tail estimates on the remote path; install the "
                  "library of the client's release");
    }
    if (selection.rerank_factor == 1.0f || client_.remote_version >= kRerankVersion) return PQC_OK;
    return Fail(PQC_UNIMPLEMENTED, "selection.rerank_factor",
                "libpqcached_rpc is older than re-ranking on the remote path; install the library "
                "of the client's release");
  }

  // Has the number of tokens fetched in the background, and uses a recent answer once.
  pqc_status BeginByPolling(StepItem& item, uint64_t* token_count) {
    Preparation& preparation = item.sequence->preparation;
    {
      const base::MutexLock lock(&preparation.mutex);
      const auto asked_at = std::exchange(preparation.described_at, {});
      if (asked_at != DeadlineClock::time_point() &&
          DeadlineClock::now() - asked_at < kAnswerIsRecent) {
        *token_count = item.sequence->token_count;
        return PQC_OK;
      }
    }
    return client_.preparer->Request(item.sequence, {.token_count = true});
  }

  // Adds the stored ranges of query tokens of items[i].
  static void AddStored(const LayerCall& call, size_t i, const DecodeState::Part& own,
                        std::vector<AttendRangeItem>* attends, std::vector<QueryPart>* parts) {
    const DecodeState& state = call.step->decode;
    const StepItem& item = call.step->items[i];
    const QueryView query = own.token_count == item.query_length
                                ? QueryOf(call, item)
                                : TokenQueryOf(call, item, own.token);
    for (size_t j = own.ranges_begin; j < own.ranges_end; ++j) {
      const kvstore::TokenRange stored = {
          state.ranges[j].begin, std::min<uint64_t>(state.ranges[j].end, state.unstored[i].begin)};
      if (stored.begin >= stored.end) continue;
      attends->push_back({.query = query, .tokens = stored, .out = {}});
      parts->push_back({.item = i, .number = own.token, .selections = 1, .query = query});
    }
  }

  // Attends to the stored rows of sink and window, and merges into the step's packed results.
  pqc_status AttendToStored(const LayerCall& call) {
    DecodeState& state = call.step->decode;
    const std::vector<StepItem>& items = call.step->items;
    const LayerShape& shape = call.shape;
    std::vector<AttendRangeItem> attends;
    std::vector<QueryPart> parts;  // of `attends`
    for (size_t i = 0; i < items.size(); ++i) {
      for (size_t j = state.own[i].parts_begin; j < state.own[i].parts_end; ++j) {
        AddStored(call, i, state.parts[j], &attends, &parts);
      }
    }
    if (attends.empty()) return PQC_OK;
    size_t rows = 0;
    for (const QueryPart& part : parts) rows += part.query.queries.shape[0] * shape.query_heads;
    std::vector<float> output(rows * shape.value_dim), lse(rows);
    rows = 0;
    for (size_t i = 0; i < attends.size(); ++i) {
      attends[i].out = kvstore::AttentionOut::Packed(&output[rows * shape.value_dim], &lse[rows],
                                                     shape.query_heads, shape.value_dim);
      rows += parts[i].query.queries.shape[0] * shape.query_heads;
    }
    RefusalBuffer error;
    const pqc_status status =
        remote().AttendRange(attends.data(), static_cast<uint32_t>(attends.size()), &error);
    if (status != PQC_OK) RenumberItem(parts, &error);
    RETURN_IF_ERROR(Report(status, error));
    for (size_t i = 0; i < attends.size(); ++i) {
      const StepItem& item = items[parts[i].item];
      const size_t row = (item.query_begin + parts[i].number) * shape.query_heads;
      const auto count = static_cast<uint32_t>(parts[i].query.queries.shape[0] * shape.query_heads);
      float* const to = &state.output[row * shape.value_dim];
      const kernels::Partial partials[] = {{to, &state.lse[row]},
                                           {reinterpret_cast<float*>(attends[i].out.output),
                                            reinterpret_cast<float*>(attends[i].out.lse)}};
      kernels::MergePartials(kernels::Exec{}, {.query_count = count,
                                               .value_dim = shape.value_dim,
                                               .partials = partials,
                                               .output = {to, size_t{count} * shape.value_dim},
                                               .lse = {&state.lse[row], count}});
    }
    return PQC_OK;
  }

  // Writes the lists of an item whose selection takes all pages, which needs no scores.
  static void ListPlannedPages(const LayerCall& call, size_t i, kvstore::PageScratch* scratch) {
    kvstore::SelectPages(kernels::Exec{},
                         {.kv_heads = call.shape.kv_heads,
                          .terms = call.pages->terms,
                          .candidates = {},
                          .logits = {}},
                         kvstore::SerialFor(), scratch, call.pages->ListsOf(i));
  }

  ClientState& client_;
};

}  // namespace

std::unique_ptr<ReadBackend> MakeRemoteReads(ClientState& client) {
  return std::make_unique<RemoteReads>(client);
}

}  // namespace pqcached::client
