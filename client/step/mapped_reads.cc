// Reads mapped memory.
#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/local/layer_source.h"
#include "client/step/decode.h"
#include "client/step/preparer.h"
#include "client/step/read_backend.h"
#include "client/step/step.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/pages.h"
#include "kvstore/read/reader.h"

namespace pqcached::client {
namespace {

using kvstore::Reader;
using kvstore::Refusal;

// Returns whether only the sidecar can select: it has the plug-ins. `selection` may be null.
bool NeedsRpc(const LayerShape& shape, const kvstore::Selection* selection) {
  return selection && shape.has_index() && kvstore::IsPlugin(selection->index);
}

std::span<const uint32_t> AllOf(const PositionsView& positions, const LayerShape& shape) {
  return {positions.positions, size_t{shape.kv_heads} * positions.count};
}

// Copies what was selected to a caller's struct, with the positions if it has memory for them.
pqc_status CopySelected(uint32_t set_count, const kvstore::SelectedTokens& selected,
                        const uint32_t* positions, pqc_positions* out) {
  out->kv_heads = set_count;
  out->count = selected.count;
  out->sink_tokens = selected.sink_tokens;
  out->window_tokens = selected.window_tokens;
  if (!out->positions) return PQC_OK;
  const uint64_t needed = uint64_t{out->kv_heads} * out->count;
  RETURN_IF_ERROR(CheckCapacity("capacity", out->capacity, needed));
  std::copy_n(positions, needed, out->positions);
  return PQC_OK;
}

class MappedReads final : public ReadBackend {
 public:
  explicit MappedReads(ClientState& client) : client_(client), remote_(MakeRemoteReads(client)) {}

  pqc_status TopK(SequenceState& sequence, const TopKItem& item) override {
    if (NeedsRpc(item.query.shape, item.selection)) return remote_->TopK(sequence, item);
    kvstore::ReadScratchPool::Loan scratch(client_.scratch);
    kvstore::SelectedTokens selected;
    bool leased = true;
    const pqc_status status =
        Read(sequence, item.query.shape, *scratch, &leased, [&](Reader& reader) {
          return reader.TopK(LayerQueryOf(item.query), *item.selection, &selected);
        });
    if (!leased) return remote_->TopK(sequence, item);
    if (status != PQC_OK) return status;
    const LayerShape& shape = item.query.shape;
    return CopySelected(item.selection->SetCount(shape.kv_heads, shape.query_heads), selected,
                        scratch->positions.data(), item.out);
  }

  pqc_status Attend(SequenceState& sequence, const AttendItem& item) override {
    const LayerShape& shape = item.query.shape;
    if (NeedsRpc(shape, item.selection)) return remote_->Attend(sequence, item);
    const bool want_positions = item.selected->positions != nullptr;
    kvstore::ReadScratchPool::Loan scratch(client_.scratch);
    kvstore::SelectedTokens selected;
    bool leased = true;
    const pqc_status status = Read(sequence, shape, *scratch, &leased, [&](Reader& reader) {
      const kvstore::LayerQuery query = LayerQueryOf(item.query);
      if (!item.positions) {
        return reader.Attend(query, *item.selection, want_positions, &selected, item.out);
      }
      selected.count = item.positions->count;
      return reader.AttendPositions(query, AllOf(*item.positions, shape), item.positions->count,
                                    item.out);
    });
    if (!leased) return remote_->Attend(sequence, item);
    if (status != PQC_OK) return status;
    const uint32_t sets = item.positions
                              ? shape.kv_heads
                              : item.selection->SetCount(shape.kv_heads, shape.query_heads);
    return CopySelected(sets, selected,
                        item.positions ? item.positions->positions : scratch->positions.data(),
                        item.selected);
  }

  pqc_status AttendRange(SequenceState& sequence, const AttendRangeItem& item) override {
    kvstore::ReadScratchPool::Loan scratch(client_.scratch);
    bool leased = true;
    const pqc_status status =
        Read(sequence, item.query.shape, *scratch, &leased, [&](Reader& reader) {
          return reader.AttendRange(LayerQueryOf(item.query), item.tokens, item.out);
        });
    return leased ? status : remote_->AttendRange(sequence, item);
  }

  pqc_status Score(SequenceState& sequence, const QueryView& query,
                   const kvstore::IndexDescriptor& index, kvstore::TokenRange tokens,
                   const ScoresOut& out) override {
    if (kvstore::IsPlugin(index)) return remote_->Score(sequence, query, index, tokens, out);
    kvstore::ReadScratchPool::Loan scratch(client_.scratch);
    bool leased = true;
    const pqc_status status = Read(sequence, query.shape, *scratch, &leased, [&](Reader& reader) {
      return reader.Score(LayerQueryOf(query), index, tokens, out);
    });
    return leased ? status : remote_->Score(sequence, query, index, tokens, out);
  }

