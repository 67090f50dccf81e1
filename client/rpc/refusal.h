// Refusals between the client library and gRPC: the details that the sidecar sends, and those of
// refusals that this library makes itself.
//
// Pure functions; thread-safe.
#ifndef PQCACHED_CLIENT_RPC_REFUSAL_H_
#define PQCACHED_CLIENT_RPC_REFUSAL_H_

#include <grpcpp/support/status.h>

#include <cstdint>
#include <functional>
#include <string>

#include "client/base/remote.h"
#include "kvstore/read/refusal.h"

namespace pqcached::client {

using kvstore::kNoRetry;
using kvstore::kRetryConflict;
using kvstore::kRetryMemory;

// Returns a status in the form in which the sidecar sends refusals.
grpc::Status Refuse(grpc::StatusCode code, const std::string& field, const std::string& text,
                    uint32_t retry_ms = kNoRetry);

// Fills `refusal` with the details of `status`; with its message when it has none. UNAVAILABLE of
// gRPC itself (no details) is worth repeating: the sidecar may be restarting.
void ToRefusal(const grpc::Status& status, RefusalBuffer* refusal);

// Returns UNAVAILABLE: the worker that the arguments belong to (leases, staging) was replaced.
grpc::Status WorkerReplaced();

// Returns `status` with `text` and ": " before the text of its refusal.
grpc::Status PrefixText(const std::string& text, const grpc::Status& status);

// Returns `status` with items[number_of(i)] in place of items[i], or of the elements of another
// list, at the beginning of its field: for an RPC that was sent a part of the caller's items.
grpc::Status RenumberItem(const grpc::Status& status,
                          const std::function<uint32_t(uint32_t)>& number_of,
                          const std::string& list = "items");

// Returns the pause after which the sidecar says that a refused call may succeed; kNoRetry: none.
uint32_t RetryMsOf(const grpc::Status& status);

// Returns the field that the details name, or "".
std::string FieldOf(const grpc::Status& status);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_REFUSAL_H_
