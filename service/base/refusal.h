// Refusals in the service: those of kvstore/refusal.h, and two that many requests share.
//
// Pure functions; thread-safe.
#ifndef PQCACHED_SERVICE_BASE_REFUSAL_H_
#define PQCACHED_SERVICE_BASE_REFUSAL_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kvstore/refusal.h"

namespace pqcached::service {

using kvstore::Aborted;
using kvstore::AlreadyExists;
using kvstore::Cancelled;
using kvstore::DataLoss;
using kvstore::DeadlineExceeded;
using kvstore::FailedPrecondition;
using kvstore::FieldOf;
using kvstore::Internal;
using kvstore::InvalidArgument;
using kvstore::kNoRetry;
using kvstore::kRetryConflict;
using kvstore::kRetryMemory;
using kvstore::kRetryQueue;
using kvstore::MoveField;
using kvstore::NotFound;
using kvstore::OutOfRange;
using kvstore::PermissionDenied;
using kvstore::PrefixField;
using kvstore::Refuse;
using kvstore::ReplaceField;
using kvstore::ResourceExhausted;
using kvstore::RetryMsOf;
using kvstore::Shortage;
using kvstore::ShortageOf;
using kvstore::ShortOf;
using kvstore::TextOf;
using kvstore::Unauthenticated;
using kvstore::Unavailable;
using kvstore::Unimplemented;

// Returns kUnimplemented about `field`, which the proto reserves for a later version.
absl::Status UnimplementedField(absl::string_view field);

// Checks the number of elements of a repeated field.
//
// Errors: kInvalidArgument  `count` is not in 1..limit
absl::Status CheckCount(absl::string_view field, int count, int limit);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_REFUSAL_H_
