#include "kvstore/index/builder.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/status_macros.h"
#include "kvstore/checksum/verify.h"
#include "kvstore/clock.h"
#include "kvstore/index/layer_build.h"
#include "kvstore/index/merge.h"
#include "kvstore/index/shrink.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kMaxBuildIterations = 1000;
constexpr double kMaxDrift = 1e6;
constexpr absl::Duration kLastStep = absl::Seconds(10);  // most time for a step of a live index
constexpr uint32_t kLeastDriftedTokens = 128;            // of a segment whose drift is measured

absl::Status CheckSpec(const Cache& cache, const BuildSpec& spec) {
  RETURN_IF_ERROR(CheckNeedsBuild(spec.index, "index"));
  RETURN_IF_ERROR(CheckIndexOf(cache, spec.index, "index"));
  if (!(spec.rebuild_drift >= 0 && spec.rebuild_drift <= kMaxDrift)) {
    return InvalidArgument("rebuild.drift_ratio",
                           absl::StrCat(spec.rebuild_drift, ", must lie in [0, ", kMaxDrift, "]"));
  }
  if (spec.iterations > kMaxBuildIterations) {
    return InvalidArgument(
        "iterations", absl::StrCat(spec.iterations, ", must be at most ", kMaxBuildIterations));
  }
  return absl::OkStatus();
}

// Checks that all layers hold the same number of tokens.
absl::Status CheckTokens(const Cache& cache, const Snapshot& base) {
  for (uint32_t slot = 1; slot < cache.layers.size(); ++slot) {
    if (base.layer_tokens[slot] == base.layer_tokens[0]) continue;
    return FailedPrecondition(
        "sequence_id", absl::StrCat("layer ", cache.layers.layers[slot].layer, " holds ",
                                    base.layer_tokens[slot], " tokens; layer ",
                                    cache.layers.layers[0].layer, " holds ", base.layer_tokens[0]));
  }
  if (base.token_count() == 0)
    return FailedPrecondition("sequence_id", "the sequence has no tokens");
  return absl::OkStatus();
}

absl::Status CheckSequence(const Cache& cache, const Snapshot& base, const BuildSpec& spec) {
  const std::vector<IndexDescriptor>& indexes = base.list->indexes;
  if (const size_t found = base.list->Find(spec.index); found < indexes.size()) {
    const std::string name = absl::StrCat("index ", NameOf(spec.index));
    if (base.list->index_ready(found)) {
      return spec.rebuild ? CheckTokens(cache, base)
                          : AlreadyExists("index", absl::StrCat("the sequence has ", name));
    }
    return Aborted("index", absl::StrCat("a build of ", name, " is in progress"), kRetryMemory);
  }
  if (indexes.size() >= kMaxIndexes) {
    return ResourceExhausted(
        "index", absl::StrCat("a sequence has at most ", kMaxIndexes, " indexes"), kNoRetry);
  }
  return CheckTokens(cache, base);
}

// Returns whether the sequence has the index, ready in all segments.
bool IsReady(const SegmentList& list, const IndexDescriptor& index) {
  const size_t found = list.Find(index);
  return found < list.indexes.size() && list.index_ready(found);
}

// Returns whether the keys of a segment in one layer have drifted from those of its codebook.
bool IsDrifted(const Cache& cache, const BuildSpec& spec, const SegmentTokens& segment,
               const SegmentIndex& index, uint32_t layer_slot) {
  const Codebook& codebook = *index.codebook(layer_slot);
  const LayerTraining training{.layer_slot = layer_slot,
                               .index = spec.index,
                               .segments = {&segment, 1},
                               .sink_tokens = spec.sink_tokens,
                               .seed = spec.seed,
                               .keep_going = {}};
  return HasDrifted(MeasureLayer(cache, training, codebook), codebook, spec.rebuild_drift);
}

