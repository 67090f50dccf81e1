#include "client/rpc/pending_call.h"

#include <utility>

namespace pqcached::client {
namespace {

// Time after the deadline for gRPC to report it: most overdue calls end within this time.
constexpr int64_t kGraceMs = 200;

}  // namespace

PendingCall::PendingCall(std::shared_ptr<grpc::ClientContext> context)
    : context_(std::move(context)) {}

PendingCall::~PendingCall() {
  queue_.Shutdown();
  void* tag = nullptr;
  for (bool ok = false; queue_.Next(&tag, &ok);) {
  }
}

bool PendingCall::Take(gpr_timespec until, void** tag, bool* ok) {
  if (queue_.AsyncNext(tag, ok, until) != grpc::CompletionQueue::GOT_EVENT) return false;
  --pending_operation_count_;
  return true;
}

bool PendingCall::Next(void** tag, bool* ok) {
  const gpr_timespec grace = gpr_time_from_millis(kGraceMs, GPR_TIMESPAN);
  if (!overdue_ && Take(gpr_time_add(context_->raw_deadline(), grace), tag, ok)) return true;
  overdue_ = true;
  return false;
}

bool PendingCall::TryNext(void** tag, bool* ok) {
  return Take(gpr_time_0(GPR_CLOCK_MONOTONIC), tag, ok);
}

grpc::Status Overdue() { return {grpc::StatusCode::DEADLINE_EXCEEDED, ""}; }

void AbandonedCalls::Add(std::unique_ptr<PendingCall> call) {
  call->context()->TryCancel();
  const base::MutexLock lock(&mutex_);
  FreeEnded();
  calls_.push_back(std::move(call));
}

void AbandonedCalls::FreeEnded() {
  std::erase_if(calls_, [](const std::unique_ptr<PendingCall>& call) {
    void* tag = nullptr;
    for (bool ok = false; call->has_pending_operations() && call->TryNext(&tag, &ok);) {
    }
    return !call->has_pending_operations();
  });
}

AbandonedCalls::~AbandonedCalls() {
  const base::MutexLock lock(&mutex_);
  FreeEnded();
  for (std::unique_ptr<PendingCall>& call : calls_) static_cast<void>(call.release());
}

}  // namespace pqcached::client
