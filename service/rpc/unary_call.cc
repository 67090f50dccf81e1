#include "service/rpc/unary_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvstore/clock.h"
#include "service/base/refusal.h"
#include "service/rpc/grpc_status.h"

namespace pqcached::service {
namespace {

// Smaller answers lie in the buffers of the connection, or count for little.
constexpr size_t kTimedBytes = size_t{64} << 10;

}  // namespace

absl::Status UnreadAnswers::Take(const std::string& tenant, size_t bytes, bool* is_crowded) {
  *is_crowded = false;
  if (bytes == 0) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  const auto found = bytes_.find(tenant);
  const size_t held = found == bytes_.end() ? 0 : found->second;
  if (held > 0 && held + bytes > most_bytes_) {
    return ResourceExhausted(
        "max_message_bytes",
        absl::StrCat("clients of tenant ", tenant, " have not read ", held,
                     " bytes of answers; with ", bytes, " more it must be at most ", most_bytes_),
        kRetryQueue);
  }
  bytes_[tenant] = held + bytes;
  *is_crowded = held + bytes > most_bytes_ / 2;
  return absl::OkStatus();
}

void UnreadAnswers::Give(const std::string& tenant, size_t bytes) {
  if (bytes == 0) return;
  absl::MutexLock lock(&mutex_);
  const auto found = bytes_.find(tenant);
  found->second -= bytes;
  if (found->second == 0) bytes_.erase(found);
}

size_t UnreadAnswers::BytesOf(const std::string& tenant) const {
  absl::MutexLock lock(&mutex_);
  const auto found = bytes_.find(tenant);
  return found == bytes_.end() ? 0 : found->second;
}

UnaryCall::UnaryCall(grpc::CallbackServerContext* context, Alarms& alarms, UnreadAnswers& unread)
    : unread_(unread), state_(std::make_shared<Unread>()), alarm_(alarms) {
  absl::MutexLock lock(&state_->mutex);
  state_->context = context;
}

void UnaryCall::SetCounted(std::string tenant, size_t bytes, bool is_crowded) {
  is_crowded_ = is_crowded;
  tenant_ = std::move(tenant);
  bytes_ = bytes;
}

void UnaryCall::FinishWithin(absl::Duration max_unread, const absl::Status& status) {
  if (bytes_ >= kTimedBytes || is_crowded_) {
    alarm_.Set(kvstore::SteadyTime::Now() + max_unread, [state = state_] {
      absl::MutexLock lock(&state->mutex);
      if (state->context != nullptr) state->context->TryCancel();
    });
  }
  Finish(ToGrpc(status));  // may destroy the object
}

void UnaryCall::OnDone() {
  {
    absl::MutexLock lock(&state_->mutex);
    state_->context = nullptr;
  }
  unread_.Give(tenant_, bytes_);
  delete this;
}

}  // namespace pqcached::service
