// Refusals in the service: those of kvstore/refusal.h, and their form in gRPC.
//
// A refusal leaves the sidecar as a grpc::Status whose message is readable and whose details are a
// google.rpc.Status, with a BadRequest for the field and a RetryInfo for the retry time, where the
// refusal has them.
//
// Pure functions; thread-safe.
#ifndef PQCACHED_SERVICE_REFUSAL_H_
#define PQCACHED_SERVICE_REFUSAL_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kvstore/refusal.h"

namespace grpc {
class Status;
}

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
using kvstore::TextOf;
using kvstore::Unauthenticated;
using kvstore::Unavailable;
using kvstore::Unimplemented;

// Returns `status` as gRPC sends it: the same code, the message, cut to what fits in HTTP/2
// headers, and the details.
grpc::Status ToGrpc(const absl::Status& status);

// Returns kUnimplemented about `field`, which the proto reserves for a later version.
absl::Status UnimplementedField(absl::string_view field);

// Checks the number of elements of a repeated field.
//
// Errors: kInvalidArgument  `count` is not in 1..limit
absl::Status CheckCount(absl::string_view field, int count, int limit);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_REFUSAL_H_
