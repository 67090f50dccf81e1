// Event: something that happens once, and that can be waited for by a clock that nobody sets.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_EVENT_H_
#define PQCACHED_SERVICE_EVENT_H_

#include "absl/time/time.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"

namespace pqcached::service {

class Event {
 public:
  void Happen() {
    const kvstore::MutexLock lock(&mutex_);
    happened_ = true;
    changed_.SignalAll();  // under the lock: who waits may destroy this as soon as it is free
  }
  // Returns whether it has happened.
  bool WaitFor(absl::Duration timeout) {
    const kvstore::SteadyTime until = kvstore::SteadyTime::Now() + timeout;
    const kvstore::MutexLock lock(&mutex_);
    while (!happened_ && kvstore::SteadyTime::Now() < until) changed_.WaitUntil(&mutex_, until);
    return happened_;
  }

 private:
  kvstore::Mutex mutex_;
  kvstore::CondVar changed_;
  bool happened_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_EVENT_H_
