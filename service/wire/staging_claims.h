// StagingClaims holds the slots of a session's staging ring that one call, or one message of a
// stream, uses. A slot is claimed at its first use and released with this object; no other call can
// use it in the meantime.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_WIRE_STAGING_CLAIMS_H_
#define PQCACHED_SERVICE_WIRE_STAGING_CLAIMS_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "kvstore/store.h"
#include "pqcached/v1/types.pb.h"

namespace pqcached::service {

class StagingClaims {
 public:
  StagingClaims(kvstore::Store& store, std::string session)
      : store_(store), session_(std::move(session)) {}

  // Returns the bytes that `reference` names, which the client may change at any time; the call may
  // write to them. All references of a call to one slot must have the same generation.
  //
  // Errors: kInvalidArgument, kFailedPrecondition, under `field`
  absl::StatusOr<std::span<std::byte>> Resolve(const v1::StagingReference& reference,
                                               const std::string& field);

 private:
  struct Claimed {
    uint64_t generation = 0;
    kvstore::StagedBytes staged;
  };

  kvstore::Store& store_;
  const std::string session_;
  std::map<uint32_t, Claimed> slots_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_WIRE_STAGING_CLAIMS_H_
