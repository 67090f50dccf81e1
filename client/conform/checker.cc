#include "client/conform/checker.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/conform/call.h"
#include "client/conform/process.h"

namespace pqcached::conform {
namespace {

// The calls of one run of a process.
struct Run {
  size_t parent = SIZE_MAX;  // number of the run of which this one is a fork
  std::deque<RecordedCall> calls;
  std::map<uint64_t, size_t> unreturned;  // number of the call, by its beginning
};

// Sorts the lines into runs. Process numbers return, so a first line begins another run.
class Runs {
 public:
  void Add(RecordedCall call) {
    if (call.format) {
      newest_[call.pid] = NewRun(SIZE_MAX);
      return;
    }
    auto found = newest_.find(call.pid);
    if (found == newest_.end()) {
      size_t parent = SIZE_MAX;
      if (call.forked_from) {
        const auto forked = newest_.find(*call.forked_from);
        if (forked != newest_.end()) parent = forked->second;
      }
      found = newest_.emplace(call.pid, NewRun(parent)).first;
    }
    AddCall(std::move(call), runs_[found->second]);
  }

  std::deque<Run>& runs() { return runs_; }

 private:
  size_t NewRun(size_t parent) {
    runs_.emplace_back().parent = parent;
    return runs_.size() - 1;
  }

  // A call on a closed handle has one line before it begins, and another when it returns.
  static void AddCall(RecordedCall call, Run& run) {
    const auto earlier = run.unreturned.find(call.begin);
    if (earlier == run.unreturned.end()) {
      if (!call.end) run.unreturned[call.begin] = run.calls.size();
      run.calls.push_back(std::move(call));
    } else {
      run.calls[earlier->second] = std::move(call);
      run.unreturned.erase(earlier);
    }
  }

  std::deque<Run> runs_;
  std::map<uint64_t, size_t> newest_;  // by process
};

struct Event {
  uint64_t place = 0;
  bool is_end = false;
  const RecordedCall* call = nullptr;
};

void Replay(const Run& run, Process* process) {
  std::vector<Event> events;
  events.reserve(2 * run.calls.size());
  for (const RecordedCall& call : run.calls) {
    events.push_back({call.begin, false, &call});
    if (call.end) events.push_back({*call.end, true, &call});
  }
  std::ranges::stable_sort(events, {}, &Event::place);
  for (const Event& event : events) {
    if (event.is_end) {
      process->End(*event.call);
    } else {
      process->Begin(*event.call);
    }
  }
  process->Finish();
}

}  // namespace

Report Check(std::istream& lines) {
  Report report;
  Runs runs;
  std::string text;
  size_t number = 0;
  while (std::getline(lines, text)) {
    ++number;
    RecordedCall call;
    if (std::string reason = ReadCall(text, &call); !reason.empty()) {
      report.bad_lines.push_back({number, std::move(reason)});
      continue;
    }
    call.line = number;
    if (!call.format) ++report.call_count;
    runs.Add(std::move(call));
  }
  if (report.call_count == 0 && report.bad_lines.empty()) {
    report.bad_lines.push_back({number + 1, "the file ends, and no call is recorded"});
  }
  std::vector<std::unique_ptr<Process>> processes;
  for (const Run& run : runs.runs()) {
    const Process* const parent = run.parent == SIZE_MAX ? nullptr : processes[run.parent].get();
    processes.push_back(std::make_unique<Process>(parent, &report));
    Replay(run, processes.back().get());
  }
  report.process_count = processes.size();
  std::ranges::stable_sort(report.findings, {}, &Finding::line);
  return report;
}

}  // namespace pqcached::conform
