#include "client/conform/process.h"

#include <algorithm>

namespace pqcached::conform {
namespace {

constexpr char kHandles[] = "client.h 1";
constexpr char kStructs[] = "client.h 2";
constexpr char kPositions[] = "client.h 5";
constexpr char kExclusion[] = "client.h 6";
constexpr char kRetries[] = "client.h 7";
constexpr char kForks[] = "client.h 8";
constexpr char kFailures[] = "client.h 9";
constexpr char kSteps[] = "step.h";
constexpr char kEvents[] = "cache_events.h";

std::string Named(const RecordedCall& call) { return call.name + " in " + InLine(call); }

bool IsStepEnd(const RecordedCall& call) {
  return call.name == "pqc_step_end" || call.name == "pqc_step_end_with";
}

bool IsOneThreads(Kind kind) {
  return kind == Kind::kStep || kind == Kind::kDecoder || kind == Kind::kEvents;
}

// Returns whether handles of a kind are of no use once their client is closed.
bool NeedsClient(Kind kind) {
  return kind == Kind::kCache || kind == Kind::kSequence || kind == Kind::kStep ||
         kind == Kind::kGpu || kind == Kind::kDecoder || kind == Kind::kPageCache;
}

bool IsLost(const RecordedCall& call) {
  return call.retry_ms == 0 &&
         (call.status == PQC_UNAVAILABLE || call.status == PQC_UNAUTHENTICATED);
}

bool IsRefusedPosition(const RecordedCall& call) {
  if (call.status == PQC_OUT_OF_RANGE) return !LacksRoom(call);
  if (call.status != PQC_INVALID_ARGUMENT) return false;
  return call.field.ends_with("first_position") || call.field.ends_with("query_position") ||
         call.field.ends_with("names_begin") ||
         (call.field == "token_count" && call.Number("token_count"));
}

}  // namespace

void Process::Break(const RecordedCall& call, const char* clause, std::string text) {
  report_.findings.push_back({call.line, clause, std::move(text)});
}

void Process::Warn(const RecordedCall& call, std::string text) {
  report_.findings.push_back({call.line, "", std::move(text)});
}

size_t Process::Add(Kind kind, uint64_t address, const RecordedCall& call) {
  Handle handle;
  handle.kind = kind;
  handle.address = address;
  handle.opened = &call;
  handles_.push_back(std::move(handle));
  newest_[{kind, address}] = handles_.size() - 1;
  return handles_.size() - 1;
}

size_t Process::UseOf(const RecordedCall& call, std::string_view key) const {
  const auto uses = in_progress_.find(&call);
  if (uses == in_progress_.end()) return kNone;
  for (const Use& use : uses->second) {
    if (use.key == key) return use.handle;
  }
  return kNone;
}

size_t Process::ClientOf(const RecordedCall& call) const {
  const auto uses = in_progress_.find(&call);
  if (uses == in_progress_.end()) return kNone;
  for (const Use& use : uses->second) {
    if (handles_[use.handle].kind == Kind::kClient) return use.handle;
    if (handles_[use.handle].client != kNone) return handles_[use.handle].client;
  }
  return kNone;
}

void Process::ResolveNull(const RecordedCall& call, const Rule& rule, const std::string& key,
                          Kind kind) {
  if ((rule.closes && key == rule.closes) || call.status != PQC_INVALID_ARGUMENT) return;
  const auto failed = failed_opening_.find({call.thread, kind});
  if (failed == failed_opening_.end()) {
    Break(call, kHandles, call.name + " has NULL in place of a " + NameOf(kind));
    return;
  }
  Break(call, kFailures,
        call.name + " goes on without a " + NameOf(kind) + " after " + Named(*failed->second) +
            " returned " + pqc_status_name(failed->second->status));
}

void Process::Resolve(const RecordedCall& call, const Rule& rule, const std::string& key, Kind kind,
                      uint64_t address) {
  if (address == 0) return ResolveNull(call, rule, key, kind);
  const auto found = newest_.find({kind, address});
  if (found != newest_.end()) {
    in_progress_[&call].push_back({key, found->second});
    return;
  }
  const bool inherited = parent_ && parent_->newest_.contains({kind, address});
  if (!inherited) return;  // of a call that is not in the record
  Break(call, kForks,
        call.name + " uses, after fork(), a " + NameOf(kind) + " that the parent process opened");
}

// A call of a later library may open handles at any of its addresses.
void Process::Forget(const RecordedCall& call) {
  ++report_.unknown_call_count;
  for (const auto& [key, address] : call.handles) newest_.erase({KindOf(key), address});
}

void Process::CheckClient(const RecordedCall& call, const Rule& rule, size_t number) {
  if (rule.closes || rule.Has(kOnlyReports)) return;
  const Handle& handle = handles_[number];
  const size_t owner = handle.kind == Kind::kClient ? number : handle.client;
  if (owner == kNone) return;
  Handle& client = handles_[owner];
  if (client.closed && NeedsClient(handle.kind)) {
    Break(call, kHandles,
          call.name + " uses a " + NameOf(handle.kind) + " of a client that was closed in " +
              InLine(*client.closed));
  }
  const auto lost = client.lost.find(call.thread);
  if (lost == client.lost.end() || !lost->second) return;
  Break(call, kRetries,
        call.name + " uses a session that is lost: " + Named(*lost->second) + " returned " +
            pqc_status_name(lost->second->status) + " with a retry time of 0");
  lost->second = nullptr;  // reported once
}

void Process::CheckOneThread(const RecordedCall& call, const Handle& handle) {
  if (!IsOneThreads(handle.kind)) return;
  for (const RecordedCall* other : handle.uses) {
    if (other->thread == call.thread) continue;
    Break(call, handle.kind == Kind::kEvents ? kEvents : kSteps,
          call.name + " uses a " + NameOf(handle.kind) + " while " + Named(*other) +
              " uses it on another thread");
    return;
  }
}

void Process::CheckChange(const RecordedCall& call, const Rule& rule, const Handle& sequence) {
  const bool changes = rule.Has(kChanges) || rule.Has(kBuilds);
  if (!changes && !rule.Has(kBeginsStep)) return;
  if (sequence.holder != kNone) {
    const Handle& holder = handles_[sequence.holder];
    const bool same_step = rule.Has(kBeginsStep) && holder.kind == Kind::kStep;
    Break(call, holder.kind == Kind::kDecoder ? kSteps : kExclusion,
          call.name + (same_step ? " begins a step with" : " changes") + " a sequence while the " +
              NameOf(holder.kind) + " of " + InLine(*holder.opened) + " has it");
    return;
  }
  for (const RecordedCall* other : sequence.uses) {
    const Rule* const others = FindRule(other->name);
    const bool excludes = others->Has(kChanges) || others->Has(kBuilds) || others->Has(kBeginsStep);
    // A build that runs excludes nothing; the status shows if it had only begun.
    const bool builds = rule.Has(kBuilds) || others->Has(kBuilds);
    const bool aborted = call.status == PQC_ABORTED || other->status == PQC_ABORTED;
    if (other->thread == call.thread || !excludes || (builds && !aborted)) continue;
    Break(call, kExclusion,
          call.name + " and " + Named(*other) +
              " have a sequence at the same time; calls that change it and steps exclude each "
              "other");
    return;
  }
}

void Process::CheckStepBegin(const RecordedCall& call) {
  std::set<uint64_t> seen;
  for (const StepItem& item : call.items) {
    if (item.sequence == 0 || seen.insert(item.sequence).second) continue;
    Break(call, kSteps, call.name + " lists a sequence twice");
    return;
  }
}

void Process::CheckInStep(const RecordedCall& call, const Rule& rule, const Handle& step) {
  const bool waits = call.name == "pqc_step_attend_wait";
  if (waits && !step.attend_begun && call.status != PQC_OK) {
    Break(call, kSteps, call.name + " waits for an attention that was not begun");
  }
  if (waits || !step.attend_begun || (!rule.Has(kInStep) && !IsStepEnd(call))) return;
  Break(call, kSteps,
        call.name + " comes before pqc_step_attend_wait for the attention of " +
            InLine(*step.attend_begun));
}

void Process::CheckRowsAtClose(const RecordedCall& call, const Rule& rule, const Handle& sequence) {
  const bool ends = call.name == "pqc_sequence_drop" || call.name == "pqc_client_close";
  if (!ends || !sequence.rows_on_way || rule.Has(kStoresRows)) return;
  Warn(call, "rows may be lost: " + call.name + " does not wait for the rows of " +
                 Named(*sequence.rows_on_way) + " and later (pqc_sequence_flush does)");
}

void Process::CheckUse(const RecordedCall& call, const Rule& rule, const Use& use) {
  Handle& handle = handles_[use.handle];
  const std::string what = NameOf(handle.kind);
  const bool closes = rule.closes && use.key == rule.closes;
  const char* const verb = closes ? " closes a " : " uses a ";
  if (handle.closed && handle.closed->end && *handle.closed->end < call.begin) {
    Break(call, kHandles, call.name + verb + what + " that " + Named(*handle.closed) + " closed");
    return;
  }
  if (handle.closed) {
    Break(call, kExclusion,
          call.name + verb + what + " while " + Named(*handle.closed) + " closes it");
    return;
  }
  CheckClient(call, rule, use.handle);
  CheckOneThread(call, handle);
  if (handle.kind == Kind::kSequence) {
    CheckChange(call, rule, handle);
    CheckRowsAtClose(call, rule, handle);
  }
  if (handle.kind == Kind::kStep) CheckInStep(call, rule, handle);
  if (!closes) return;
  if (!handle.uses.empty() && !IsOneThreads(handle.kind)) {
    Break(call, kExclusion,
          call.name + " closes a " + what + " while " + Named(*handle.uses.front()) + " uses it");
  }
  if (handle.kind == Kind::kSequence && handle.holder != kNone) {
    const Handle& holder = handles_[handle.holder];
    const bool is_decoder = holder.kind == Kind::kDecoder;
    if (is_decoder || call.name == "pqc_sequence_detach") {
      Break(call, kSteps,
            call.name + " closes a sequence that the " + NameOf(holder.kind) + " of " +
                InLine(*holder.opened) + " has");
    }
  }
}

void Process::Begin(const RecordedCall& call) {
  const Rule* const rule = FindRule(call.name);
  if (!rule) return Forget(call);
  repeats_.Begin(call);
  in_progress_[&call];
  for (const auto& [key, address] : call.handles) {
    if (rule->opens && key == rule->opens) continue;
    Resolve(call, *rule, key, KindOf(key), address);
  }
  for (const uint64_t address : call.sequences) {
    Resolve(call, *rule, "sequences", Kind::kSequence, address);
  }
  for (const StepItem& item : call.items) {
    Resolve(call, *rule, "items", Kind::kSequence, item.sequence);
  }
  if (rule->Has(kBeginsStep)) CheckStepBegin(call);
  std::set<size_t> checked;
  for (const Use& use : in_progress_[&call]) {
    if (checked.insert(use.handle).second) CheckUse(call, *rule, use);
  }
  for (const size_t handle : checked) handles_[handle].uses.push_back(&call);
  const size_t closed = rule->closes ? UseOf(call, rule->closes) : kNone;
  // pqc_operation_close closes the handle only on PQC_OK.
  const bool keeps = call.name == "pqc_operation_close" && call.status != PQC_OK;
  if (closed == kNone || handles_[closed].closed || keeps) return;
  handles_[closed].closed = &call;
  if (handles_[closed].kind != Kind::kClient) return;
  for (const Handle& handle : handles_) {
    if (handle.client == closed && handle.kind == Kind::kSequence && !handle.closed) {
      CheckRowsAtClose(call, *rule, handle);
    }
  }
}

void Process::Refused(const RecordedCall& call, const Rule& rule) {
  if (rule.opens) failed_opening_[{call.thread, KindOf(rule.opens)}] = &call;
  // An operation returns its status any number of times.
  if (const size_t operation = UseOf(call, "operation"); operation != kNone) {
    if (handles_[operation].was_refused) return;
    handles_[operation].was_refused = true;
  }
  const std::string refusal = std::string(" (") + pqc_status_name(call.status) +
                              (call.field.empty() ? "" : ", field " + call.field) + ")";
  if (call.field.ends_with("struct_size")) {
    Break(call, kStructs, call.name + " was refused for the size of a struct" + refusal);
  } else if (IsRefusedPosition(call)) {
    std::string stored;
    size_t sequence = UseOf(call, "sequence");
    if (sequence == kNone) sequence = UseOf(call, "parent");
    const auto layer = call.Number("layer");
    if (sequence != kNone && layer && handles_[sequence].layer_tokens.contains(*layer)) {
      stored = "; layer " + std::to_string(*layer) + " had " +
               std::to_string(handles_[sequence].layer_tokens.at(*layer)) + " tokens";
    } else if (sequence != kNone && handles_[sequence].tokens) {
      stored =
          "; the sequence had " + std::to_string(*handles_[sequence].tokens) + " tokens at most";
    }
    Break(call, kPositions, call.name + " was refused for its positions" + refusal + stored);
  }
  const size_t client = ClientOf(call);
  if (client != kNone && IsLost(call)) handles_[client].lost.try_emplace(call.thread, &call);
}

void Process::Opened(const RecordedCall& call, const Rule& rule) {
  if (!rule.opens) return;
  const Kind kind = KindOf(rule.opens);
  failed_opening_.erase({call.thread, kind});
  const auto address = call.handles.find(rule.opens);
  if (address == call.handles.end() || address->second == 0) return;
  const size_t client = ClientOf(call);
  const size_t opened = Add(kind, address->second, call);
  handles_[opened].client = client;
  if (kind == Kind::kSequence) {
    const size_t parent = UseOf(call, "parent");
    std::optional<uint64_t> tokens = call.Number("token_count");
    if (parent != kNone && tokens == 0) tokens = handles_[parent].tokens;
    if (call.name == "pqc_sequence_create") tokens = 0;
    handles_[opened].tokens = tokens;
  }
  if (call.name == "pqc_sequence_flush_begin") handles_[opened].flushed = UseOf(call, "sequence");
  if (kind != Kind::kStep && kind != Kind::kDecoder) return;
  handles_[opened].items = call.items;
  for (const Use& use : in_progress_[&call]) {
    if (handles_[use.handle].kind != Kind::kSequence) continue;
    handles_[opened].sequences.push_back(use.handle);
    handles_[use.handle].holder = opened;
  }
}

void Process::Reordered(const RecordedCall& call) {
  const size_t client = ClientOf(call);
  for (const Use& use : in_progress_[&call]) {
    Handle& sequence = handles_[use.handle];
    if (std::ranges::find(call.reordered, sequence.address) == call.reordered.end()) {
      sequence.closed = &call;
    }
  }
  for (const uint64_t address : call.reordered) {
    if (std::ranges::find(call.sequences, address) != call.sequences.end()) continue;
    const size_t child = Add(Kind::kSequence, address, call);
    handles_[child].client = client;
  }
}

void Process::Release(size_t holder) {
  for (const size_t sequence : handles_[holder].sequences) {
    if (handles_[sequence].holder == holder) handles_[sequence].holder = kNone;
  }
}

void Process::UpdateRows(const RecordedCall& call, const Rule& rule) {
  std::vector<size_t> sequences;
  for (const Use& use : in_progress_[&call]) {
    const Handle& handle = handles_[use.handle];
    if (handle.kind == Kind::kSequence) sequences.push_back(use.handle);
    if (handle.kind == Kind::kStep || handle.kind == Kind::kDecoder) {
      sequences.insert(sequences.end(), handle.sequences.begin(), handle.sequences.end());
    }
    // The rows that were passed before the operation began are stored when it has ended.
    const bool ended = call.name != "pqc_operation_poll" || call.Number("done").value_or(0) == 1;
    if (handle.kind != Kind::kOperation || handle.flushed == kNone || !ended) continue;
    Handle& flushed = handles_[handle.flushed];
    const bool later =
        flushed.last_rows_passed && flushed.last_rows_passed->begin > handle.opened->begin;
    if (!later) flushed.rows_on_way = nullptr;
  }
  for (const size_t sequence : sequences) {
    Handle& handle = handles_[sequence];
    if (rule.Has(kStoresRows)) handle.rows_on_way = nullptr;
    if (!rule.Has(kPassesRows)) continue;
    if (!handle.rows_on_way) handle.rows_on_way = &call;
    handle.last_rows_passed = &call;
  }
}

void Process::UpdateTokens(const RecordedCall& call, const Rule& rule) {
  if (IsStepEnd(call)) {
    const size_t step = UseOf(call, "step");
    if (step == kNone) return;
    const Handle& ended = handles_[step];
    for (size_t i = 0; i < ended.items.size() && i < ended.sequences.size(); ++i) {
      const uint64_t length = std::max<uint64_t>(1, ended.items[i].length);
      handles_[ended.sequences[i]].tokens = ended.items[i].position + length;
      handles_[ended.sequences[i]].layer_tokens.clear();
    }
    return;
  }
  const size_t number = UseOf(call, "sequence");
  if (number == kNone) return;
  Handle& sequence = handles_[number];
  const auto tokens = call.Number("token_count");
  if (tokens && (call.name == "pqc_sequence_truncate" || call.name == "pqc_sequence_resume")) {
    sequence.tokens = tokens;
    sequence.layer_tokens.clear();
  }
  const auto first = call.Number("first_position");
  if (!first || !rule.Has(kChanges)) return;
  const auto add = [&](std::optional<uint64_t> layer, std::optional<uint64_t> count) {
    if (!layer || !count) return;
    uint64_t& end = sequence.layer_tokens[*layer];
    end = std::max(end, *first + *count);
    if (sequence.tokens) sequence.tokens = std::max(*sequence.tokens, end);
  };
  add(call.Number("layer"), call.Number("tokens"));
  for (const LayerTokens& layer : call.layers) add(layer.layer, layer.tokens);
}

void Process::UpdateStep(const RecordedCall& call, const Rule& rule) {
  const size_t step = UseOf(call, "step");
  if (step == kNone || !rule.Has(kInStep)) return;
  if (call.name == "pqc_step_attend_begin" && call.status == PQC_OK) {
    handles_[step].attend_begun = &call;
  } else if (call.name == "pqc_step_attend_wait") {
    handles_[step].attend_begun = nullptr;
  }
}

void Process::End(const RecordedCall& call) {
  const Rule* const rule = FindRule(call.name);
  if (!rule) return;
  if (const Finding finding = repeats_.End(call, *rule); !finding.text.empty()) {
    report_.findings.push_back(finding);
  }
  for (const Use& use : in_progress_[&call]) std::erase(handles_[use.handle].uses, &call);
  UpdateStep(call, *rule);
  if (call.status == PQC_OK) {
    UpdateRows(call, *rule);
    UpdateTokens(call, *rule);
    Opened(call, *rule);
    if (call.name == "pqc_sequences_reorder") Reordered(call);
  } else {
    Refused(call, *rule);
  }
  const size_t closed = rule->closes ? UseOf(call, rule->closes) : kNone;
  if (closed != kNone && handles_[closed].closed == &call) Release(closed);
  in_progress_.erase(&call);
}

void Process::Finish() {
  for (const auto& [call, uses] : in_progress_) {
    Warn(*call, call->name + " had not returned when the record ended");
  }
  for (const Handle& handle : handles_) {
    if (handle.closed) continue;
    const bool orphan = handle.client != kNone && handles_[handle.client].closed;
    if (handle.kind == Kind::kStep && orphan) {
      Break(*handle.opened, kSteps,
            "the step that " + handle.opened->name +
                " began was neither ended nor abandoned, and its client was closed in " +
                InLine(*handles_[handle.client].closed));
    } else {
      Warn(*handle.opened, std::string("left open: the ") + NameOf(handle.kind) + " that " +
                               handle.opened->name + " opened (client.h 1)");
    }
  }
}

}  // namespace pqcached::conform
