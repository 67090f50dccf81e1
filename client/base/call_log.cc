#include "client/base/call_log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <unordered_set>

#include "client/base/arguments.h"
#include "client/base/deadline.h"
#include "kernels/base/mutex.h"

namespace pqcached::client {

std::atomic<bool> call_log_on{false};

namespace {

constexpr char kVariable[] = "PQCACHED_RECORD";
constexpr int kFormat = 1;
// Elements of arrays; more are no valid arguments, and are not read.
constexpr uint32_t kMaxRecordedHandles = 256;
constexpr uint32_t kMaxRecordedItems = 4096;
constexpr uint32_t kMaxRecordedLayers = 1024;
constexpr uint32_t kMaxRecordedDims = 4;

// The open record. One per process, and never freed: calls may end after main does.
struct Log {
  base::Mutex mutex;
  bool was_opened PQCACHED_GUARDED_BY(mutex) = false;
  // Handles that were closed and whose addresses no later handle has.
  std::unordered_set<const void*> closed PQCACHED_GUARDED_BY(mutex);
  // Set before call_log_on.
  int descriptor = -1;
  pid_t pid = -1;
  std::atomic<uint64_t> counter{0};
  std::atomic<uint32_t> threads{0};
};

Log& TheLog() {
  static Log* const log = new Log;
  return *log;
}

thread_local uint32_t thread_number = 0;
thread_local bool in_recorded_call = false;

uint64_t NowMicroseconds() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

uint32_t ThreadNumber() {
  if (thread_number == 0) thread_number = TheLog().threads.fetch_add(1) + 1;
  return thread_number;
}

std::string Address(const void* handle) {
  char text[2 * sizeof(handle) + 3];
  std::snprintf(text, sizeof(text), "0x%llx",
                static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(handle)));
  return text;
}

std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char byte : text) {
    if (byte == '"' || byte == '\\') quoted += '\\';
    quoted += byte >= ' ' && byte <= '~' ? byte : '?';
  }
  return quoted + '"';
}

// Writes a whole line at once, so that the lines of several threads and processes do not mix. A
// line that is not written, because the disk is full, ends the record.
void WriteLine(const std::string& line) {
  ssize_t written;
  do {
    written = write(TheLog().descriptor, line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  if (written != static_cast<ssize_t>(line.size())) call_log_on = false;
}

std::string Process() {
  const pid_t pid = getpid();
  std::string text = "{\"pid\":" + std::to_string(pid);
  if (pid != TheLog().pid) text += ",\"forked_from\":" + std::to_string(TheLog().pid);
  return text;
}

// The set of closed handles is not for a child of the process, in which its mutex may be locked for
// good.
bool IsChild() { return getpid() != TheLog().pid; }

bool WasClosed(const void* handle) {
  Log& log = TheLog();
  if (!handle || IsChild()) return false;
  const base::MutexLock lock(&log.mutex);
  return log.closed.contains(handle);
}

void SetClosed(const void* handle, bool closed) {
  Log& log = TheLog();
  if (!handle || IsChild()) return;
  const base::MutexLock lock(&log.mutex);
  if (closed) {
    log.closed.insert(handle);
  } else {
    log.closed.erase(handle);
  }
}

}  // namespace

pqc_status StartCallLog() {
  Log& log = TheLog();
  const base::MutexLock lock(&log.mutex);
  if (log.was_opened) return PQC_OK;
  const char* const path = secure_getenv(kVariable);
  if (!path || path[0] == '\0') {
    log.was_opened = true;
    return PQC_OK;
  }
  const int descriptor = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY, 0600);
  if (descriptor < 0) {
    return Fail(PQC_FAILED_PRECONDITION, kVariable, "cannot write \"%s\": %s", path,
                std::strerror(errno));
  }
  log.was_opened = true;
  log.descriptor = descriptor;
  log.pid = getpid();
  WriteLine(Process() + ",\"record\":" + std::to_string(kFormat) + "}\n");
  call_log_on = true;
  return PQC_OK;
}

