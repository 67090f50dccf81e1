// Operations are calls that begin on the engine's thread and are made on threads of the client, a
// small pool that starts with the first operation.
#ifndef PQCACHED_CLIENT_BASE_OPERATIONS_H_
#define PQCACHED_CLIENT_BASE_OPERATIONS_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "client/base/events.h"
#include "client/base/remote.h"
#include "kernels/base/mutex.h"
#include "pqcached/client.h"
#include "pqcached/operation.h"

namespace pqcached::client {

// One operation. Thread-safe. Shared by its handle and, until its end, by the pool.
class Operation {
 public:
  enum class Kind { kShort, kBuild };
  // Does the work; looks at cancelled() between parts of it. Destroyed before the end is known.
  using Body = std::function<pqc_status(Operation& operation)>;

  struct Options {
    Kind kind = Kind::kShort;
    const void* sequence = nullptr;  // to compare with
    uint32_t timeout_ms = 0;         // default of Wait
    uint32_t layer_count = 0;        // of a load
    std::shared_ptr<Events> events;  // the client's; null = its end is no event
  };
  Operation(Options options, Body body);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  Kind kind() const { return options_.kind; }
  const void* sequence() const { return options_.sequence; }
  bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }
  void SetHandle(pqc_operation* handle, void* context) { event_.SetOperation(handle, context); }

  // Runs the body, unless the operation has ended.
  void Run();
  // Ends the operation if it has not begun; asks the body to end otherwise.
  void Cancel();
  // Cancels the operation because its client is being closed.
  void CancelByClose();
  // Sets *done to whether the operation has ended, and returns its status if it has.
  pqc_status Poll(bool* done);
  // Waits like convention 7 of client.h, and returns the operation's status.
  pqc_status Wait(uint32_t timeout_ms);
  // Notes that one more layer of a load is done.
  void AddLayer();
  // Waits like Wait until that many layers are done. Returns the operation's status if it has ended
  // before.
  pqc_status WaitLayers(uint32_t count, uint32_t timeout_ms);
  // Removes the operation's event.
  void RemoveEvent() {
    if (options_.events) options_.events->Remove(event_);
  }

 private:
  enum class Phase { kWaiting, kRunning, kDone };

  void End(pqc_status status, const RefusalBuffer& refusal);
  // Returns the time that a wait may take.
  std::chrono::milliseconds WaitOf(uint32_t timeout_ms) const;
  pqc_status ReportLocked() const PQCACHED_REQUIRES(mutex_);

  const Options options_;
  std::atomic<bool> cancelled_ = false;
  std::atomic<bool> client_closed_ = false;
  Events::Entry event_{PQC_EVENT_OPERATION};
  Body body_;  // used by the thread that runs or ends the operation
  base::Mutex mutex_;
  base::CondVar done_;  // the end, or one more layer
  Phase phase_ PQCACHED_GUARDED_BY(mutex_) = Phase::kWaiting;
  uint32_t layers_done_ PQCACHED_GUARDED_BY(mutex_) = 0;
  pqc_status status_ PQCACHED_GUARDED_BY(mutex_) = PQC_OK;
  RefusalBuffer refusal_ PQCACHED_GUARDED_BY(mutex_);
};

// The pool of one client. Thread-safe.
class Operations {
 public:
  Operations() = default;
  ~Operations() { Stop(); }
  Operations(const Operations&) = delete;
  Operations& operator=(const Operations&) = delete;

  // Queues an operation, and never waits.
  //
  // Errors: PQC_RESOURCE_EXHAUSTED (too many wait; no thread), PQC_FAILED_PRECONDITION (stopped)
  pqc_status Start(const std::shared_ptr<Operation>& operation);
  // Cancels the operations of a sequence that is being dropped.
  void CancelOf(const void* sequence);
  // Cancels all operations, and waits until those that run have ended. Calls end_waits after they
  // are cancelled, if there are any.
  void Stop(const std::function<void()>& end_waits = {});

 private:
  using List = std::deque<std::shared_ptr<Operation>>;

  // Takes the next operation that may run; null when there is none.
  std::shared_ptr<Operation> TakeLocked() PQCACHED_REQUIRES(mutex_);
  void Serve();
  // Returns all operations that have not ended, those that run first.
  List AllLocked() const PQCACHED_REQUIRES(mutex_);

  base::Mutex mutex_;
  base::CondVar changed_;
  List waiting_ PQCACHED_GUARDED_BY(mutex_);
  List running_ PQCACHED_GUARDED_BY(mutex_);
  uint32_t idle_count_ PQCACHED_GUARDED_BY(mutex_) = 0;
  bool stop_ PQCACHED_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_ PQCACHED_GUARDED_BY(mutex_);
};

}  // namespace pqcached::client

struct pqc_operation {
  std::shared_ptr<pqcached::client::Operation> operation;  // shared with the pool
};

#endif  // PQCACHED_CLIENT_BASE_OPERATIONS_H_