// Returns whether keys of a segment have drifted in any layer, or why it cannot be said.
absl::StatusOr<bool> IsDrifted(const Cache& cache, const Snapshot& base, const BuildSpec& spec,
                               const SegmentEntry& entry, const BuildClock& clock) {
  const SegmentIndex& index = *entry.indexes[base.list->Find(spec.index)];
  const uint32_t begin = std::max(entry.rows->first_position(), spec.sink_tokens);
  for (uint32_t slot = 0; slot < cache.layers.size(); ++slot) {
    if (!cache.layers.layers[slot].shape.has_index()) continue;
    if (spec.is_cancelled && spec.is_cancelled()) return Cancelled("the build was cancelled");
    if (clock() >= spec.deadline) {
      return DeadlineExceeded("", "the deadline passed while drift was measured");
    }
    const uint32_t tokens = base.layer_tokens[slot];
    const uint32_t end = entry.closed ? std::min(entry.token_end, tokens) : tokens;
    // A mean over few rows says nothing about the others.
    if (end < begin + kLeastDriftedTokens) continue;
    const SegmentTokens segment{entry.rows, {entry.rows->first_position(), end}};
    if (IsDrifted(cache, spec, segment, index, slot)) return true;
  }
  return false;
}

// One rebuild at a time of a sequence.
class Rebuilding {
 public:
  explicit Rebuilding(const Sequence& sequence)
      : sequence_(sequence), holds_(!sequence.rebuilding().exchange(true)) {}
  ~Rebuilding() {
    if (holds_) sequence_.rebuilding().store(false);
  }
  Rebuilding(const Rebuilding&) = delete;
  Rebuilding& operator=(const Rebuilding&) = delete;

  bool holds() const { return holds_; }

 private:
  const Sequence& sequence_;
  const bool holds_;
};

// Closes the open segment of a first prefill, so that its incremental index codes it, and adds the
// index to the sequence, so that readers wait for it.
absl::Status ClosePrefill(const Cache& cache, const IndexDescriptor& index,
                          const WriteLease& lease) {
  Sequence& sequence = lease.sequence();
  ASSIGN_OR_RETURN(const auto base, sequence.Read());
  RETURN_IF_ERROR(CheckTokens(cache, *base));
  RETURN_IF_ERROR(sequence.PublishIndex(index, {}));
  // An active segment of a later turn is coded under the existing codebooks while it is open.
  return base->list->prefill_closed ? absl::OkStatus() : sequence.CloseActiveSegment();
}

}  // namespace

absl::Status BuildSequenceIndex(const Cache& cache, IncrementalIndexer& live, WriteLease lease,
                                const BuildSpec& spec,
                                const std::function<bool(const BuildProgress&)>& progress,
                                const BuildClock& clock) {
  RETURN_IF_ERROR(CheckSpec(cache, spec));
  const std::shared_ptr<Sequence> sequence = lease.shared_sequence();
  ASSIGN_OR_RETURN(const auto base, sequence->Read());
  RETURN_IF_ERROR(VerifyList(cache, *base->list));
  const bool replaces = spec.rebuild && IsReady(*base->list, spec.index);
  const auto live_spec = live.SpecOf(sequence->sequence_id());
  const bool is_live = live_spec.has_value() && live_spec->index == spec.index;
  if (is_live && !replaces) {
    // A call that finds the index complete trains nothing, unless it is the first one.
    const bool was_ready =
        IsReady(*base->list, spec.index) && sequence->BuiltTokens(spec.index) > 0;
    RETURN_IF_ERROR(CheckSamples(cache, *base, spec.index, /*has_first=*/true, "index"));
    RETURN_IF_ERROR(ClosePrefill(cache, spec.index, lease));
    if (!was_ready) sequence->BeginBuild(spec.index, base->token_count());
    { const WriteLease done = std::move(lease); }  // lets writers append again
    if (was_ready) return live.Finish(cache, *sequence, spec, progress);  // nothing is trained
    absl::Status finished = live.Finish(cache, *sequence, spec, progress);
    sequence->EndBuild(spec.index, finished.ok());
    return finished;
  }
  RETURN_IF_ERROR(CheckSequence(cache, *base, spec));
  RETURN_IF_ERROR(CheckSamples(cache, *base, spec.index, replaces, "index"));
  std::optional<Rebuilding> rebuilding;
  if (replaces) {
    rebuilding.emplace(*sequence);
    if (!rebuilding->holds()) {
      return Aborted("index", "a rebuild of the sequence is in progress", kRetryMemory);
    }
  }
  if (clock() >= spec.deadline) {
    return DeadlineExceeded("", "the deadline passed before the build began");
  }
  // Merges would replace the segments that are being coded. New segments of a live index get the
  // codes of the index that is being replaced meanwhile.
  using Pause = IncrementalIndexer::Pause;
  const uint64_t sequence_id = sequence->sequence_id();
  const Pause pause(live, sequence_id, spec.deadline,
                    replaces ? Pause::Of::kUpkeep : Pause::Of::kAll);
  if (!pause.holds()) {
    return DeadlineExceeded("", "the deadline passed while another index of it was being built");
  }
  ASSIGN_OR_RETURN(const auto quiet, sequence->Read());
  if (replaces && !IsReady(*quiet->list, spec.index)) {
    return Aborted("index", "rows without codes came before the rebuild began", kRetryConflict);
  }
  Build build(cache, sequence, quiet, spec, replaces, progress, clock);
  RETURN_IF_ERROR(build.Allocate());
  RETURN_IF_ERROR(sequence->CloseActiveSegment());
  RETURN_IF_ERROR(sequence->PublishIndex(spec.index, {}));
  sequence->BeginBuild(spec.index, quiet->token_count());
  { const WriteLease done = std::move(lease); }  // lets writers append again
  absl::Status status = build.Run();
  std::optional<Pause> last;
  if (status.ok()) {
    // The build is done, and its deadline may have passed: one step of the live index may end.
    last.emplace(live, sequence_id, std::max(spec.deadline, clock() + kLastStep));
    status = last->holds()
                 ? build.CatchUp()
                 : DeadlineExceeded("", "new rows were still being coded at the deadline");
  }
  sequence->EndBuild(spec.index, status.ok());
  if (!status.ok()) {
    if (!replaces) sequence->RemoveIndex(spec.index).IgnoreError();  // it may be dropped
    return status;
  }
  if (is_live) live.Restart(sequence_id);
  rebuilding.reset();  // ShrinkSegments leaves a sequence alone that is being rebuilt
  ShrinkSegments(cache, sequence);
  return absl::OkStatus();
}

