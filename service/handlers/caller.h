// Caller is the client of one call, as a handler knows it.
//
// Handlers are functions of a caller and a request. They use no type of gRPC, so that tests and
// fuzz targets call them without a server.
#ifndef PQCACHED_SERVICE_HANDLERS_CALLER_H_
#define PQCACHED_SERVICE_HANDLERS_CALLER_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "kvstore/clock.h"
#include "service/session/sessions.h"

namespace pqcached::service {

struct Caller {
  std::string token;  // of the session; empty, like `session`, for calls that need none
  Session session;
  kvstore::SteadyTime deadline = kvstore::SteadyTime::InfiniteFuture();
  std::function<bool()> is_cancelled;  // whether the caller has given up; empty = never

  // Checks whether the caller still waits for the answer.
  //
  // Errors: kDeadlineExceeded, kCancelled  the caller no longer waits
  absl::Status Check() const;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_CALLER_H_
