// A refusal as an absl::Status: the code and the message of the status, and a payload that holds
// the path of the refused field, the bare text and the retry time.
//
// All errors of kvstore/ and service/ are made here, so that each has a field where there is one,
// and no code has to look for it in the message:
//
//     return OutOfRange("token_count", absl::StrCat(count, ", must be at most ", stored));
//     ...
//     if (FieldOf(status) == "token_count") ...
//     return PrefixField("items[2]", status);  // "items[2].token_count: 12, must be at most 10"
//
// Fields are paths relative to the arguments of the call that failed, in the words of the proto.
// Texts begin with the refused value.
//
// Pure functions; thread-safe.
#ifndef PQCACHED_KVSTORE_REFUSAL_H_
#define PQCACHED_KVSTORE_REFUSAL_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kvstore/read/refusal.h"

namespace pqcached::kvstore {

// Returns a status of `code` about `field` (empty = about no field).
//
// REQUIRES: code is not kOk.
absl::Status Refuse(absl::StatusCode code, absl::string_view field, absl::string_view text,
                    uint32_t retry_ms = kNoRetry);
absl::Status ToStatus(const Refusal& refusal);
Refusal RefusalOf(const absl::Status& status);

// The arguments are at fault; no repetition succeeds.
absl::Status InvalidArgument(absl::string_view field, absl::string_view text);
absl::Status OutOfRange(absl::string_view field, absl::string_view text);
absl::Status Unimplemented(absl::string_view field, absl::string_view text);
// The state does not allow the call; another call has to change it first.
absl::Status NotFound(absl::string_view field, absl::string_view text);
absl::Status AlreadyExists(absl::string_view field, absl::string_view text);
absl::Status FailedPrecondition(absl::string_view field, absl::string_view text);
absl::Status PermissionDenied(absl::string_view field, absl::string_view text);
absl::Status Unauthenticated(absl::string_view field, absl::string_view text);
// Something is in use; each caller says when a repetition may succeed (kNoRetry: never).
absl::Status ResourceExhausted(absl::string_view field, absl::string_view text, uint32_t retry_ms);
absl::Status Aborted(absl::string_view field, absl::string_view text, uint32_t retry_ms);
absl::Status Unavailable(absl::string_view field, absl::string_view text, uint32_t retry_ms);
// The part of the environment that has too little of something.
enum class Shortage : uint8_t {
  kNone,
  kMemory,       // of the machine, of a control group or of a file system
  kDescriptors,  // of the process or of the machine
};
// Returns kResourceExhausted, because the environment of the sidecar has no more: no limit of the
// configuration is the cause, and no client. ShortageOf finds such refusals, so that the service
// names them in its log.
absl::Status ShortOf(Shortage shortage, absl::string_view field, absl::string_view text,
                     uint32_t retry_ms);
// The call ended early.
absl::Status Cancelled(absl::string_view text);
absl::Status DeadlineExceeded(absl::string_view field, absl::string_view text);
// The sidecar is at fault.
absl::Status DataLoss(absl::string_view text);
absl::Status Internal(absl::string_view text);

// Returns the path of the refused field, or "" when the status has none.
std::string FieldOf(const absl::Status& status);
// Returns the message without the field.
std::string TextOf(const absl::Status& status);
// Returns the time after which a repetition may succeed; 0 = repeating the call is not worthwhile.
uint32_t RetryMsOf(const absl::Status& status);
// Returns the shortage that has caused the refusal.
Shortage ShortageOf(const absl::Status& status);

// Returns `status` with `path` before the path of its field. OK stays OK.
absl::Status PrefixField(absl::string_view path, const absl::Status& status);
// Returns `status` with `field` as its field, in place of its own. OK stays OK.
absl::Status ReplaceField(absl::string_view field, const absl::Status& status);
// Returns `status` with `text` as its text, in place of its own. OK stays OK.
absl::Status ReplaceText(absl::string_view text, const absl::Status& status);
// Returns `status` with the path `from` at the beginning of its field replaced by `to`. Other
// fields stay: MoveField("rows", "rows[3]", ...) makes "rows[3].keys" of "rows.keys".
absl::Status MoveField(absl::string_view from, absl::string_view to, const absl::Status& status);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_REFUSAL_H_
