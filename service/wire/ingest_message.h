// IngestMessage is one received IngestRequest. Its rows are read where they were received, because
// protobuf would copy them into strings that it allocates again for each message.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_WIRE_INGEST_MESSAGE_H_
#define PQCACHED_SERVICE_WIRE_INGEST_MESSAGE_H_

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/values.h"
#include "pqcached/v1/kv_cache.pb.h"
#include "service/wire/staging_claims.h"

namespace pqcached::service {

class IngestMessage {
 public:
  // Parses the message in `received`, which must live until the next Parse, and replaces the
  // previous one.
  //
  // Errors: kInvalidArgument  it is not an IngestRequest
  absl::Status Parse(std::span<const std::byte> received);

  // Returns the message. The inline data of its chunk's keys and values is present but empty.
  const v1::IngestRequest& request() const { return request_; }

  // Returns the rows of the chunk, checked as by LayerRowsOf (wire.h). The result borrows from the
  // received bytes, from this object until the next Parse, and from `staging`.
  //
  // REQUIRES: request().has_chunk()
  absl::StatusOr<kvstore::LayerRows> Rows(uint64_t max_bytes, StagingClaims* staging) const;

 private:
  using Bytes = std::span<const std::byte>;

  v1::IngestRequest request_;
  std::string stripped_;
  Bytes keys_;
  Bytes values_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_WIRE_INGEST_MESSAGE_H_
