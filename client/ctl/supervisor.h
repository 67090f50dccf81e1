// The supervisor of a sidecar, which can be reached when no worker serves.
//
// It has two sockets next to that of the sidecar (service/supervise): ".status" answers each
// connection with one line of JSON, and ".supervisor" accepts messages of its own user and of root.
#ifndef PQCACHED_CLIENT_CTL_SUPERVISOR_H_
#define PQCACHED_CLIENT_CTL_SUPERVISOR_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "pqcached/client.hpp"

namespace pqcached::ctl {

using Json = nlohmann::json;

// Reads the state of the supervisor of the sidecar that listens on `endpoint` (unix:///path).
//
// Errors: PQC_INVALID_ARGUMENT  the endpoint is no unix socket
//         PQC_UNAVAILABLE       no supervisor answers, or this user may not connect
Result<Json> ReadSupervisor(const std::string& endpoint);

// Sends an operator's choice ("retry" or "discard"), which the supervisor applies before it answers
// the next ReadSupervisor. Errors: as ReadSupervisor.
Status SendChoice(const std::string& endpoint, const std::string& choice);

}  // namespace pqcached::ctl

#endif  // PQCACHED_CLIENT_CTL_SUPERVISOR_H_
