// SteadyTime and the locks that wait by it.
#include "kvstore/clock.h"

#include <gtest/gtest.h>

#include <thread>

#include "kvstore/mutex.h"

namespace pqcached::kvstore {
namespace {

TEST(SteadyTimeTest, TheInfiniteFutureStaysIt) {
  const SteadyTime never = SteadyTime::InfiniteFuture();
  EXPECT_EQ(never + absl::Hours(1), never);
  EXPECT_EQ(never - absl::Hours(1), never);
  EXPECT_GT(never, SteadyTime::Now() + absl::Hours(24 * 365 * 100));
  EXPECT_EQ(never - SteadyTime::Now(), absl::InfiniteDuration());
  EXPECT_EQ(SteadyTime::Now() + absl::InfiniteDuration(), never);
  EXPECT_EQ(never.ToChrono(), std::chrono::steady_clock::time_point::max());
  EXPECT_LT(SteadyTime::InfinitePast(), SteadyTime());
  EXPECT_LT(SteadyTime(), SteadyTime::Now());
}

TEST(SteadyTimeTest, IsTheStandardOne) {
  const auto before = std::chrono::steady_clock::now();
  const SteadyTime now = SteadyTime::Now();
  EXPECT_LE(SteadyTime(before), now);
  EXPECT_LE(now.ToChrono(), std::chrono::steady_clock::now());
  EXPECT_EQ(SteadyTime(now.ToChrono()), now);
}

TEST(CondVarTest, WaitsUntilTheDeadlineOrTheSignal) {
  Mutex mutex;
  CondVar changed;
  bool said = false;
  const SteadyTime until = SteadyTime::Now() + absl::Milliseconds(20);
  mutex.Lock();
  while (SteadyTime::Now() < until) changed.WaitUntil(&mutex, until);
  changed.WaitUntil(&mutex, until);  // has passed: at once
  changed.WaitUntil(&mutex, SteadyTime());
  std::thread speaker([&] {
    const MutexLock lock(&mutex);
    said = true;
    changed.SignalAll();
  });
  while (!said) changed.WaitUntil(&mutex, SteadyTime::InfiniteFuture());
  mutex.Unlock();
  speaker.join();
}

}  // namespace
}  // namespace pqcached::kvstore
