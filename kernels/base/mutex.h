// Mutex, MutexLock and CondVar wrap the standard library's with annotations for clang's
// thread-safety analysis (-Wthread-safety): a field names the mutex that guards it, and clang
// reports an access without that mutex. Other compilers ignore the annotations.
//
//   base::Mutex mutex_;
//   base::CondVar filled_;
//   std::deque<Job> jobs_ PQCACHED_GUARDED_BY(mutex_);
//
//   const base::MutexLock lock(&mutex_);
//   filled_.Wait(&mutex_, [this]() PQCACHED_REQUIRES(mutex_) { return !jobs_.empty(); });
//
// Timed waits follow std::chrono::steady_clock, because wall time jumps.
#ifndef PQCACHED_KERNELS_BASE_MUTEX_H_
#define PQCACHED_KERNELS_BASE_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define PQCACHED_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define PQCACHED_THREAD_ATTRIBUTE(x)
#endif

// A field that is accessed only while the mutex is held.
#define PQCACHED_GUARDED_BY(mutex) PQCACHED_THREAD_ATTRIBUTE(guarded_by(mutex))
// A function or lambda that is called only while the mutexes are held.
#define PQCACHED_REQUIRES(...) PQCACHED_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
// A function that is called only while the mutexes are not held.
#define PQCACHED_EXCLUDES(...) PQCACHED_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
// A mutex that is locked before others, when both are held.
#define PQCACHED_ACQUIRED_BEFORE(...) PQCACHED_THREAD_ATTRIBUTE(acquired_before(__VA_ARGS__))

namespace pqcached::base {

class CondVar;

class PQCACHED_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() PQCACHED_THREAD_ATTRIBUTE(acquire_capability()) { mutex_.lock(); }
  void Unlock() PQCACHED_THREAD_ATTRIBUTE(release_capability()) { mutex_.unlock(); }
  // Locks without waiting; returns false when another thread holds the mutex.
  bool TryLock() PQCACHED_THREAD_ATTRIBUTE(try_acquire_capability(true)) {
    return mutex_.try_lock();
  }
  // Declares to the analysis that the caller holds the mutex, where it cannot see that. Checks
  // nothing.
  void AssertHeld() const PQCACHED_THREAD_ATTRIBUTE(assert_capability(this)) {}

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a mutex for as long as it lives.
class PQCACHED_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) PQCACHED_THREAD_ATTRIBUTE(acquire_capability(mutex))
      : mutex_(mutex) {
    mutex_->Lock();
  }
  ~MutexLock() PQCACHED_THREAD_ATTRIBUTE(release_capability()) { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* const mutex_;
};

// Unlocks a mutex that the caller has already locked (TryLock, TryLockUntil).
template <class AnyMutex>
class PQCACHED_THREAD_ATTRIBUTE(scoped_lockable) HeldLock {
 public:
  explicit HeldLock(AnyMutex* mutex) PQCACHED_REQUIRES(mutex) : mutex_(mutex) {}
  ~HeldLock() PQCACHED_THREAD_ATTRIBUTE(release_capability()) { mutex_->Unlock(); }
  HeldLock(const HeldLock&) = delete;
  HeldLock& operator=(const HeldLock&) = delete;

 private:
  AnyMutex* const mutex_;
};

class CondVar {
 public:
  using Clock = std::chrono::steady_clock;

  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  // Waits for a signal; may wake up spuriously.
  void Wait(Mutex* mutex) PQCACHED_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  // Waits for a signal, or until `deadline`; may wake up spuriously. Returns false after the
  // deadline.
  bool WaitUntil(Mutex* mutex, Clock::time_point deadline) PQCACHED_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    const bool in_time = condition_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }

  // Waits until `is_true()`, which is called with the mutex held.
  template <class Predicate>
  void Wait(Mutex* mutex, const Predicate& is_true) PQCACHED_REQUIRES(mutex)
      PQCACHED_THREAD_ATTRIBUTE(no_thread_safety_analysis) {
    while (!is_true()) Wait(mutex);
  }
  // Waits until `is_true()` or `deadline`. Returns the last result of `is_true`.
  template <class Predicate>
  bool WaitUntil(Mutex* mutex, Clock::time_point deadline, const Predicate& is_true)
      PQCACHED_REQUIRES(mutex) PQCACHED_THREAD_ATTRIBUTE(no_thread_safety_analysis) {
    while (!is_true()) {
      if (!WaitUntil(mutex, deadline)) return is_true();
    }
    return true;
  }
  template <class Predicate>
  bool WaitFor(Mutex* mutex, Clock::duration duration, const Predicate& is_true)
      PQCACHED_REQUIRES(mutex) {
    return WaitUntil(mutex, Clock::now() + duration, is_true);
  }

  void SignalOne() { condition_.notify_one(); }
  void SignalAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

// A mutex that a caller can wait for until a deadline. No CondVar waits with it.
//
// std::timed_mutex is not used: ThreadSanitizer of g++ 12 does not see that its timed wait locks.
class PQCACHED_THREAD_ATTRIBUTE(capability("mutex")) TimedMutex {
 public:
  // Returns false when another thread holds the mutex until `deadline`.
  bool TryLockUntil(std::chrono::steady_clock::time_point deadline)
      PQCACHED_THREAD_ATTRIBUTE(try_acquire_capability(true))
          PQCACHED_THREAD_ATTRIBUTE(no_thread_safety_analysis) {
    const MutexLock lock(&mutex_);
    if (!unlocked_.WaitUntil(&mutex_, deadline,
                             [this]() PQCACHED_REQUIRES(mutex_) { return !held_; }))
      return false;
    held_ = true;
    return true;
  }
  void Unlock() PQCACHED_THREAD_ATTRIBUTE(release_capability())
      PQCACHED_THREAD_ATTRIBUTE(no_thread_safety_analysis) {
    const MutexLock lock(&mutex_);
    held_ = false;
    unlocked_.SignalOne();
  }

 private:
  Mutex mutex_;
  CondVar unlocked_;
  bool held_ PQCACHED_GUARDED_BY(mutex_) = false;
};

}  // namespace pqcached::base

#endif  // PQCACHED_KERNELS_BASE_MUTEX_H_
