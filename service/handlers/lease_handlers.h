// LeaseHandlers answers Attach and Detach (leases on mapped sequences), and refreshes the lease
// that other requests carry.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_HANDLERS_LEASE_HANDLERS_H_
#define PQCACHED_SERVICE_HANDLERS_LEASE_HANDLERS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kvstore/store.h"
#include "pqcached/v1/kv_cache.pb.h"
#include "service/handlers/caller.h"

namespace pqcached::service {

class LeaseHandlers {
 public:
  LeaseHandlers(kvstore::Store& store, uint64_t max_message_bytes)
      : store_(store), max_message_bytes_(max_message_bytes) {}

  absl::Status Attach(const Caller& caller, const v1::AttachRequest& request,
                      v1::AttachResponse* response);
  absl::Status Detach(const Caller& caller, const v1::DetachRequest& request, v1::DetachResponse*);

  // Checks that the session holds the lease, when one is given.
  //
  // Errors: kNotFound, kFailedPrecondition  the session does not hold the lease
  absl::Status Check(const Caller& caller, const v1::LeaseState& lease, const std::string& field);
  // Fills `attachment` with the sequence's segment map, when a lease is given whose known version
  // is older.
  void Fill(const Caller& caller, const v1::LeaseState& lease, v1::Attachment* attachment);

 private:
  kvstore::Store& store_;
  const uint64_t max_message_bytes_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_LEASE_HANDLERS_H_
