// IngestCall is one Ingest stream. Rows are packed straight into the buffers that gRPC sends,
// because protobuf messages would copy them once more. The wire format is that of
// v1::IngestRequest.
//
// Single-thread.
#ifndef PQCACHED_CLIENT_RPC_INGEST_CALL_H_
#define PQCACHED_CLIENT_RPC_INGEST_CALL_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>

#include "client/base/remote.h"
#include "client/rpc/pending_call.h"
#include "pqcached/v1/kv_cache.pb.h"

namespace pqcached::client {

// Returns an IngestRequest with rows by staging reference.
grpc::ByteBuffer StagedRequestOf(const RowBlock& rows, uint64_t first_position);

// Returns an IngestRequest with the rows of tokens [begin, end). REQUIRES: no staging.
grpc::ByteBuffer IngestRequestOf(const RowBlock& rows, uint64_t begin, uint64_t end,
                                 uint64_t first_position);

// Returns an IngestRequest with the query samples of positions [begin, end).
grpc::ByteBuffer SampleRequestOf(const SampleBlock& samples, uint64_t begin, uint64_t end);

class IngestCall {
 public:
  // `names`: what the call records; null = none. REQUIRES: `context` has a deadline, and
  // `left_behind` outlives the object.
  IngestCall(const std::shared_ptr<grpc::Channel>& channel,
             std::shared_ptr<grpc::ClientContext> context, uint64_t sequence_id,
             const pqc_row_options* names, AbandonedCalls* left_behind);
  // Cancels the call if it is not finished.
  ~IngestCall();

  // Waits for the previous message, then starts to write. False when the call has ended: Finish
  // returns the reason.
  bool Write(const grpc::ByteBuffer& message);

  // Returns false when the call has ended, whatever was written. Does not wait.
  bool IsInProgress();

  grpc::Status Finish();

 private:
  // Objects that gRPC uses while operations are in progress.
  struct Held final : PendingCall {
    using PendingCall::PendingCall;

    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream;
    grpc::ByteBuffer answer;
    grpc::Status status;
  };

  // Waits until at most the read of the answer is in progress; false when the call is broken.
  bool WaitForWrite();
  // Counts an operation, other than the read of the answer, that begins.
  void Begin();
  // Records the completion that the queue returned for `tag`.
  void Note(const void* tag, bool ok);
  grpc::Status TakeStatus();

  AbandonedCalls* const abandoned_calls_;
  grpc::GenericStub stub_;
  std::unique_ptr<Held> held_;
  bool writing_ = false;  // an operation other than the read of the answer is in progress
  bool reading_ = false;  // the read of the answer is in progress
  bool answered_ = false;
  bool broken_ = false;
  bool finished_ = false;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_INGEST_CALL_H_
