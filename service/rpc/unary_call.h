// Unary calls whose answers are counted until their clients have read them.
#ifndef PQCACHED_SERVICE_RPC_UNARY_CALL_H_
#define PQCACHED_SERVICE_RPC_UNARY_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "service/base/alarms.h"

namespace pqcached::service {

// Bytes of the answers of each tenant that its clients have not read yet: they are memory of the
// worker, and a client that reads nothing would take all of it. Thread-safe.
class UnreadAnswers {
 public:
  // `most_bytes`: of one tenant, which may have one answer of any size.
  explicit UnreadAnswers(size_t most_bytes) : most_bytes_(most_bytes) {}

  // Counts an answer. Sets *is_crowded if more than half of the limit is taken then. Errors:
  // kResourceExhausted (max_message_bytes).
  absl::Status Take(const std::string& tenant, size_t bytes, bool* is_crowded);
  void Give(const std::string& tenant, size_t bytes);
  size_t BytesOf(const std::string& tenant) const;

 private:
  const size_t most_bytes_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, size_t> bytes_ ABSL_GUARDED_BY(mutex_);  // none is 0
};

// A unary call, which gRPC destroys by OnDone. It is cancelled when its client does not read a
// answer in time that is large, or one of many.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  UnaryCall(grpc::CallbackServerContext* context, Alarms& alarms, UnreadAnswers& unread);

  // Records that the answer was counted for a tenant (UnreadAnswers::Take); before FinishWithin.
  void SetCounted(std::string tenant, size_t bytes, bool is_crowded);
  // Finishes the call. `max_unread`: the longest time until the answer is read.
  void FinishWithin(absl::Duration max_unread, const absl::Status& status);

  void OnDone() override;

 private:
  // Outlives the call as long as its action runs.
  struct Unread {
    absl::Mutex mutex;
    grpc::CallbackServerContext* context ABSL_GUARDED_BY(mutex);  // null: the call is done
  };

  UnreadAnswers& unread_;
  std::string tenant_;
  size_t bytes_ = 0;
  bool is_crowded_ = false;
  const std::shared_ptr<Unread> state_;
  Alarm alarm_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_UNARY_CALL_H_
