// Limits of tenants as an operator types them: "sessions=20 staging=1gib".
//
// Thread-safe: a function of its arguments.
#ifndef PQCACHED_CLIENT_CTL_LIMITS_H_
#define PQCACHED_CLIENT_CTL_LIMITS_H_

#include <string>
#include <vector>

#include "client/ctl/report.h"
#include "pqcached/client.hpp"

namespace pqcached::ctl {

// Returns the message TenantLimits of the proto. A number may end in kib, mib, gib or tib.
//
// Errors: PQC_INVALID_ARGUMENT  no limit, one without a name of TenantLimits, or with a number that
//                               is none
Result<Json> ParseLimits(const std::vector<std::string>& texts);

}  // namespace pqcached::ctl

#endif  // PQCACHED_CLIENT_CTL_LIMITS_H_
