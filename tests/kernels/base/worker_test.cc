// Worker: order, times, cancellation, and what Stop completes and drops.
#include "kernels/base/worker.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

namespace pqcached::base {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using Clock = Worker::Clock;

TEST(WorkerTest, RunsTasksInOrder) {
  std::vector<int> order;  // written by the worker's thread, read after Stop
  Worker worker("test");
  for (int i = 0; i < 100; ++i) worker.Run([&order, i] { order.push_back(i); });
  worker.Stop();
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(WorkerTest, StopWithoutTasksReturns) {
  Worker worker("test");
  worker.Stop();
  worker.Stop();
}

TEST(WorkerTest, RunsTimedTasksInTheOrderOfTheirTimes) {
  std::vector<int> order;
  std::promise<void> done;
  Worker worker("test");
  const auto now = Clock::now();
  worker.RunAt(now + milliseconds(30), [&] {
    order.push_back(2);
    done.set_value();
  });
  worker.RunAt(now + milliseconds(10), [&] {
    EXPECT_GE(Clock::now(), now + milliseconds(10));
    order.push_back(1);
  });
  done.get_future().wait();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(WorkerTest, QueuedTasksDoNotWaitForTimedOnes) {
  std::promise<void> done;
  Worker worker("test");
  worker.RunAfter(hours(1), [] { ADD_FAILURE(); });
  worker.Run([&done] { done.set_value(); });
  done.get_future().wait();
}

TEST(WorkerTest, ACancelledTaskDoesNotRunAndIsDestroyed) {
  std::promise<void> done;
  Worker worker("test");
  const auto captured = std::make_shared<int>(0);
  const Worker::TimerId timer = worker.RunAfter(milliseconds(10), [captured] { ADD_FAILURE(); });
  EXPECT_EQ(captured.use_count(), 2);
  worker.Cancel(timer);
  EXPECT_EQ(captured.use_count(), 1);
  worker.Cancel(timer);
  worker.Cancel({});
  worker.RunAfter(milliseconds(30), [&done] { done.set_value(); });
  done.get_future().wait();
}

TEST(WorkerTest, ATaskMaySetTheNextOne) {
  std::atomic<int> rounds = 0;
  std::promise<void> done;
  Worker worker("test");
  std::function<void()> round = [&] {
    if (++rounds == 3) return done.set_value();
    worker.RunAfter(milliseconds(1), round);
  };
  worker.Run(round);
  done.get_future().wait();
  worker.Stop();
  EXPECT_EQ(rounds, 3);
}

TEST(WorkerTest, StopCompletesQueuedTasksAndDropsTimedOnes) {
  std::promise<void> begun;
  std::promise<void> go;
  const auto captured = std::make_shared<int>(0);
  int completed = 0;
  Worker worker("test");
  worker.Run([&] {
    begun.set_value();
    go.get_future().wait();
    ++completed;
  });
  worker.Run([&] { ++completed; });
  worker.RunAfter(hours(1), [captured] { ADD_FAILURE(); });
  begun.get_future().wait();
  go.set_value();
  worker.Stop();
  EXPECT_EQ(completed, 2);
  EXPECT_EQ(captured.use_count(), 1);
  worker.Run([] { ADD_FAILURE(); });
  EXPECT_EQ(worker.RunAfter(milliseconds(0), [] { ADD_FAILURE(); }), Worker::TimerId());
}

TEST(WorkerTest, CapturesEndWithTheirTask) {
  std::promise<long> count;
  Worker worker("test");
  auto captured = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = captured;
  worker.Run([captured = std::move(captured)] {});
  worker.Run([&] { count.set_value(watched.use_count()); });
  EXPECT_EQ(count.get_future().get(), 0);
}

TEST(WorkerTest, ManyThreadsMayQueue) {
  int completed = 0;  // written by the worker's thread
  Worker worker("test");
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int j = 0; j < 1000; ++j) {
        worker.Run([&completed] { ++completed; });
        worker.Cancel(worker.RunAfter(hours(1), [] { ADD_FAILURE(); }));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  worker.Stop();
  EXPECT_EQ(completed, 4000);
}

TEST(WorkerTest, TheThreadHasAName) {
  std::promise<std::string> name;
  Worker worker("a-name-that-is-too-long");
  // The name is set after the thread has started; the second task runs later than that.
  worker.Run([] {});
  worker.RunAfter(milliseconds(20), [&name] {
    char text[16] = {};
    pthread_getname_np(pthread_self(), text, sizeof(text));
    name.set_value(text);
  });
  EXPECT_EQ(name.get_future().get(), "a-name-that-is-");
}

}  // namespace
}  // namespace pqcached::base
