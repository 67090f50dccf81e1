// Mutex and CondVar wrap the standard library's with annotations for clang's thread-safety
// analysis.
//
// absl's are not used: their timed waits end at a wall-clock time, which can jump (clock.h), and
// distributions ship absl without instrumentation, so that ThreadSanitizer does not see the order
// that its locks establish.
#ifndef PQCACHED_KVSTORE_MUTEX_H_
#define PQCACHED_KVSTORE_MUTEX_H_

#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "kvstore/clock.h"

namespace pqcached::kvstore {

class CondVar;

class ABSL_LOCKABLE Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) {
    mutex_->Lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* mutex_;
};

class CondVar {
 public:
  // Waits for a signal, or until `deadline`; may wake up spuriously.
  void WaitUntil(Mutex* mutex, SteadyTime deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (deadline == SteadyTime::InfiniteFuture()) return Wait(mutex);
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    condition_.wait_until(lock, deadline.ToChrono());
    lock.release();
  }
  void Wait(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  void SignalAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MUTEX_H_
