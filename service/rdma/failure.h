// Refusals for what RDMA reports: numbers of errors, completions, events and rejections.
//
// Pure functions; thread-safe.
#ifndef PQCACHED_SERVICE_RDMA_FAILURE_H_
#define PQCACHED_SERVICE_RDMA_FAILURE_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "service/rdma/offer.h"
#include "service/rdma/verbs.h"

namespace pqcached::service::rdma {

// A peer that is gone may be back after this time.
inline constexpr uint32_t kRetryPeer = 1000;

// Returns the refusal of a failed call: kResourceExhausted where memory or objects are short, else
// kUnavailable. `call` is the name of the function.
absl::Status CallFailed(absl::string_view call, int error);

// Returns the refusal for a completion that is not a success: kAborted when the source refuses the
// key, kUnavailable when the connection or the peer is gone, else kInternal.
absl::Status CompletionFailed(const ibv_wc& completion);

// Returns the refusal for an event that ends a connection, or an attempt to connect.
absl::Status ConnectionFailed(const ConnectionEvent& event, uint32_t mtu_bytes);

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_SERVICE_RDMA_FAILURE_H_