  pqc_status FetchBlocks(SequenceState& sequence, const FetchView& fetch,
                         kvstore::TokenRange tokens, std::byte* out) override {
    kvstore::ReadScratchPool::Loan scratch(client_.scratch);
    bool leased = true;
    const pqc_status status = Read(sequence, fetch.shape, *scratch, &leased, [&](Reader& reader) {
      return reader.FetchBlocks(fetch.layer, tokens, fetch.part,
                                {out, BytesOf(fetch, tokens.end - tokens.begin)});
    });
    return leased ? status : remote_->FetchBlocks(sequence, fetch, tokens, out);
  }

  pqc_status FetchTokens(SequenceState& sequence, const FetchView& fetch,
                         const PositionsView& positions, std::byte* out) override {
    kvstore::ReadScratchPool::Loan scratch(client_.scratch);
    bool leased = true;
    const pqc_status status = Read(sequence, fetch.shape, *scratch, &leased, [&](Reader& reader) {
      return reader.FetchTokens(fetch.layer, AllOf(positions, fetch.shape), fetch.part,
                                {out, BytesOf(fetch, positions.count)});
    });
    return leased ? status : remote_->FetchTokens(sequence, fetch, positions, out);
  }

  pqc_status Load(SequenceState& sequence, const LoadItem& item) override {
    kvstore::ReadScratchPool::Loan scratch(client_.scratch);
    SeenRows seen{.token_end = item.tokens.end};
    bool leased = true;
    for (const LoadLayer& layer : item.layers) {
      const auto check = [&](Reader& reader, const Pinned&) {
        return reader.CheckStored(layer.to.layer, item.tokens);
      };
      const pqc_status stored = ReadPinned(sequence, layer.shape, *scratch, &leased, check, &seen);
      if (!leased) return remote_->Load(sequence, item);
      RETURN_IF_ERROR(stored);
    }
    for (const LoadLayer& layer : item.layers) {
      RETURN_IF_ERROR(item.sink.Begin(layer, item.tokens.begin));
      pqc_status written = PQC_OK;
      const auto write = [&](Reader& reader, const Pinned& pinned) {
        written = item.sink.SetPool(pinned.image->shared_pool());
        if (written != PQC_OK) return Refusal();
        Refusal refusal = reader.VisitRows(
            layer.to.layer, item.tokens, [&](const kvstore::RowRun& run) { item.sink.Write(run); });
        written = item.sink.Finish();  // while the rows stay, and before they are known to be valid
        return refusal;
      };
      const pqc_status loaded = ReadPinned(sequence, layer.shape, *scratch, &leased, write, &seen);
      if (!leased) {
        const bool is_first = &layer == item.layers.data();  // nothing is written yet
        return is_first ? remote_->Load(sequence, item) : FailBegunLoad(PQC_OUT_OF_RANGE);
      }
      if (loaded != PQC_OK) return FailBegunLoad(loaded);
      RETURN_IF_ERROR(written);
      RETURN_IF_ERROR(item.layer_done());
    }
    return PQC_OK;
  }

  pqc_status Prefetch(SequenceState& sequence, kvstore::TokenRange tokens,
                      const std::function<bool()>& cancelled) override {
    kvstore::ReadScratchPool::Loan scratch(client_.scratch);
    for (const auto& [layer, shape] : sequence.cache->stored_layers) {
      const uint32_t row_bytes = shape.row_bytes;
      const auto populate = [row_bytes](const kvstore::RowRun& run) {
        for (const std::byte* rows : run.rows) {
          kvstore::PopulateForReading({rows, size_t{run.token_count} * row_bytes});
        }
      };
      bool leased = true;
      RETURN_IF_ERROR(Read(sequence, shape, *scratch, &leased, [&, number = layer](Reader& reader) {
        return reader.VisitRows(number, tokens, populate);
      }));
      if (cancelled()) return PQC_OK;
    }
    return PQC_OK;
  }

  pqc_status Begin(const pqc_step& step, StepItem& item, uint64_t* token_count) override {
    LocalSequence& sequence = *item.sequence->local;
    if (!step.no_wait) {
      RETURN_IF_ERROR(PinNewest(sequence, &item.pinned));
    } else if (!TryPinNewest(sequence, &item.pinned)) {
      return client_.preparer->Request(item.sequence, {});
    }
    RETURN_IF_ERROR(sequence.Check(item.pinned.lease_epoch));
    *token_count = sequence.token_count();
    return PQC_OK;
  }

