#include "service/alarms.h"

namespace pqcached::service {

using kvstore::MutexLock;
using kvstore::SteadyTime;

Alarms::~Alarms() {
  {
    const MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
  }
  thread_.join();
}

Alarms::Key Alarms::Add(SteadyTime at, Action action) {
  const MutexLock lock(&mutex_);
  const auto added = waiting_.emplace(Key(at, ++last_number_), std::move(action)).first;
  if (added == waiting_.begin()) changed_.SignalAll();
  return added->first;
}

void Alarms::Remove(const Key& key) {
  Action removed;  // destroyed after the lock is released, with its captures
  const MutexLock lock(&mutex_);
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return;
  removed = std::move(found->second);
  waiting_.erase(found);
}

void Alarms::Run() {
  for (;;) {
    Action due;
    {
      const MutexLock lock(&mutex_);
      while (!stopping_ &&
             (waiting_.empty() || waiting_.begin()->first.first > SteadyTime::Now())) {
        changed_.WaitUntil(&mutex_, waiting_.empty() ? SteadyTime::InfiniteFuture()
                                                     : waiting_.begin()->first.first);
      }
      if (stopping_) return;
      due = std::move(waiting_.begin()->second);
      waiting_.erase(waiting_.begin());
    }
    due();
  }
}

}  // namespace pqcached::service
