// Take-over: one supervisor gets from another, on the same socket, what that holds.
//
// The new one asks by a datagram to the notify socket of the old one, with one end of a socket pair
// beside it. The old one stops its worker, sends every descriptor under its name, says that it is done,
// gives up its claims, and closes its end: only then does the new one begin.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_TAKE_OVER_H_
#define PQCACHED_SERVICE_TAKE_OVER_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "service/notify.h"

namespace pqcached::service {

inline constexpr char kTakeOverField[] = "TAKE_OVER";

// Asks the supervisor whose notify socket this is, and waits until it has given up its claims.
//
// Errors: kNotFound          nobody is there
//         kPermissionDenied  of another user
//         kUnavailable       it does not answer within `timeout`, or refuses; it goes on
absl::StatusOr<KeptDescriptors> TakeOver(const std::string& socket_path, absl::Duration timeout);

// The other side: sends all, and that it is done. The caller closes `successor` afterwards.
//
// Errors: kUnavailable  the new one is gone, or does not read
absl::Status SendKept(int successor, const KeptDescriptors& kept);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_TAKE_OVER_H_
