// Alarms runs actions at given times of the steady clock, on one thread of its own.
//
// grpc::Alarm is not used, because all timers of gRPC wait on one absl condition variable until a
// wall-clock time: when the wall clock is set back by an hour, they fire an hour late.
//
// Thread-safe. Actions run without any lock of this class. A running action delays all other
// alarms, so it should be short.
#ifndef PQCACHED_SERVICE_BASE_ALARMS_H_
#define PQCACHED_SERVICE_BASE_ALARMS_H_

#include <utility>

#include "kernels/base/worker.h"
#include "kvstore/clock.h"

namespace pqcached::service {

class Alarms {
 public:
  using Action = base::Worker::Task;

  Alarms() = default;
  // Stops the thread. Actions that have not started never run.
  ~Alarms() { worker_.Stop(); }
  Alarms(const Alarms&) = delete;
  Alarms& operator=(const Alarms&) = delete;

 private:
  friend class Alarm;

  base::Worker worker_{"pqc-alarms"};
};

// Alarm is a timer with at most one pending action. The Alarms object must outlive it.
//
// Thread-compatible: an action that sets its alarm again must hold the lock under which the alarm
// was set.
class Alarm {
 public:
  explicit Alarm(Alarms& alarms) : alarms_(alarms) {}
  ~Alarm() { Cancel(); }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  // Calls `action` once, not before `at`. Replaces a pending action.
  void Set(kvstore::SteadyTime at, Alarms::Action action) {
    Cancel();
    timer_ = alarms_.worker_.RunAt(at.ToChrono(), std::move(action));
  }
  // Removes the pending action. Does not wait for an action that is running, so an action must own
  // (or share) all that it uses.
  void Cancel() { alarms_.worker_.Cancel(timer_); }

 private:
  Alarms& alarms_;
  base::Worker::TimerId timer_;  // of no action until Set
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_ALARMS_H_
