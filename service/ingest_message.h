// IngestMessage: one IngestRequest as it came from the wire. Its rows are looked at where gRPC has put
// them: protobuf would copy them into strings that it allocates anew for each message.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_INGEST_MESSAGE_H_
#define PQCACHED_SERVICE_INGEST_MESSAGE_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/store.h"
#include "pqcached/v1/kv_cache.pb.h"
#include "service/staging_claims.h"

namespace pqcached::service {

class IngestMessage {
 public:
  // Takes the message out of `received`, in place of the one before.
  //
  // Errors: kInvalidArgument  it is no IngestRequest
  absl::Status Parse(grpc::ByteBuffer* received);

  // All of the message but the inline data of its chunk's keys and values, which is there, but empty.
  const v1::IngestRequest& request() const { return request_; }

  // Of the chunk, checked as by LayerRowsOf (wire.h). REQUIRES: request().has_chunk()
  // Borrows from this until the next Parse, and from `staging`.
  absl::StatusOr<kvstore::LayerRows> Rows(uint64_t max_bytes, StagingClaims* staging) const;

 private:
  using Bytes = std::span<const std::byte>;

  // The message in one piece; copied into `joined_` when it came in several.
  Bytes Join(grpc::ByteBuffer* received);

  v1::IngestRequest request_;
  std::vector<grpc::Slice> slices_;
  std::unique_ptr<std::byte[]> joined_;
  size_t joined_capacity_ = 0;
  std::string stripped_;
  Bytes keys_;
  Bytes values_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_INGEST_MESSAGE_H_
