#include "client/base/error.h"

#include <charconv>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace pqcached::client {
namespace {

thread_local RefusalBuffer last;
thread_local char last_message[sizeof(last.field) + sizeof(last.text) + 2] = "";

// Ends of paths. The wire keeps the parameters of an index in a message of its kind.
constexpr HeaderName kSameInAllCalls[] = {
    {"query.sequence_id", "sequence"},
    {"sequence_id", "sequence"},
    {"selection.token_ratio", "selection.ratio"},
    {"pq.subspaces", "subspaces"},
    {"pq.bits", "bits"},
    {"pq.layout", "layout"},
    {"index.flat", "index"},
};

// Returns whether `field` is `path`, or a field below it.
bool IsBeginning(std::string_view path, std::string_view field) {
  if (!field.starts_with(path)) return false;
  return field.size() == path.size() || field[path.size()] == '.' || field[path.size()] == '[';
}

// Writes the message of the last refusal, after it has changed. Returns `status`.
pqc_status WriteLastMessage(pqc_status status) noexcept {
  kvstore::WriteMessage(last.field, last.text, last_message);
  return status;
}

template <size_t kSize>
void Copy(const char* from, char (&to)[kSize]) noexcept {
  std::snprintf(to, kSize, "%s", from);
}

}  // namespace

std::string HeaderPathOf(std::string_view field, std::initializer_list<HeaderName> names) {
  std::string path(field);
  for (const HeaderName& name : names) {
    if (!IsBeginning(name.wire, path)) continue;
    std::string_view rest = field.substr(name.wire.size());
    if (rest.starts_with('.')) rest.remove_prefix(1);
    path = kvstore::JoinFields(name.header, rest);
    break;
  }
  for (const HeaderName& name : kSameInAllCalls) {
    const size_t found = path.find(name.wire);
    if (found == std::string::npos || found + name.wire.size() != path.size()) continue;
    if (found == 0 || path[found - 1] == '.') path.replace(found, std::string::npos, name.header);
  }
  return path;
}

FieldPath::FieldPath(const char* path) noexcept { Copy(path, text_); }

FieldPath FieldPath::Of(const char* format, ...) noexcept {
  FieldPath path;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(path.text_, sizeof(path.text_), format, arguments);
  va_end(arguments);
  return path;
}

pqc_status Fail(pqc_status status, const FieldPath& field, const char* format, ...) noexcept {
  RefusalBuffer refusal;  // the arguments may be texts of the last one
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(refusal.text, sizeof(refusal.text), format, arguments);
  va_end(arguments);
  Copy(field.c_str(), refusal.field);
  return Fail(status, refusal);
}

pqc_status Fail(pqc_status status, const RefusalBuffer& refusal) noexcept {
  last = refusal;
  return WriteLastMessage(status);
}

pqc_status Fail(const kvstore::Refusal& refusal) {
  SetRefusal(&last, HeaderPathOf(refusal.field).c_str(), refusal.text.c_str());
  last.retry_ms = refusal.retry_ms;
  return WriteLastMessage(static_cast<pqc_status>(refusal.code));
}

pqc_status Report(pqc_status status, const RefusalBuffer& error,
                  std::initializer_list<HeaderName> names) {
  if (status == PQC_OK) return PQC_OK;
  RefusalBuffer own = error;
  SetRefusal(&own, HeaderPathOf(error.field, names).c_str(), error.text);
  return Fail(status, own);
}

pqc_status SetRetry(uint32_t retry_ms, pqc_status status) noexcept {
  last.retry_ms = retry_ms;
  return status;
}

pqc_status PrefixField(const FieldPath& path, pqc_status status) noexcept {
  const bool dot = last.field[0] != '\0' && last.field[0] != '[';
  Copy(FieldPath::Of("%s%s%s", path.c_str(), dot ? "." : "", last.field).c_str(), last.field);
  return WriteLastMessage(status);
}

pqc_status AddToNumber(const char* list, uint32_t first, pqc_status status) noexcept {
  const size_t length = std::strlen(list);
  if (std::strncmp(last.field, list, length) != 0 || last.field[length] != '[') return status;
  uint32_t number = 0;
  const char* const end = last.field + std::strlen(last.field);
  const auto [rest, error] = std::from_chars(last.field + length + 1, end, number);
  if (error != std::errc()) return status;
  Copy(FieldPath::Of("%s[%u%s", list, first + number, rest).c_str(), last.field);
  return WriteLastMessage(status);
}

pqc_status PrefixText(const char* text, pqc_status status) noexcept {
  const RefusalBuffer before = last;
  kvstore::WriteMessage(text, before.text, last.text);
  return WriteLastMessage(status);
}

pqc_status AppendText(const char* text, pqc_status status) noexcept {
  const size_t length = std::strlen(last.text);
  std::snprintf(last.text + length, sizeof(last.text) - length, "%s", text);
  return WriteLastMessage(status);
}

const RefusalBuffer& LastRefusal() noexcept { return last; }
const char* LastMessage() noexcept { return last_message; }

void ClearLastError() noexcept {
  last.text[0] = last.field[0] = last_message[0] = '\0';
  last.retry_ms = kNoRetry;
}

void SetRefusal(RefusalBuffer* refusal, const char* field, const char* text) noexcept {
  Copy(field, refusal->field);
  Copy(text, refusal->text);
}

}  // namespace pqcached::client
