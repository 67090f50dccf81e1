// Mutex and CondVar: those of absl, made visible to ThreadSanitizer.
//
// Distributions ship abseil without instrumentation, so that ThreadSanitizer does not see the order
// that its locks make and reports races that are none. Under that sanitizer each lock and unlock
// says so itself; otherwise this is absl::Mutex.
#ifndef PQCACHED_KVSTORE_MUTEX_H_
#define PQCACHED_KVSTORE_MUTEX_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace pqcached::kvstore {

class CondVar;

class ABSL_LOCKABLE Mutex {
 public:
#if defined(__SANITIZE_THREAD__)
  // Abseil's own search for deadlocks is not instrumented either; the sanitizer has one.
  Mutex() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }
#else
  Mutex() = default;
#endif
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() {
    mutex_.Lock();
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(this);
#endif
  }

  void Unlock() ABSL_UNLOCK_FUNCTION() {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(this);
#endif
    mutex_.Unlock();
  }

 private:
  friend class CondVar;
  absl::Mutex mutex_;
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
  // Waits for a signal, or until `deadline`; may also wake for nothing.
  void WaitUntil(Mutex* mutex, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(mutex);
#endif
    condition_.WaitWithDeadline(&mutex->mutex_, deadline);
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(mutex);
#endif
  }
  void Wait(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    WaitUntil(mutex, absl::InfiniteFuture());
  }
  void SignalAll() { condition_.SignalAll(); }

 private:
  absl::CondVar condition_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MUTEX_H_
