// A take-over moves all kept descriptors from one supervisor to another one on the same socket.
//
// The new supervisor sends a datagram to the notify socket of the old one, with one end of a socket
// pair attached. The old supervisor stops its worker, sends every descriptor under its name,
// reports that it is done, releases its claims, and closes its end; only then does the new
// supervisor start.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_SUPERVISE_TAKE_OVER_H_
#define PQCACHED_SERVICE_SUPERVISE_TAKE_OVER_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "service/supervise/notify.h"

namespace pqcached::service {

inline constexpr char kTakeOverField[] = "TAKE_OVER";

// Asks the supervisor at this notify socket for its descriptors, and waits until it has released
// its claims.
//
// Errors: kNotFound          no supervisor listens there
//         kPermissionDenied  the supervisor belongs to another user
//         kUnavailable       it does not answer within `timeout`, or refuses; it continues to serve
absl::StatusOr<KeptDescriptors> TakeOver(const std::string& socket_path, absl::Duration timeout);

// Sends all descriptors to the new supervisor, then the end mark. The caller closes `successor`
// afterwards.
//
// Errors: kUnavailable  the new supervisor has ended, or does not read
absl::Status SendKept(int successor, const KeptDescriptors& kept);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SUPERVISE_TAKE_OVER_H_
