// Alarms runs actions at given times of the steady clock, on one thread of its own.
//
// grpc::Alarm is not used, because all timers of gRPC wait on one absl condition variable until a
// wall-clock time: when the wall clock is set back by an hour, they fire an hour late.
//
// Thread-safe. Actions run without any lock of this class. A running action delays all other
// alarms, so it should be short.
#ifndef PQCACHED_SERVICE_ALARMS_H_
#define PQCACHED_SERVICE_ALARMS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include "kvstore/clock.h"
#include "kvstore/mutex.h"

namespace pqcached::service {

class Alarms {
 public:
  using Action = std::function<void()>;

  Alarms() : thread_([this] { Run(); }) {}
  // Stops the thread. Actions that have not started never run.
  ~Alarms();
  Alarms(const Alarms&) = delete;
  Alarms& operator=(const Alarms&) = delete;

 private:
  friend class Alarm;
  using Key = std::pair<kvstore::SteadyTime, uint64_t>;  // the number distinguishes equal times

  Key Add(kvstore::SteadyTime at, Action action);
  void Remove(const Key& key);
  void Run();

  kvstore::Mutex mutex_;
  kvstore::CondVar changed_;
  std::map<Key, Action> waiting_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
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
    key_ = alarms_.Add(at, std::move(action));
  }
  // Removes the pending action. Does not wait for an action that is running, so an action must own
  // (or share) all that it uses.
  void Cancel() { alarms_.Remove(key_); }

 private:
  Alarms& alarms_;
  Alarms::Key key_;  // the key of no alarm until Set
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_ALARMS_H_
