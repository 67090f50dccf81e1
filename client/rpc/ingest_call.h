// IngestCall: one Ingest stream. Rows are packed straight into what gRPC sends: as protobuf messages they
// would be copied once more. The wire is that of v1::IngestRequest.
//
// Single-thread.
#ifndef PQCACHED_CLIENT_RPC_INGEST_CALL_H_
#define PQCACHED_CLIENT_RPC_INGEST_CALL_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>

#include "client/remote.h"
#include "client/rpc/pending_call.h"
#include "pqcached/v1/kv_cache.pb.h"

namespace pqcached::client {

// An IngestRequest with rows by staging reference.
grpc::ByteBuffer StagedRequestOf(const RowBlock& rows, uint64_t first_position);

// An IngestRequest with the rows of tokens [begin, end). REQUIRES: no staging.
grpc::ByteBuffer IngestRequestOf(const RowBlock& rows, uint64_t begin, uint64_t end,
                                 uint64_t first_position);

class IngestCall {
 public:
  // `context` has a deadline. `left_behind` outlives this.
  IngestCall(const std::shared_ptr<grpc::Channel>& channel,
             std::shared_ptr<grpc::ClientContext> context, uint64_t sequence_id,
             LeftBehind* left_behind);
  // Cancels the call when it is not finished.
  ~IngestCall();

  // Waits for the message before. False when the call has ended: Finish tells why.
  bool Write(const grpc::ByteBuffer& message);

  // False when the call has ended, whatever was written. Does not wait.
  bool Stands();

  grpc::Status Finish();

 private:
  // What gRPC holds meanwhile.
  struct Held final : PendingCall {
    using PendingCall::PendingCall;

    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream;
    grpc::ByteBuffer answer;
    grpc::Status status;
  };

  // Waits until nothing but the answer is under way; false when the call is broken.
  bool Settle();
  // An operation other than the read of the answer begins.
  void Begin();
  // What the queue gave.
  void Note(const void* tag, bool ok);
  grpc::Status TakeStatus();

  LeftBehind* const left_behind_;
  grpc::GenericStub stub_;
  std::unique_ptr<Held> held_;
  bool writing_ = false;  // an operation other than the read of the answer is under way
  bool reading_ = false;  // the answer
  bool answered_ = false;
  bool broken_ = false;
  bool finished_ = false;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_INGEST_CALL_H_
