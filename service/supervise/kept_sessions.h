// Names of the descriptors that a worker keeps for each local session beyond its own end.
//
//   control.<boot id>.<n>  the session's control memory, in which the supervisor or the next worker
//                          marks the worker's end, and which lists the pools that the client has
//                          received
//   socket.<boot id>.<n>   the broker's connection; its end shows that the client has unmapped all
//                          memory that it received over it, whichever worker runs at that time
//   staging.<boot id>.<n>  the session's staging ring, which a worker frees when that connection
//                          has ended, although the client may still hold a descriptor of the ring
//
// Thread-safe: functions of their arguments.
#ifndef PQCACHED_SERVICE_SUPERVISE_KEPT_SESSIONS_H_
#define PQCACHED_SERVICE_SUPERVISE_KEPT_SESSIONS_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "service/supervise/notify.h"

namespace pqcached::service {

std::string ControlName(absl::string_view boot_id, uint64_t session_number);
std::string SocketName(absl::string_view boot_id, uint64_t session_number);
std::string StagingName(absl::string_view boot_id, uint64_t session_number);
// Convert between the names of a staging ring and of the connection over which the client received
// it.
std::string SocketNameOfStaging(absl::string_view staging_name);
std::string StagingNameOfSocket(absl::string_view socket_name);
// Do the same for the control memory of a session and its connection.
std::string SocketNameOfControl(absl::string_view control_name);
std::string ControlNameOfSocket(absl::string_view socket_name);
// Reads the session number from a name of any kind. Returns false when the name has none.
bool SessionNumberOf(absl::string_view name, uint64_t& session_number);
bool IsControlName(absl::string_view name);
bool IsSocketName(absl::string_view name);
bool IsStagingName(absl::string_view name);

// Notifies the client of a worker that has ended: marks the control memory, or ends the stream that
// the client reads from the connection. May be repeated.
//
// REQUIRES: the worker that wrote to the descriptor has ended.
void EndKeptSession(absl::string_view name, int descriptor);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SUPERVISE_KEPT_SESSIONS_H_
