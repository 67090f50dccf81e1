#include "client/conform/repeats.h"

namespace pqcached::conform {
namespace {

// Returns whether the status is about the call's arguments, of which some are not recorded.
bool IsAboutArguments(pqc_status status) {
  return status == PQC_INVALID_ARGUMENT || status == PQC_OUT_OF_RANGE ||
         status == PQC_UNIMPLEMENTED || status == PQC_ALREADY_EXISTS || status == PQC_NOT_FOUND;
}

// Returns what is equal in a call and its repetitions. A call that has created something also has
// its results among the arguments.
std::string ArgumentsOf(const RecordedCall& call, const Rule& rule) {
  if (!rule.Has(kCreates)) return call.arguments;
  std::string arguments;
  for (const auto& [key, address] : call.handles) {
    if (key != rule.opens) arguments += " " + key + std::to_string(address);
  }
  return arguments;
}

bool MayHaveBeenDone(const RecordedCall& call) {
  return call.status == PQC_DEADLINE_EXCEEDED ||
         (call.status == PQC_UNAVAILABLE && call.retry_ms > 0);
}

}  // namespace

bool LacksRoom(const RecordedCall& call) {
  const bool names_room = call.field.ends_with("capacity") || call.field.ends_with("out_bytes");
  return call.status == PQC_OUT_OF_RANGE && names_room;
}

Finding Repeats::Judge(const RecordedCall& call, const Rule& rule, const Failure& failure,
                       const Changes& at_begin) const {
  const RecordedCall& earlier = *failure.call;
  if (call.status == PQC_OK) {
    if (!rule.Has(kCreates) || !MayHaveBeenDone(earlier)) return {};
    return {call.line, "",
            call.name + " repeats the call in " + InLine(earlier) + ", which returned " +
                pqc_status_name(earlier.status) +
                " and may have made a sequence too: it remains until the session ends "
                "(client.h 9)"};
  }
  if (call.status != earlier.status || call.field != earlier.field) return {};
  if (LacksRoom(call)) return JudgeRoom(call, earlier);
  // Both depend on another call's end, and may be repeated at any time (status.h).
  if (call.status == PQC_ABORTED || call.status == PQC_CANCELLED) return {};
  if (earlier.retry_ms == 0) {
    const bool unknown = rule.Has(kHidesArguments) && IsAboutArguments(call.status);
    if (unknown || failure.changes.any != at_begin.any) return {};
    return {call.line, "client.h 7",
            call.name + " repeats the call in " + InLine(earlier) + ", which returned " +
                pqc_status_name(earlier.status) +
                " with a retry time of 0: repeating it is not worthwhile"};
  }
  const uint64_t waited_us = call.begin_us > earlier.end_us ? call.begin_us - earlier.end_us : 0;
  // The engine may know when a process listens at the endpoint (pqc_client_open).
  if (call.name == "pqc_client_open") return {};
  if (waited_us / 1000 >= earlier.retry_ms || failure.changes.freed != at_begin.freed) return {};
  return {call.line, "client.h 7",
          call.name + " repeats the call in " + InLine(earlier) + " after " +
              std::to_string(waited_us / 1000) + " ms, before its retry time of " +
              std::to_string(earlier.retry_ms) + " ms has passed"};
}

// Queries are not recorded, and another one may need less room. So only calls in a row count.
Finding Repeats::JudgeRoom(const RecordedCall& call, const RecordedCall& earlier) const {
  const auto last = last_ended_.find(call.thread);
  if (last == last_ended_.end() || last->second != &earlier) return {};
  return {call.line, "client.h 4",
          call.name + " is repeated with the capacity that was too small in " + InLine(earlier)};
}

void Repeats::Note(const RecordedCall& call, const Rule& rule) {
  if (call.status != PQC_OK || rule.Has(kOnlyReports)) return;
  const bool opens = rule.opens != nullptr;
  const bool closes = rule.closes != nullptr;
  const bool changes = rule.Has(kChanges) || rule.Has(kBuilds) || rule.Has(kStoresRows) ||
                       rule.Has(kPassesRows) || call.name == "pqc_cache_drop" ||
                       call.name == "pqc_admin_json";
  if (opens || closes || changes) ++changes_.any;
  const bool shrinks = call.name == "pqc_sequence_truncate" ||
                       call.name == "pqc_sequences_reorder" || call.name == "pqc_cache_drop" ||
                       call.name == "pqc_sequence_suspend" || call.name == "pqc_admin_json";
  if (closes || shrinks) ++changes_.freed;
}

Finding Repeats::End(const RecordedCall& call, const Rule& rule) {
  const auto begun = changes_at_begin_.extract(&call);
  const Changes at_begin = begun.empty() ? changes_ : begun.mapped();
  Note(call, rule);
  if (rule.Has(kOnlyReports)) return {};
  Finding finding = rule.closes ? Finding{} : EndRepeatable(call, rule, at_begin);
  last_ended_[call.thread] = &call;
  return finding;
}

Finding Repeats::EndRepeatable(const RecordedCall& call, const Rule& rule,
                               const Changes& at_begin) {
  const std::pair key(call.thread, call.name + ArgumentsOf(call, rule));
  const auto found = failures_.find(key);
  Finding finding;
  if (found != failures_.end()) finding = Judge(call, rule, found->second, at_begin);
  if (call.status == PQC_OK) {
    if (found != failures_.end()) failures_.erase(found);
    return finding;
  }
  // A loop that repeats a call at once is one break, however often it does.
  const bool was_reported = found != failures_.end() && found->second.was_reported;
  failures_[key] = {&call, changes_, was_reported || !finding.text.empty()};
  return was_reported ? Finding{} : finding;
}

}  // namespace pqcached::conform