CallRecord::CallRecord(const char* name) noexcept
    : name_(name),
      is_outermost_(!in_recorded_call && !IsOwnThread()),
      // Acquires what StartCallLog has set, which the load of RecordedCall does not.
      is_active_(is_outermost_ && call_log_on.load(std::memory_order_acquire)) {
  if (is_outermost_) in_recorded_call = true;
}

CallRecord::~CallRecord() {
  if (is_outermost_) in_recorded_call = false;
}

void CallRecord::AddKey(const char* key) {
  arguments_ += ",\"";
  arguments_ += key;
  arguments_ += "\":";
}

CallRecord& CallRecord::Handle(const char* key, const void* handle) {
  AddKey(key);
  arguments_ += '"' + Address(handle) + '"';
  uses_closed_ = uses_closed_ || WasClosed(handle);
  return *this;
}

CallRecord& CallRecord::Closes(const char* key, const void* handle) {
  closes_ = handle;
  return Handle(key, handle);
}

CallRecord& CallRecord::ClosesIfOk(const char* key, const void* handle) {
  closes_if_ok_ = true;
  return Closes(key, handle);
}

CallRecord& CallRecord::Number(const char* key, uint64_t value) {
  AddKey(key);
  arguments_ += std::to_string(value);
  return *this;
}

CallRecord& CallRecord::AddHandles(const char* key, const void* const* handles, uint32_t count) {
  AddKey(key);
  arguments_ += '[';
  for (uint32_t i = 0; handles && count <= kMaxRecordedHandles && i < count; ++i) {
    arguments_ += (i == 0 ? "\"" : ",\"") + Address(handles[i]) + '"';
    uses_closed_ = uses_closed_ || WasClosed(handles[i]);
  }
  arguments_ += ']';
  return *this;
}

CallRecord& CallRecord::Room(const pqc_positions* out) {
  return out ? Number("capacity", out->capacity) : *this;
}

CallRecord& CallRecord::Room(const pqc_attention* out) {
  if (!out) return *this;
  return Number("output_capacity", out->output_capacity)
      .Number("lse_capacity", out->lse_capacity)
      .Number("capacity", out->selected.capacity);
}

CallRecord& CallRecord::Room(const pqc_step_positions* out) {
  return out ? Number("capacity", out->capacity) : *this;
}

CallRecord& CallRecord::Room(const pqc_step_pages* out) {
  return out ? Number("capacity", out->capacity) : *this;
}

CallRecord& CallRecord::Room(const pqc_step_attention* out) {
  if (!out) return *this;
  return Number("output_capacity", out->output_capacity).Number("lse_capacity", out->lse_capacity);
}

CallRecord& CallRecord::Query(const pqc_query* query) {
  return query ? Number("layer", query->layer).Number("position", query->query_position) : *this;
}

CallRecord& CallRecord::Options(const pqc_step_options* options) {
  pqc_step_options read;
  if (!options || ReadStruct(options, "options", &read) != PQC_OK) return *this;
  return Number("timeout_ms", read.timeout_ms).Number("flags", read.flags);
}

namespace {

// Returns whether the tensor says how many tokens it has.
bool ReadTokens(const pqc_tensor& rows, uint64_t* tokens) {
  if (rows.block_table) {
    *tokens = rows.block_table->token_count;
    return true;
  }
  if (rows.ndim < 1 || rows.ndim > kMaxRecordedDims || !rows.shape) return false;
  *tokens = rows.shape[0];
  return true;
}

}  // namespace

CallRecord& CallRecord::Tokens(const pqc_tensor* rows) {
  uint64_t tokens = 0;
  return rows && ReadTokens(*rows, &tokens) ? Number("tokens", tokens) : *this;
}