  pqc_status CheckIndex(const pqc_step& step, StepItem& item,
                        const kvstore::IndexDescriptor& index) override {
    uint32_t index_slot = 0;
    if (item.pinned.image->FindIndex(index, &index_slot) == PQC_OK) return PQC_OK;
    if (step.exact_until_indexed) return PQC_OK;
    if (step.no_wait) return client_.preparer->Request(item.sequence, {.index = index});
    RETURN_IF_ERROR(item.sequence->local->Refresh(&item.pinned.image));
    const pqc_status status = item.pinned.image->FindIndex(index, &index_slot);
    if (status == PQC_OK || index != item.sequence->live_index) return status;
    ClearLastError();  // the layers wait until the sidecar has begun the live index
    return PQC_OK;
  }

  pqc_status Wait(const pqc_step& step, const kvstore::Selection& selection, const uint32_t* layer,
                  uint32_t needed, StepItem* item) override {
    return WaitMapped(step, selection, layer, needed, item);
  }

  pqc_status StepTopK(const LayerCall& call) override {
    if (!NeedsRpc(call.shape, call.selection)) return RunGiven(call);
    RETURN_IF_ERROR(CheckRpc(call));
    return remote_->StepTopK(call);
  }

  pqc_status StepAttend(const LayerCall& call, uint32_t* counts) override {
    if (!NeedsRpc(call.shape, call.selection)) return RunAll(call, counts);
    RETURN_IF_ERROR(CheckRpc(call));
    return remote_->StepAttend(call, counts);
  }

  pqc_status StepTopPages(const LayerCall& call) override {
    if (!NeedsRpc(call.shape, call.selection)) return RunGiven(call);
    RETURN_IF_ERROR(CheckRpc(call));
    return remote_->StepTopPages(call);
  }

  pqc_status StepAttendRange(const LayerCall& call) override { return RunGiven(call); }

  pqc_status StepAttendPositions(const LayerCall& call) override { return RunGiven(call); }

  pqc_status StepDecode(const LayerCall& call) override {
    std::vector<StepItem>& items = call.step->items;
    std::vector<OpenedLayer>& opened = call.step->decode.opened;
    const ClearAtEnd clear(opened);  // loans must not outlive the pinned images
    opened.resize(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      const Refusal refusal =
          OpenLayer(items[i].pinned, call.shape, {.layer = call.layer}, &opened[i]);
      if (!refusal.ok()) return PrefixItem(i, FailItem(items[i], FailInStep(refusal)));
      const uint64_t needed = call.step->decode.unstored[i].begin;
      if (opened[i].view.token_count() >= needed) continue;
      return PrefixItem(
          i, FailItem(items[i], Fail(PQC_ABORTED, "", "rows were removed during the step")));
    }
    RETURN_IF_ERROR(AttendToOwnRows(call, opened, threads()));
    for (size_t i = 0; i < items.size(); ++i) {
      const pqc_status status = Check(items[i]);
      if (status != PQC_OK) return PrefixItem(i, status);
    }
    return PQC_OK;
  }

  pqc_status Confirm(const pqc_step& step, const StepItem& item) override {
    LocalSequence& sequence = *item.sequence->local;
    const uint64_t epoch = item.pinned.lease_epoch;
    bool confirmed = false;
    RETURN_IF_ERROR(sequence.CheckInStep(epoch, &confirmed));
    if (confirmed) return PQC_OK;
    if (step.no_wait) return client_.preparer->Request(item.sequence, {});
    SetCallDeadline(step.deadline);
    Pinned next;  // brings the next worker's lease
    RETURN_IF_ERROR(PinNewest(sequence, &next));
    RETURN_IF_ERROR(sequence.CheckInStep(epoch, &confirmed));
    if (confirmed) return PQC_OK;
    return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "the sidecar's worker was replaced"));
  }

 private:
  // Checks what was read for an item so far. Has the next worker's lease acquired, without waiting,
  // when the end of the step will need it.
  pqc_status Check(const StepItem& item) const {
    bool confirmed = false;
    RETURN_IF_ERROR(item.sequence->local->CheckInStep(item.pinned.lease_epoch, &confirmed));
    if (confirmed) return PQC_OK;
    client_.preparer->Request(item.sequence, {});
    ClearLastError();
    return PQC_OK;
  }