absl::Status CheckRebuildDue(const Cache& cache, const Sequence& sequence, const BuildSpec& spec,
                             const BuildClock& clock) {
  if (!spec.rebuild || (spec.rebuild_drift == 0 && spec.rebuild_tokens == 0)) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(CheckSpec(cache, spec));
  ASSIGN_OR_RETURN(const auto base, sequence.Read());
  if (!IsReady(*base->list, spec.index)) return absl::OkStatus();
  const uint64_t new_tokens =
      base->token_count() - std::min(base->token_count(), sequence.BuiltTokens(spec.index));
  if (spec.rebuild_tokens > 0 && new_tokens >= spec.rebuild_tokens) return absl::OkStatus();
  if (spec.rebuild_drift > 0) {
    RETURN_IF_ERROR(VerifyList(cache, *base->list));
    for (const SegmentEntry& entry : base->list->segments) {
      ASSIGN_OR_RETURN(const bool drifted, IsDrifted(cache, *base, spec, entry, clock));
      if (drifted) return absl::OkStatus();
    }
  }
  const std::string drift = spec.rebuild_drift > 0
                                ? absl::StrCat(", and no keys have drifted by ", spec.rebuild_drift)
                                : std::string();
  const std::string tokens =
      spec.rebuild_tokens > 0
          ? absl::StrCat(", and ", new_tokens, " tokens are new, fewer than ", spec.rebuild_tokens)
          : std::string();
  return AlreadyExists(spec.rebuild_drift > 0 ? "rebuild.drift_ratio" : "rebuild.new_tokens",
                       absl::StrCat("the sequence has index ", NameOf(spec.index), drift, tokens));
}

absl::Status CloseSequencePrefill(const Cache& cache, IncrementalIndexer& live,
                                  const std::shared_ptr<Sequence>& sequence) {
  ASSIGN_OR_RETURN(const auto base, sequence->Read());
  const SegmentList& list = *base->list;
  const auto spec = live.SpecOf(sequence->sequence_id());
  if (!spec.has_value() || list.segments.empty()) return absl::OkStatus();
  const size_t ordinal = list.Find(spec->index);
  const bool has_index = ordinal < list.indexes.size();
  if (!has_index || !list.index_ready(ordinal)) {
    RETURN_IF_ERROR(live.Retry(sequence->sequence_id()));
  }
  if (has_index && list.prefill_closed) return sequence->PublishIndex(spec->index, {});
  ASSIGN_OR_RETURN(const auto lease, WriteLease::Acquire(sequence));
  return ClosePrefill(cache, spec->index, lease);
}

}  // namespace pqcached::kvstore
