// Conversions between gRPC's statuses and times and ours.
//
// A refusal leaves the sidecar as a grpc::Status whose message is readable and whose details are a
// google.rpc.Status, with a BadRequest for the field and a RetryInfo for the retry time, where the
// refusal has them.
//
// Pure functions; thread-safe.
#ifndef PQCACHED_SERVICE_RPC_GRPC_STATUS_H_
#define PQCACHED_SERVICE_RPC_GRPC_STATUS_H_

#include <grpc/support/time.h>

#include "absl/status/status.h"
#include "kvstore/clock.h"

namespace grpc {
class Status;
}

namespace pqcached::service {

// Returns `status` as gRPC sends it: the same code, the message, cut to what fits in HTTP/2
// headers, and the details.
grpc::Status ToGrpc(const absl::Status& status);

// Convert between gRPC's time and SteadyTime. gRPC measures deadlines on the same clock as
// SteadyTime; the conversion avoids std::chrono::system_clock, gRPC's other representation, which
// would make deadlines follow jumps of the wall clock.
kvstore::SteadyTime SteadyTimeOf(gpr_timespec time);
gpr_timespec ToGrpc(kvstore::SteadyTime time);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_GRPC_STATUS_H_
