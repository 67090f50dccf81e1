// Caller is the client of one call, as a handler knows it.
//
// Handlers are functions of a caller and a request. They use no type of gRPC, so that tests and
// fuzz targets call them without a server.
#ifndef PQCACHED_SERVICE_HANDLERS_CALLER_H_
#define PQCACHED_SERVICE_HANDLERS_CALLER_H_

#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "kvstore/clock.h"
#include "service/handlers/rpcs.h"
#include "service/session/sessions.h"

namespace pqcached::service {

struct Caller {
  Role role = Role::kAnyone;
  std::string token;  // of the session; empty, like `session`, unless `role` is kTenant
  Session session;
  kvstore::SteadyTime deadline = kvstore::SteadyTime::InfiniteFuture();
  std::function<bool()> is_cancelled;  // whether the caller has given up; empty = never

  // Returns the tenant whose data the call reaches: kvstore::kAllTenants for operators, and a name
  // that no tenant has for callers without a session.
  std::string_view tenant() const;

  // Checks whether the caller still waits for the answer.
  //
  // Errors: kDeadlineExceeded, kCancelled  the caller no longer waits
  absl::Status Check() const;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_CALLER_H_
