#include "kvstore/read/refusal.h"

namespace pqcached::kvstore {

void Refusal::Set(StatusCode new_code, std::string_view new_field, std::string_view new_text) {
  code = new_code;
  field = new_field;
  text = new_text;
  retry_ms = kNoRetry;
}

void Refusal::Clear() {
  code = StatusCode::kOk;
  field.clear();
  text.clear();
  retry_ms = kNoRetry;
}

std::string Refusal::message() const { return MessageOf(field, text); }

std::string JoinFields(std::string_view path, std::string_view field) {
  std::string joined(path);
  if (!path.empty() && !field.empty() && field.front() != '[') joined += '.';
  joined += field;
  return joined;
}

std::string MessageOf(std::string_view field, std::string_view text) {
  constexpr size_t kBetween = 2;  // ": "
  std::string message(field.size() + kBetween + text.size() + 1, '\0');
  message.resize(WriteMessage(field, text, message));
  return message;
}

}  // namespace pqcached::kvstore
