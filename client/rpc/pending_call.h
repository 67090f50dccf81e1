// PendingCall: a call that need not outlast its caller.
//
// gRPC ends the operations of a call that is over its deadline only when the transport has written what it
// had in hand. A worker that stands still reads nothing, so that a call which fills the socket would hold
// up its caller, and all others on that connection, until somebody ends the worker. Who waits for a
// PendingCall waits until shortly after its deadline, and leaves it behind then.
#ifndef PQCACHED_CLIENT_RPC_PENDING_CALL_H_
#define PQCACHED_CLIENT_RPC_PENDING_CALL_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace pqcached::client {

// What gRPC still has of the caller's: nothing is freed before it has given all of it back.
//
// Single-thread.
class PendingCall {
 public:
  explicit PendingCall(std::shared_ptr<grpc::ClientContext> context);
  // REQUIRES: no operation is under way.
  virtual ~PendingCall();
  PendingCall(const PendingCall&) = delete;
  PendingCall& operator=(const PendingCall&) = delete;

  grpc::ClientContext* context() const { return context_.get(); }
  grpc::CompletionQueue* queue() { return &queue_; }

  // An operation has begun whose tag the queue will give.
  void Begin() { ++under_way_; }
  bool under_way() const { return under_way_ > 0; }
  // The next one that has ended. False when the call is overdue.
  bool Next(void** tag, bool* ok);
  // Likewise, without waiting: false when none has.
  bool TryNext(void** tag, bool* ok);
  bool overdue() const { return overdue_; }

 private:
  bool Take(gpr_timespec until, void** tag, bool* ok);

  const std::shared_ptr<grpc::ClientContext> context_;
  grpc::CompletionQueue queue_;
  uint32_t under_way_ = 0;
  bool overdue_ = false;
};

grpc::Status Overdue();

// Calls that were left behind, until gRPC lets go of them. When this ends before that, they are never
// freed: gRPC may still write to them.
//
// Thread-safe.
class LeftBehind {
 public:
  LeftBehind() = default;
  ~LeftBehind();
  LeftBehind(const LeftBehind&) = delete;
  LeftBehind& operator=(const LeftBehind&) = delete;

  // Cancels it. Frees those before whose time has come.
  void Add(std::unique_ptr<PendingCall> call);

 private:
  void FreeEnded();

  std::mutex mutex_;
  std::vector<std::unique_ptr<PendingCall>> calls_;  // under mutex_
};

// Carries out a unary call whose `reader` is prepared; `response` is part of it. False when it is overdue: then
// it is left behind.
template <class Call, class Response>
bool Await(LeftBehind& left_behind, std::unique_ptr<Call>& call, Response* response) {
  call->reader->StartCall();
  call->Begin();
  call->reader->Finish(response, &call->status, call.get());
  void* tag = nullptr;
  bool ok = false;
  if (call->Next(&tag, &ok)) return true;
  left_behind.Add(std::move(call));
  return false;
}

// What a unary call of a stub gives to hold.
template <class Response>
struct UnaryCall final : PendingCall {
  using PendingCall::PendingCall;

  Response response;
  grpc::Status status;
  std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> reader;
};

// As stub.Method(context, request, response), by its PrepareAsync form; DEADLINE_EXCEEDED when overdue.
template <class Stub, class Request, class Response>
grpc::Status CallUnary(LeftBehind& left_behind, Stub& stub,
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
