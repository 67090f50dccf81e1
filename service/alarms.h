// Alarms calls back at a time of the steady clock, on one thread of its own.
//
// Why not grpc::Alarm: gRPC's timers all wait on one condition variable of absl, until a wall time. Set
// that clock back by an hour, and they come an hour late.
//
// Thread-safe. What is called back runs without a lock of this class, and holds up all other alarms:
// it should be short.
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
  // What has not come yet never comes.
  ~Alarms();
  Alarms(const Alarms&) = delete;
  Alarms& operator=(const Alarms&) = delete;

 private:
  friend class Alarm;
  using Key = std::pair<kvstore::SteadyTime, uint64_t>;  // the number tells equal times apart

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

// One alarm, set at most once at a time. Lives no longer than its Alarms.
//
// Thread-compatible: an action that sets it anew takes the lock under which it was set.
class Alarm {
 public:
  explicit Alarm(Alarms& alarms) : alarms_(alarms) {}
  ~Alarm() { Cancel(); }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  // Calls `action` once, not before `at`, in the place of what was set before.
  void Set(kvstore::SteadyTime at, Alarms::Action action) {
    Cancel();
    key_ = alarms_.Add(at, std::move(action));
  }
  // An action that has begun goes on: this does not wait for it, so what it uses must be its own.
  void Cancel() { alarms_.Remove(key_); }

 private:
  Alarms& alarms_;
  Alarms::Key key_;  // of no alarm until Set
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_ALARMS_H_
