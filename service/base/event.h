// Event is a one-shot notification. Its timeout is measured on the steady clock, which cannot be
// set.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_BASE_EVENT_H_
#define PQCACHED_SERVICE_BASE_EVENT_H_

#include "absl/time/time.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"

namespace pqcached::service {

class Event {
 public:
  void Notify() {
    const kvstore::MutexLock lock(&mutex_);
    notified_ = true;
    changed_.SignalAll();  // under the lock: the waiter may destroy this once it is free
  }
  // Waits at most `timeout` for the event. Returns whether it has happened.
  bool WaitFor(absl::Duration timeout) {
    const kvstore::SteadyTime until = kvstore::SteadyTime::Now() + timeout;
    const kvstore::MutexLock lock(&mutex_);
    while (!notified_ && kvstore::SteadyTime::Now() < until) changed_.WaitUntil(&mutex_, until);
    return notified_;
  }

 private:
  kvstore::Mutex mutex_;
  kvstore::CondVar changed_;
  bool notified_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_EVENT_H_