CallRecord& CallRecord::Layers(const pqc_layer_rows* layers, uint32_t layer_count) {
  AddKey("layers");
  arguments_ += '[';
  for (uint32_t i = 0; layers && layer_count <= kMaxRecordedLayers && i < layer_count; ++i) {
    pqc_layer_rows rows;
    if (ReadElement(layers, i, "layers", &rows) != PQC_OK) break;
    arguments_ += (i == 0 ? "{\"layer\":" : ",{\"layer\":") + std::to_string(rows.layer);
    uint64_t tokens = 0;
    if (ReadTokens(rows.keys.ndim > 0 ? rows.keys : rows.values, &tokens))
      arguments_ += ",\"tokens\":" + std::to_string(tokens);
    arguments_ += '}';
  }
  arguments_ += ']';
  return *this;
}

CallRecord& CallRecord::Items(const pqc_step_item* items, uint32_t item_count) {
  AddKey("items");
  arguments_ += '[';
  for (uint32_t i = 0; items && item_count <= kMaxRecordedItems && i < item_count; ++i) {
    pqc_step_item item;
    if (ReadElement(items, i, "items", &item) != PQC_OK) break;
    uses_closed_ = uses_closed_ || WasClosed(item.sequence);
    arguments_ += (i == 0 ? "{\"sequence\":\"" : ",{\"sequence\":\"") + Address(item.sequence) +
                  "\",\"position\":" + std::to_string(item.query_position) +
                  ",\"length\":" + std::to_string(item.query_length) + '}';
  }
  arguments_ += ']';
  return *this;
}

CallRecord& CallRecord::Gives(const char* key, const uint64_t* place) {
  given_key_ = key;
  given_ = place;
  return *this;
}

CallRecord& CallRecord::Gives(const char* key, const uint32_t* place) {
  given_key_ = key;
  given_word_ = place;
  return *this;
}

void CallRecord::WriteBegin() {
  begin_us_ = NowMicroseconds();
  begin_ = TheLog().counter.fetch_add(1) + 1;
  if (uses_closed_) {
    WriteLine(Process() + ",\"thread\":" + std::to_string(ThreadNumber()) + ",\"begin\":" +
              std::to_string(begin_) + ",\"begin_us\":" + std::to_string(begin_us_) +
              ",\"call\":\"" + name_ + '"' + arguments_ + "}\n");
  }
  // Before the call, because another thread may open a handle at this address before it ends.
  SetClosed(closes_, true);
}

void CallRecord::WriteEnd(pqc_status status) {
  const uint64_t end = TheLog().counter.fetch_add(1) + 1;
  const uint64_t end_us = NowMicroseconds();
  if (status == PQC_OK && opened_.places) {
    AddKey(opened_.key);
    if (opened_.count != 1) arguments_ += '[';
    for (uint32_t i = 0; i < opened_.count; ++i) {
      arguments_ += (i == 0 ? "\"" : ",\"") + Address(opened_.places[i]) + '"';
      SetClosed(opened_.places[i], false);
    }
    if (opened_.count != 1) arguments_ += ']';
  }
  if (status != PQC_OK && closes_if_ok_) SetClosed(closes_, false);
  if (status == PQC_OK && given_) Number(given_key_, *given_);
  if (given_word_) Number(given_key_, *given_word_);
  std::string line = Process() + ",\"thread\":" + std::to_string(ThreadNumber()) +
                     ",\"begin\":" + std::to_string(begin_) + ",\"end\":" + std::to_string(end) +
                     ",\"begin_us\":" + std::to_string(begin_us_) +
                     ",\"end_us\":" + std::to_string(end_us) + ",\"call\":\"" + name_ + '"' +
                     arguments_ + ",\"status\":\"" + pqc_status_name(status) + '"';
  if (status != PQC_OK) {
    line += ",\"field\":" + Quoted(LastRefusal().field) +
            ",\"retry_ms\":" + std::to_string(LastRefusal().retry_ms);
  }
  WriteLine(line + "}\n");
}

void CallRecord::End(pqc_status status) noexcept {
  if (!is_active_) return;
  try {
    WriteEnd(status);
  } catch (const std::exception&) {  // no memory: the record lacks this call
    is_active_ = false;
  }
}

}  // namespace pqcached::client
