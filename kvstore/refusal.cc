#include "kvstore/refusal.h"

#include <cstring>
#include <optional>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace pqcached::kvstore {
namespace {

// Debian's abseil has a string_view of its own.
std::string_view Std(absl::string_view text) { return {text.data(), text.size()}; }

constexpr char kPayload[] = "pqcached.dev/refusal";

// Content of the payload: retry_ms as four bytes, the shortage as one, the field, a zero byte, the
// text.
struct Details {
  uint32_t retry_ms = kNoRetry;
  Shortage shortage = Shortage::kNone;
  std::string field;
  std::string text;
};
constexpr size_t kFieldOffset = sizeof(Details::retry_ms) + sizeof(Details::shortage);

absl::Cord Encode(const Details& details) {
  std::string bytes(kFieldOffset, '\0');
  std::memcpy(bytes.data(), &details.retry_ms, sizeof(details.retry_ms));
  bytes[sizeof(details.retry_ms)] = static_cast<char>(details.shortage);
  bytes.append(details.field);
  bytes.push_back('\0');
  bytes.append(details.text);
  return absl::Cord(std::move(bytes));
}

// Returns what the payload holds; a status that another library made has only a text.
Details DetailsOf(const absl::Status& status) {
  Details details;
  const auto payload = status.GetPayload(kPayload);
  if (!payload.has_value()) {
    details.text = std::string(status.message());
    return details;
  }
  const std::string bytes(*payload);
  std::memcpy(&details.retry_ms, bytes.data(), sizeof(details.retry_ms));
  details.shortage = static_cast<Shortage>(bytes[sizeof(details.retry_ms)]);
  const size_t end = bytes.find('\0', kFieldOffset);
  details.field = bytes.substr(kFieldOffset, end - kFieldOffset);
  details.text = bytes.substr(end + 1);
  return details;
}

absl::Status StatusOf(absl::StatusCode code, const Details& details) {
  absl::Status status(code, MessageOf(details.field, details.text));
  status.SetPayload(kPayload, Encode(details));
  return status;
}

}  // namespace

absl::Status Refuse(absl::StatusCode code, absl::string_view field, absl::string_view text,
                    uint32_t retry_ms) {
  return StatusOf(code, {.retry_ms = retry_ms,
                         .shortage = Shortage::kNone,
                         .field = std::string(field),
                         .text = std::string(text)});
}

absl::Status ToStatus(const Refusal& refusal) {
  if (refusal.ok()) return absl::OkStatus();
  return Refuse(static_cast<absl::StatusCode>(refusal.code), refusal.field, refusal.text,
                refusal.retry_ms);
}

Refusal RefusalOf(const absl::Status& status) {
  if (status.ok()) return {};
  Details details = DetailsOf(status);
  return {.code = static_cast<StatusCode>(status.code()),
          .field = std::move(details.field),
          .text = std::move(details.text),
          .retry_ms = details.retry_ms};
}

absl::Status InvalidArgument(absl::string_view field, absl::string_view text) {
  return Refuse(absl::StatusCode::kInvalidArgument, field, text);
}
absl::Status OutOfRange(absl::string_view field, absl::string_view text) {
  return Refuse(absl::StatusCode::kOutOfRange, field, text);
}
absl::Status Unimplemented(absl::string_view field, absl::string_view text) {
  return Refuse(absl::StatusCode::kUnimplemented, field, text);
}
absl::Status NotFound(absl::string_view field, absl::string_view text) {
  return Refuse(absl::StatusCode::kNotFound, field, text);
}
absl::Status AlreadyExists(absl::string_view field, absl::string_view text) {
  return Refuse(absl::StatusCode::kAlreadyExists, field, text);
}
absl::Status FailedPrecondition(absl::string_view field, absl::string_view text) {
  return Refuse(absl::StatusCode::kFailedPrecondition, field, text);
}
absl::Status PermissionDenied(absl::string_view field, absl::string_view text) {
  return Refuse(absl::StatusCode::kPermissionDenied, field, text);
}
absl::Status Unauthenticated(absl::string_view field, absl::string_view text) {
  return Refuse(absl::StatusCode::kUnauthenticated, field, text);
}
absl::Status ResourceExhausted(absl::string_view field, absl::string_view text, uint32_t retry_ms) {
  return Refuse(absl::StatusCode::kResourceExhausted, field, text, retry_ms);
}
absl::Status ShortOf(Shortage shortage, absl::string_view field, absl::string_view text,
                     uint32_t retry_ms) {
  return StatusOf(absl::StatusCode::kResourceExhausted, {.retry_ms = retry_ms,
                                                         .shortage = shortage,
                                                         .field = std::string(field),
                                                         .text = std::string(text)});
}
absl::Status Aborted(absl::string_view field, absl::string_view text, uint32_t retry_ms) {
  return Refuse(absl::StatusCode::kAborted, field, text, retry_ms);
}
absl::Status Unavailable(absl::string_view field, absl::string_view text, uint32_t retry_ms) {
  return Refuse(absl::StatusCode::kUnavailable, field, text, retry_ms);
}
absl::Status Cancelled(absl::string_view text) {
  return Refuse(absl::StatusCode::kCancelled, "", text);
}
absl::Status DeadlineExceeded(absl::string_view field, absl::string_view text) {
  return Refuse(absl::StatusCode::kDeadlineExceeded, field, text);
}
absl::Status DataLoss(absl::string_view text) {
  return Refuse(absl::StatusCode::kDataLoss, "", text);
}
absl::Status Internal(absl::string_view text) {
  return Refuse(absl::StatusCode::kInternal, "", text);
}

std::string FieldOf(const absl::Status& status) { return DetailsOf(status).field; }

std::string TextOf(const absl::Status& status) { return DetailsOf(status).text; }

uint32_t RetryMsOf(const absl::Status& status) { return DetailsOf(status).retry_ms; }

Shortage ShortageOf(const absl::Status& status) { return DetailsOf(status).shortage; }

absl::Status PrefixField(absl::string_view path, const absl::Status& status) {
  if (status.ok() || path.empty()) return status;
  Details details = DetailsOf(status);
  details.field = JoinFields(Std(path), details.field);
  return StatusOf(status.code(), details);
}

absl::Status ReplaceField(absl::string_view field, const absl::Status& status) {
  if (status.ok()) return status;
  Details details = DetailsOf(status);
  details.field = std::string(field);
  return StatusOf(status.code(), details);
}

absl::Status ReplaceText(absl::string_view text, const absl::Status& status) {
  if (status.ok()) return status;
  Details details = DetailsOf(status);
  details.text = std::string(text);
  return StatusOf(status.code(), details);
}

absl::Status MoveField(absl::string_view from, absl::string_view to, const absl::Status& status) {
  if (status.ok()) return status;
  const std::string field = FieldOf(status);
  if (!absl::StartsWith(field, from)) return status;
  const std::string rest = field.substr(from.size());
  if (!rest.empty() && rest.front() != '.' && rest.front() != '[') return status;
  return ReplaceField(absl::StrCat(to, rest), status);
}

}  // namespace pqcached::kvstore
