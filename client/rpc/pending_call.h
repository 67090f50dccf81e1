// PendingCall is a call that its caller can leave behind.
//
// After the deadline of a call, gRPC completes the call's operations only when the transport has
// written its buffered bytes. A stalled worker reads nothing, so a call that fills the socket would
// block its caller, and all others on that connection, until the worker is ended. A caller of a
// PendingCall waits until shortly after the deadline, and then leaves the call behind.
#ifndef PQCACHED_CLIENT_RPC_PENDING_CALL_H_
#define PQCACHED_CLIENT_RPC_PENDING_CALL_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/mutex.h"

namespace pqcached::client {

// Objects of the caller that gRPC uses: they are freed only after gRPC has completed all operations
// on them.
//
// Single-thread.
class PendingCall {
 public:
  explicit PendingCall(std::shared_ptr<grpc::ClientContext> context);
  // REQUIRES: no operation is in progress.
  virtual ~PendingCall();
  PendingCall(const PendingCall&) = delete;
  PendingCall& operator=(const PendingCall&) = delete;

  grpc::ClientContext* context() const { return context_.get(); }
  grpc::CompletionQueue* queue() { return &queue_; }

  // Counts an operation that has begun and whose tag the queue will return.
  void Begin() { ++pending_operation_count_; }
  bool has_pending_operations() const { return pending_operation_count_ > 0; }
  // Waits for the next completed operation. False when the call is overdue.
  bool Next(void** tag, bool* ok);
  // Like Next, until a time on gRPC's steady clock; the call does not become overdue.
  bool NextUntil(gpr_timespec until, void** tag, bool* ok) { return Take(until, tag, ok); }
  // Like Next, without waiting: false when no operation has completed.
  bool TryNext(void** tag, bool* ok);
  bool overdue() const { return overdue_; }

 private:
  bool Take(gpr_timespec until, void** tag, bool* ok);

  const std::shared_ptr<grpc::ClientContext> context_;
  grpc::CompletionQueue queue_;
  uint32_t pending_operation_count_ = 0;
  bool overdue_ = false;
};

grpc::Status Overdue();

// Calls that were left behind, until gRPC has completed their operations. Calls that are not
// complete when this object is destroyed are never freed, because gRPC may still write to them.
//
// Thread-safe.
class AbandonedCalls {
 public:
  AbandonedCalls() = default;
  ~AbandonedCalls();
  AbandonedCalls(const AbandonedCalls&) = delete;
  AbandonedCalls& operator=(const AbandonedCalls&) = delete;

  // Cancels the call and keeps it. Frees earlier calls that are complete.
  void Add(std::unique_ptr<PendingCall> call);

 private:
  void FreeEnded() PQCACHED_REQUIRES(mutex_);

  base::Mutex mutex_;
  std::vector<std::unique_ptr<PendingCall>> calls_ PQCACHED_GUARDED_BY(mutex_);
};

// Starts a unary call whose `reader` is prepared; `response` is part of the call.
template <class Call, class Response>
void Start(Call& call, Response* response) {
  call.reader->StartCall();
  call.Begin();
  call.reader->Finish(response, &call.status, &call);
}

// Waits for a unary call that was started. Returns false when it is overdue and was left behind.
template <class Call>
bool AwaitStarted(AbandonedCalls& left_behind, std::unique_ptr<Call>& call) {
  if (!call->has_pending_operations()) return true;
  void* tag = nullptr;
  bool ok = false;
  if (call->Next(&tag, &ok)) return true;
  left_behind.Add(std::move(call));
  return false;
}

// Starts a unary call and waits for it.
template <class Call, class Response>
bool Await(AbandonedCalls& left_behind, std::unique_ptr<Call>& call, Response* response) {
  Start(*call, response);
  return AwaitStarted(left_behind, call);
}

// State of a unary call of a stub.
template <class Response>
struct UnaryCall final : PendingCall {
  using PendingCall::PendingCall;

  Response response;
  grpc::Status status;
  std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> reader;
};

// Does what stub.Method(context, request, response) does, through its PrepareAsync form;
// DEADLINE_EXCEEDED when overdue.
template <class Stub, class Request, class Response>
grpc::Status CallUnary(AbandonedCalls& left_behind, Stub& stub,
                       std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> (Stub::*prepare)(
                           grpc::ClientContext*, const Request&, grpc::CompletionQueue*),
                       const std::shared_ptr<grpc::ClientContext>& context, const Request& request,
                       Response* response) {
  auto call = std::make_unique<UnaryCall<Response>>(context);
  call->reader = (stub.*prepare)(context.get(), request, call->queue());
  if (!Await(left_behind, call, &call->response)) return Overdue();
  *response = std::move(call->response);
  return call->status;
}

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_PENDING_CALL_H_
