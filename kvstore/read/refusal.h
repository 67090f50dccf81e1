// A Refusal says why a call failed: the status code, the path of the refused field, the reason, and
// when it is worth repeating the call.
//
// It is the plain form of a refusal, for code that has no absl: the client, and the checks that the
// client and the sidecar share. kvstore/refusal.h holds the same four values in an absl::Status.
// Code decides by `code`, `field` and `retry_ms`; the text is for people, and no code looks into
// it.
//
//     refusal->Set(StatusCode::kInvalidArgument, "budget.token_ratio", "1.5, must lie in (0, 1]");
//     // message(): "budget.token_ratio: 1.5, must lie in (0, 1]"
//
// A value; thread-compatible.
#ifndef PQCACHED_KVSTORE_READ_REFUSAL_H_
#define PQCACHED_KVSTORE_READ_REFUSAL_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace pqcached::kvstore {

// The canonical status codes that checks shared with the client use; a Refusal may have any other,
// too. The numbers are those of gRPC, absl::StatusCode and pqc_status.
enum class StatusCode : uint32_t {
  kOk = 0,
  kInvalidArgument = 3,
  kNotFound = 5,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kDataLoss = 15,
};

// Retry times in milliseconds. A refusal that no repetition can change has kNoRetry.
inline constexpr uint32_t kNoRetry = 0;
inline constexpr uint32_t kRetryConflict = 10;  // a concurrent call holds what this call needs
inline constexpr uint32_t kRetryQueue = 10;     // a queue is full
inline constexpr uint32_t kRetryMemory = 1000;  // memory, or a slot of a limited table, is in use

struct Refusal {
  StatusCode code = StatusCode::kOk;
  std::string field;  // path in the request, such as "selection.excluded[2]"; empty = none
  std::string text;   // the value and the limit
  uint32_t retry_ms = kNoRetry;

  bool ok() const { return code == StatusCode::kOk; }
  void Set(StatusCode new_code, std::string_view new_field, std::string_view new_text);
  // Keeps the memory of the strings, so that clearing and setting again need not allocate.
  void Clear();
  std::string message() const;
};

// Returns the path of `field` inside of `path`: "items[2]" and "query.layer" make
// "items[2].query.layer"; "token_ids" and "[7]" make "token_ids[7]". Either may be empty.
std::string JoinFields(std::string_view path, std::string_view field);

// Writes the message that people read, "field: text" (or "text" without a field), and a terminating
// zero. Cuts what does not fit. Returns the length without the zero. Does not allocate.
//
// REQUIRES: `out` is not empty.
size_t WriteMessage(std::string_view field, std::string_view text, std::span<char> out);

// Returns the message that people read.
std::string MessageOf(std::string_view field, std::string_view text);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_REFUSAL_H_
