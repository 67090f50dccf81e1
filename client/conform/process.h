// The calls of one process, replayed: which handles are open, and what state they are in.
#ifndef PQCACHED_CLIENT_CONFORM_PROCESS_H_
#define PQCACHED_CLIENT_CONFORM_PROCESS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/conform/call.h"
#include "client/conform/contract.h"
#include "client/conform/repeats.h"
#include "client/conform/report.h"

namespace pqcached::conform {

// Begin and End are called in the order of the record's numbers. Single-threaded.
class Process {
 public:
  // `parent`: the process of which this one is a fork, replayed already; nullptr = none. Both must
  // outlive the object.
  Process(const Process* parent, Report* report) : parent_(parent), report_(*report) {}

  void Begin(const RecordedCall& call);
  void End(const RecordedCall& call);
  // Reports what is left when the process has ended.
  void Finish();

 private:
  static constexpr size_t kNone = SIZE_MAX;

  struct Handle {
    Kind kind = Kind::kClient;
    uint64_t address = 0;
    const RecordedCall* opened = nullptr;
    const RecordedCall* closed = nullptr;  // from the beginning of the call that closes it
    size_t client = kNone;
    std::vector<const RecordedCall*> uses;  // calls in progress

    // Of sequences.
    std::map<uint64_t, uint64_t> layer_tokens;       // next position of each layer
    std::optional<uint64_t> tokens;                  // as far as it is known
    size_t holder = kNone;                           // an open step or decoder
    const RecordedCall* rows_on_way = nullptr;       // the first call that passed them
    const RecordedCall* last_rows_passed = nullptr;  // the last one

    // Of steps and decoders.
    std::vector<size_t> sequences;
    std::vector<StepItem> items;
    const RecordedCall* attend_begun = nullptr;

    // Of operations.
    size_t flushed = kNone;    // the sequence of a flush
    bool was_refused = false;  // and reported

    // Of clients.
    std::map<uint64_t, const RecordedCall*> lost;  // by thread: the call that reported it
  };
  struct Use {
    std::string key;
    size_t handle = kNone;
  };

  void Break(const RecordedCall& call, const char* clause, std::string text);
  void Warn(const RecordedCall& call, std::string text);

  // Adds the open handle, or the newest closed one, at an address to the call's uses.
  void Resolve(const RecordedCall& call, const Rule& rule, const std::string& key, Kind kind,
               uint64_t address);
  void ResolveNull(const RecordedCall& call, const Rule& rule, const std::string& key, Kind kind);
  void Forget(const RecordedCall& call);
  void CheckUse(const RecordedCall& call, const Rule& rule, const Use& use);
  void CheckClient(const RecordedCall& call, const Rule& rule, size_t number);
  void CheckOneThread(const RecordedCall& call, const Handle& handle);
  void CheckChange(const RecordedCall& call, const Rule& rule, const Handle& sequence);
  void CheckStepBegin(const RecordedCall& call);
  void CheckInStep(const RecordedCall& call, const Rule& rule, const Handle& step);
  void CheckRowsAtClose(const RecordedCall& call, const Rule& rule, const Handle& sequence);

  void Refused(const RecordedCall& call, const Rule& rule);
  void Opened(const RecordedCall& call, const Rule& rule);
  void Reordered(const RecordedCall& call);
  void Release(size_t holder);
  void UpdateRows(const RecordedCall& call, const Rule& rule);
  void UpdateTokens(const RecordedCall& call, const Rule& rule);
  void UpdateStep(const RecordedCall& call, const Rule& rule);
  size_t Add(Kind kind, uint64_t address, const RecordedCall& call);
  size_t ClientOf(const RecordedCall& call) const;
  // Returns the handle of an argument of a call in progress; kNone when it is not known.
  size_t UseOf(const RecordedCall& call, std::string_view key) const;

  const Process* const parent_;
  Report& report_;
  std::vector<Handle> handles_;
  std::map<std::pair<Kind, uint64_t>, size_t> newest_;
  std::map<const RecordedCall*, std::vector<Use>> in_progress_;
  std::map<std::pair<uint64_t, Kind>, const RecordedCall*> failed_opening_;  // by thread
  Repeats repeats_;
};

}  // namespace pqcached::conform

#endif  // PQCACHED_CLIENT_CONFORM_PROCESS_H_
