// What a worker keeps of each local session beyond its own end, by name.
//
//   control.<boot id>.<n>  its control memory: whoever finds its worker dead says so in there
//   socket.<boot id>.<n>   the broker's connection: its end shows that the client has unmapped
//                          what came over it, whichever worker is alive then
//
// Thread-safe: functions of their arguments.
#ifndef PQCACHED_SERVICE_KEPT_SESSIONS_H_
#define PQCACHED_SERVICE_KEPT_SESSIONS_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "service/notify.h"

namespace pqcached::service {

std::string ControlName(absl::string_view boot_id, uint64_t session_number);
std::string SocketName(absl::string_view boot_id, uint64_t session_number);
// Of a name of either kind. False: it has none.
bool SessionNumberOf(absl::string_view name, uint64_t& session_number);
bool IsControlName(absl::string_view name);
bool IsSocketName(absl::string_view name);

// Tells the clients of a worker that has ended: their control memory says so, and their connections
// to it have nothing more to read. May be done again.
//
// REQUIRES: the worker that wrote them is gone.
void EndKeptSession(absl::string_view name, int descriptor);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_KEPT_SESSIONS_H_
