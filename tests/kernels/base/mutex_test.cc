// Mutex, MutexLock and CondVar: exclusion, signals and deadlines.
#include "kernels/base/mutex.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace pqcached::base {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

struct Counter {
  Mutex mutex;
  CondVar changed;
  int count PQCACHED_GUARDED_BY(mutex) = 0;
};

TEST(MutexTest, ExcludesOtherThreads) {
  Counter counter;
  const auto add = [&counter] {
    for (int i = 0; i < 10000; ++i) {
      const MutexLock lock(&counter.mutex);
      ++counter.count;
    }
  };
  std::thread other(add);
  add();
  other.join();
  const MutexLock lock(&counter.mutex);
  EXPECT_EQ(counter.count, 20000);
}

TEST(MutexTest, TryLockFailsWhileAnotherThreadHoldsIt) {
  Mutex mutex;
  const MutexLock lock(&mutex);
  std::thread([&mutex] {
    const bool locked = mutex.TryLock();
    EXPECT_FALSE(locked);
    if (locked) mutex.Unlock();
  }).join();
}

TEST(MutexTest, HeldLockUnlocks) {
  Mutex mutex;
  for (int i = 0; i < 2; ++i) {
    if (!mutex.TryLock()) {
      FAIL() << "round " << i;
    } else {
      const HeldLock lock(&mutex);
    }
  }
}

TEST(TimedMutexTest, WaitsUntilTheDeadline) {
  TimedMutex mutex;
  if (!mutex.TryLockUntil(Clock::now())) FAIL();
  std::thread([&mutex] {
    const auto deadline = Clock::now() + milliseconds(20);
    const bool locked = mutex.TryLockUntil(deadline);
    EXPECT_FALSE(locked);
    EXPECT_GE(Clock::now(), deadline);
    if (locked) mutex.Unlock();
  }).join();
  mutex.Unlock();
}

TEST(CondVarTest, WaitsForASignal) {
  Counter counter;
  std::thread other([&counter] {
    const MutexLock lock(&counter.mutex);
    counter.count = 1;
    counter.changed.SignalAll();
  });
  {
    const MutexLock lock(&counter.mutex);
    counter.changed.Wait(&counter.mutex, [&counter]() PQCACHED_REQUIRES(counter.mutex) {
      return counter.count > 0;
    });
    EXPECT_EQ(counter.count, 1);
  }
  other.join();
}

TEST(CondVarTest, WaitUntilReturnsFalseAtTheDeadline) {
  Counter counter;
  const auto never = [] { return false; };
  const MutexLock lock(&counter.mutex);
  const auto deadline = Clock::now() + milliseconds(20);
  EXPECT_FALSE(counter.changed.WaitUntil(&counter.mutex, deadline, never));
  EXPECT_GE(Clock::now(), deadline);
  EXPECT_FALSE(counter.changed.WaitFor(&counter.mutex, milliseconds(1), never));
}

TEST(CondVarTest, APredicateThatHoldsWaitsForNothing) {
  Counter counter;
  const MutexLock lock(&counter.mutex);
  EXPECT_TRUE(
      counter.changed.WaitUntil(&counter.mutex, Clock::time_point::min(), [] { return true; }));
}

// The infinite deadline of the client's waits must not overflow into the past.
TEST(CondVarTest, TheLargestDeadlineIsInTheFuture) {
  Counter counter;
  std::thread other([&counter] {
    std::this_thread::sleep_for(milliseconds(20));
    const MutexLock lock(&counter.mutex);
    counter.count = 1;
    counter.changed.SignalOne();
  });
  {
    const MutexLock lock(&counter.mutex);
    EXPECT_TRUE(counter.changed.WaitUntil(
        &counter.mutex, Clock::time_point::max(),
        [&counter]() PQCACHED_REQUIRES(counter.mutex) { return counter.count > 0; }));
  }
  other.join();
}

}  // namespace
}  // namespace pqcached::base