  // Reports that a read in a step was refused. The worker's end may be the reason: then the number
  // of readable rows does not rise any more.
  static pqc_status FailItem(const StepItem& item, pqc_status status) {
    if (!item.pinned.image->is_former()) return status;
    return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "the sidecar's worker has ended"));
  }

  struct ClearAtEnd {
    explicit ClearAtEnd(std::vector<OpenedLayer>& layers) : opened(layers) {}
    ~ClearAtEnd() { opened.clear(); }
    ClearAtEnd(const ClearAtEnd&) = delete;
    ClearAtEnd& operator=(const ClearAtEnd&) = delete;
    std::vector<OpenedLayer>& opened;
  };

  static size_t BytesOf(const FetchView& fetch, uint64_t tokens) {
    return fetch.shape.kv_heads * tokens * kvstore::BytesOfPart(fetch.shape, fetch.part).size;
  }

  const kvstore::ParallelFor& threads() const { return client_.local->workers().parallel_for(); }

  // The state of a sequence of which several reads see the first rows.
  struct SeenRows {
    uint64_t token_end = 0;
    bool is_known = false;     // after the first read
    uint64_t lease_epoch = 0;  // of the last read
  };

  // Checks that the rows that were seen are still the same in a lease epoch.
  static pqc_status CheckSeen(const LocalSequence& sequence, uint64_t lease_epoch,
                              const SeenRows& seen) {
    if (!seen.is_known || seen.lease_epoch == lease_epoch) return PQC_OK;
    if (sequence.UnchangedSince(seen.lease_epoch) >= seen.token_end) return PQC_OK;
    return sequence.Check(seen.lease_epoch);
  }

  // Runs read(reader) until the data that it read is known to be valid, and returns its status. If
  // the client's newest image lacks rows or an index, a newer image is fetched once before the call
  // fails. Sets *leased to false when no lease can be acquired.
  template <class ReadRows>
  pqc_status Read(SequenceState& state, const LayerShape& shape, kvstore::ReadScratch& scratch,
                  bool* leased, const ReadRows& read) {
    return ReadPinned(state, shape, scratch, leased,
                      [&](Reader& reader, const Pinned&) { return read(reader); });
  }

  // The same by read(reader, pinned): the rows stay where they are until it returns. With `seen`,
  // the rows are those of the reads before, which had the same `seen` (PQC_ABORTED otherwise).
  template <class ReadRows>
  pqc_status ReadPinned(SequenceState& state, const LayerShape& shape,
                        kvstore::ReadScratch& scratch, bool* leased, const ReadRows& read,
                        SeenRows* seen = nullptr) {
    constexpr int kMaxAttempts = 4;
    LocalSequence& sequence = *state.local;
    const kernels::Exec exec = client_.exec;
    bool refreshed = false;
    for (int attempt = 1;; ++attempt) {
      Pinned pinned;
      if (const pqc_status status = PinNewest(sequence, &pinned); status != PQC_OK) {
        *leased = status != PQC_RESOURCE_EXHAUSTED && status != PQC_UNIMPLEMENTED;
        return status;
      }
      if (seen) RETURN_IF_ERROR(CheckSeen(sequence, pinned.lease_epoch, *seen));
      const pqc_status status = [&] {  // in a scope of its own: a source must not outlive its image
        ImageSource source(pinned, shape);
        Reader reader(source, exec, threads(), scratch);
        const Refusal refusal = read(reader, pinned);
        return refusal.ok() ? PQC_OK : Fail(refusal);
      }();
      const bool lacking = status == PQC_OUT_OF_RANGE || status == PQC_FAILED_PRECONDITION;
      if (lacking && !refreshed) {
        refreshed = true;
        RETURN_IF_ERROR(sequence.Refresh(&pinned.image));
        continue;
      }
      if (status != PQC_OK && status != PQC_ABORTED) return status;
      const pqc_status valid = sequence.Check(pinned.lease_epoch);
      if (valid == PQC_OK && status == PQC_OK) {
        if (seen) *seen = {seen->token_end, true, pinned.lease_epoch};
        return PQC_OK;
      }
      if (valid != PQC_OK && valid != PQC_ABORTED) return valid;
      if (attempt >= kMaxAttempts) return PQC_ABORTED;
    }
  }

  // Runs a call of which the caller knows the counts.
  pqc_status RunGiven(const LayerCall& call) {
    std::vector<uint32_t>& counts = call.step->counts;
    counts.assign(call.step->items.size(), 0);
    return RunAll(call, counts.data());
  }

  // `terms`: of the selection, which not every call has. `query`: of the item or of one of its
  // tokens, whose attention is written to `out`.
  static Refusal ReadItem(const LayerCall& call, const StepItem& item,
                          const kvstore::Selection& terms, const kvstore::LayerQuery& query,
                          const kvstore::AttentionOut& out, Reader& reader,
                          kvstore::SelectedTokens* selected) {
    if (call.ranges) return reader.AttendRange(query, RangeOf(call, item), out);
    if (call.lists) return reader.AttendLists(query, ListsOf(call, item), out);
    if (call.pages) {
      const auto index = static_cast<size_t>(&item - call.step->items.data());
      return reader.TopPages(query, terms, call.pages->terms, call.pages->ListsOf(index));
    }
    if (!call.attends) return reader.TopK(query, terms, selected);
    return reader.Attend(query, terms, /*want_positions=*/false, selected, out);
  }

  // A step that does not wait asks only a worker that serves.
  pqc_status CheckRpc(const LayerCall& call) const {
    return call.step->no_wait ? CheckServed(client_) : PQC_OK;
  }

  // Copies selection `number` of `selections` of an item to the caller's memory.
  static void CopyPositions(const LayerCall& call, StepItem& item, uint32_t number,
                            uint32_t selections) {
    const auto index = static_cast<size_t>(&item - call.step->items.data());
    const std::vector<uint64_t>& offsets = call.step->offsets;
    const uint64_t size = (offsets[index + 1] - offsets[index]) / selections;
    const std::vector<uint32_t>& positions = (*item.scratch)->positions;
    std::copy_n(positions.begin(), std::min<uint64_t>(positions.size(), size),
                call.positions + offsets[index] + number * size);
  }

  // Selects, and attends if asked to, for one item.
  pqc_status RunItem(const LayerCall& call, StepItem& item, const kvstore::ParallelFor& parallel,
                     uint32_t* count) {
    if (SkipsSelection(call, item)) return PQC_OK;
    const kvstore::Selection* terms = &call.step->selection;
    const bool given = call.ranges || call.lists;
    if (!given) RETURN_IF_ERROR(PickTerms(call, &item, &terms));
    ImageSource source(item.pinned, call.shape);
    const kernels::Exec exec = client_.exec;
    Reader reader(source, exec, parallel, **item.scratch);
    kvstore::SelectedTokens selected;
    const uint32_t selections = SelectionCount(call, item, *terms);
    for (uint32_t i = 0; i < selections; ++i) {
      const QueryView query = selections == 1 ? QueryOf(call, item) : TokenQueryOf(call, item, i);
      const Refusal refusal = ReadItem(call, item, *terms, LayerQueryOf(query, call.has_logits),
                                       OutOf(call, item, i), reader, &selected);
      if (!refusal.ok()) return FailItem(item, FailInStep(refusal));
      if (call.positions) CopyPositions(call, item, i, selections);
      *count = std::max(*count, selected.count);  // of one token at a time, the largest
    }
    return Check(item);
  }

  // Runs all items: many items in parallel, one thread each; few items one after the other, each
  // on all threads.
  pqc_status RunAll(const LayerCall& call, uint32_t* counts) {
    std::vector<StepItem>& items = call.step->items;
    if (items.size() == 1 || items.size() < client_.local->workers().worker_count()) {
      for (size_t i = 0; i < items.size(); ++i) {
        const pqc_status status = RunItem(call, items[i], threads(), &counts[i]);
        if (status != PQC_OK) return PrefixItem(i, status);
      }
      return PQC_OK;
    }
    const kvstore::ParallelFor serial = kvstore::SerialFor();
    base::Mutex mutex;
    size_t failed = items.size();
    pqc_status failure = PQC_OK;
    RefusalBuffer reason;
    const auto run = [&](uint32_t i, uint32_t) {
      const pqc_status status = Call([&] { return RunItem(call, items[i], serial, &counts[i]); });
      if (status == PQC_OK) return;
      const base::MutexLock lock(&mutex);
      if (i >= failed) return;
      failed = i;
      failure = status;
      reason = LastRefusal();
    };
    // std::cref avoids a copy, which would allocate.
    threads().run(static_cast<uint32_t>(items.size()), std::cref(run));
    if (failure == PQC_OK) return PQC_OK;
    Fail(failure, reason);
    return PrefixItem(failed, failure);
  }

  ClientState& client_;
  const std::unique_ptr<ReadBackend> remote_;  // for sequences without a lease
};

}  // namespace

std::unique_ptr<ReadBackend> MakeMappedReads(ClientState& client) {
  return std::make_unique<MappedReads>(client);
}

}  // namespace pqcached::client
