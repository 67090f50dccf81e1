// The record of an engine's calls: a JSON line for each call of the C ABI, which pqcached-conform
// checks against the contract (client/conform/). It is on when the environment variable
// PQCACHED_RECORD names a file as the process opens its first client. When it is off, a call costs
// one load and a branch.
//
//     {"pid":70,"thread":1,"begin":4,"end":5,"begin_us":91,"end_us":340,
//      "call":"pqc_sequence_fork","parent":"0x5581","token_count":0,"child":"0x55a0",
//      "status":"ABORTED","field":"parent","retry_ms":10}
//
// `begin` and `end` count the beginnings and ends of calls in the process, so that they order the
// calls of several threads; `thread` is a number of the record's own. A handle is its address. A
// process that fork() made has its own pid, and that of the process which opened the record in
// "forked_from". The first line of a process is {"pid":70,"record":1}: the version of this format.
//
// A line is written when its call ends. A call on a handle that was closed is also written before
// it begins, without "end" and "status", because it may end the process. Calls that the library
// itself makes, and calls of the engine's callbacks, are not recorded.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_BASE_CALL_LOG_H_
#define PQCACHED_CLIENT_BASE_CALL_LOG_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "client/base/error.h"
#include "pqcached/client.h"

namespace pqcached::client {

// Whether calls are recorded. One per process, as the environment is.
extern std::atomic<bool> call_log_on;

// Reads PQCACHED_RECORD and opens the file that it names, unless an earlier call has done so.
// Sets the last error.
//
// Errors: PQC_FAILED_PRECONDITION  PQCACHED_RECORD: the file cannot be opened
pqc_status StartCallLog();

// CallRecord is the line of one call. It records nothing when the thread is inside another recorded
// call, or is one of the client's own.
class CallRecord {
 public:
  explicit CallRecord(const char* name) noexcept;
  ~CallRecord();
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;

  // Adds a handle that the call uses.
  CallRecord& Handle(const char* key, const void* handle);
  // Adds a handle that the call uses and closes.
  CallRecord& Closes(const char* key, const void* handle);
  // Adds a handle that the call closes only when it returns PQC_OK.
  CallRecord& ClosesIfOk(const char* key, const void* handle);
  CallRecord& Number(const char* key, uint64_t value);
  // Adds an array of handles that the call uses.
  template <class Used>
  CallRecord& Handles(const char* key, Used* const* handles, uint32_t count) {
    return AddHandles(key, reinterpret_cast<const void* const*>(handles), count);
  }
  // Adds the capacities of an output that may be NULL.
  CallRecord& Room(const pqc_positions* out);
  CallRecord& Room(const pqc_attention* out);
  CallRecord& Room(const pqc_step_positions* out);
  CallRecord& Room(const pqc_step_pages* out);
  CallRecord& Room(const pqc_step_attention* out);
  // Adds layer and position of a query that may be NULL.
  CallRecord& Query(const pqc_query* query);
  // Adds flags and timeout of a step; `options` may be NULL.
  CallRecord& Options(const pqc_step_options* options);
  // Adds the number of tokens that a tensor of rows has, if it has a shape.
  CallRecord& Tokens(const pqc_tensor* rows);
  // Adds layers [layer_count] with their tokens, as far as they can be read.
  CallRecord& Layers(const pqc_layer_rows* layers, uint32_t layer_count);
  // Adds the items of a step, as far as they can be read.
  CallRecord& Items(const pqc_step_item* items, uint32_t item_count);
  // Adds outputs that are read when the call has returned PQC_OK: handles that it opens, and
  // numbers. The places may be NULL.
  template <class Opened>
  CallRecord& Opens(const char* key, Opened* const* place, uint32_t count = 1) {
    opened_ = {key, reinterpret_cast<const void* const*>(place), count};
    return *this;
  }
  CallRecord& Gives(const char* key, const uint64_t* place);
  CallRecord& Gives(const char* key, const uint32_t* place);

  // Calls `describe`, which adds the arguments, and marks the call's beginning.
  template <class Describe>
  void Begin(const Describe& describe) noexcept {
    if (!is_active_) return;
    try {
      describe(*this);
      WriteBegin();
    } catch (const std::exception&) {  // no memory: the record lacks this call
      is_active_ = false;
    }
  }
  // Writes the line.
  void End(pqc_status status) noexcept;

 private:
  struct Opening {
    const char* key = nullptr;
    const void* const* places = nullptr;
    uint32_t count = 0;
  };

  void AddKey(const char* key);
  CallRecord& AddHandles(const char* key, const void* const* handles, uint32_t count);
  void WriteBegin();
  void WriteEnd(pqc_status status);

  const char* const name_;
  const bool is_outermost_;
  bool is_active_;
  bool uses_closed_ = false;
  const void* closes_ = nullptr;
  bool closes_if_ok_ = false;
  uint64_t begin_ = 0;
  uint64_t begin_us_ = 0;
  std::string arguments_;
  Opening opened_;
  const char* given_key_ = nullptr;
  const uint64_t* given_ = nullptr;
  const uint32_t* given_word_ = nullptr;
};

// Runs the body of one call of the C ABI, as Call does, and records it. `describe` adds the
// arguments to a CallRecord.
//
//     return RecordedCall(
//         "pqc_sequence_drop", [&](CallRecord& call) { call.Closes("sequence", sequence); },
//         [&] { return Drop(sequence); });
template <class Describe, class Body>
pqc_status RecordedCall(const char* name, const Describe& describe, const Body& body) noexcept {
  if (!call_log_on.load(std::memory_order_relaxed)) [[likely]]
    return Call(body);
  CallRecord record(name);
  record.Begin(describe);
  const pqc_status status = Call(body);
  record.End(status);
  return status;
}

// Runs the body of a call that closes a handle and returns no status, and records it.
template <class Body>
void RecordedClose(const char* name, const char* key, const void* handle, const Body& body) {
  if (!call_log_on.load(std::memory_order_relaxed)) [[likely]]
    return body();
  CallRecord record(name);
  record.Begin([&](CallRecord& call) { call.Closes(key, handle); });
  body();
  record.End(PQC_OK);
}

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_CALL_LOG_H_
