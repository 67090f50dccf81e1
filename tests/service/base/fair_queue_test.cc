// FairQueue: which task starts next.
#include "service/base/fair_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace pqcached::service {
namespace {

using kvstore::SteadyTime;
using testing::ElementsAre;

class FairQueueTest : public testing::Test {
 protected:
  static QueuedTask Task(const std::string& tenant, Lane lane = Lane::kBrief) {
    return {.tenant = tenant, .lane = lane, .run = [] {}};
  }
  void Push(FairQueue& queue, const std::string& tenant, int count = 1, Lane lane = Lane::kBrief) {
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(queue.Push(Task(tenant, lane)), FairQueue::Answer::kTaken);
    }
  }
  // Starts tasks as `threads` threads would that all need the same time, until nothing waits.
  // Returns the tenants in the order in which their tasks started.
  static std::vector<std::string> Run(FairQueue& queue, size_t threads) {
    std::vector<std::string> order;
    std::vector<QueuedTask> running;
    while (true) {
      while (running.size() < threads) {
        auto task = queue.Take();
        if (!task.has_value()) break;
        order.push_back(task->tenant);
        running.push_back(*std::move(task));
      }
      if (running.empty()) return order;
      const QueuedTask done = running.front();
      running.erase(running.begin());
      queue.Finish(done.tenant, done.lane, absl::Seconds(1));
    }
  }
};

TEST_F(FairQueueTest, ATenantThatComesLastIsNotServedLast) {
  FairQueue queue({});
  Push(queue, "flood", 100);
  Push(queue, "quiet", 1);
  const auto first = queue.Take();
  ASSERT_TRUE(first.has_value());
  const auto second = queue.Take();
  ASSERT_TRUE(second.has_value());
  EXPECT_THAT((std::vector<std::string>{first->tenant, second->tenant}),
              testing::UnorderedElementsAre("flood", "quiet"));
}

TEST_F(FairQueueTest, OneThreadAlternatesByTheTimeUsed) {
  FairQueue queue({});
  Push(queue, "a", 3);
  Push(queue, "b", 3);
  EXPECT_THAT(Run(queue, 1), ElementsAre("a", "b", "a", "b", "a", "b"));
}

TEST_F(FairQueueTest, LongTasksAreChargedTheirTime) {
  FairQueue queue({});
  Push(queue, "long", 2);
  Push(queue, "short", 20);
  std::map<std::string, int> started;
  for (int i = 0; i < 12; ++i) {
    const auto task = queue.Take();
    ASSERT_TRUE(task.has_value());
    ++started[task->tenant];
    queue.Finish(task->tenant, task->lane, absl::Seconds(task->tenant == "long" ? 10 : 1));
  }
  EXPECT_EQ(started["long"], 2);
  EXPECT_EQ(started["short"], 10) << "as long as one of the other tenant";
}

TEST_F(FairQueueTest, WeightsShareTheThreads) {
  FairQueue queue({.share_of = [](const std::string& tenant) {
    return TenantShare{.weight = tenant == "heavy" ? 3.0 : 1.0};
  }});
  Push(queue, "light", 40);
  Push(queue, "heavy", 40);
  std::map<std::string, int> started;
  for (int i = 0; i < 4; ++i) ++started[queue.Take()->tenant];
  EXPECT_EQ(started["heavy"], 3);
  EXPECT_EQ(started["light"], 1);
}

TEST_F(FairQueueTest, IdlenessEarnsNoCredit) {
  FairQueue queue({});
  Push(queue, "busy", 200);
  for (int i = 0; i < 100; ++i) {
    queue.Finish(queue.Take()->tenant, Lane::kBrief, absl::Seconds(1));
  }
  Push(queue, "late", 100);
  std::map<std::string, int> started;
  for (int i = 0; i < 20; ++i) {
    const auto task = queue.Take();
    ++started[task->tenant];
    queue.Finish(task->tenant, task->lane, absl::Seconds(1));
  }
  EXPECT_EQ(started["busy"], 10);
  EXPECT_EQ(started["late"], 10);
}

TEST_F(FairQueueTest, ATenantOccupiesNoMoreThanItsShare) {
  FairQueue queue({.share_of = [](const std::string&) {
    return TenantShare{.max_running = 2, .max_waiting = 3};
  }});
  Push(queue, "a", 3);
  EXPECT_EQ(queue.Push(Task("a")), FairQueue::Answer::kTenantFull);
  Push(queue, "b", 1);
  EXPECT_EQ(queue.Take()->tenant, "a");
  EXPECT_EQ(queue.Take()->tenant, "b");
  EXPECT_EQ(queue.Take()->tenant, "a");
  EXPECT_FALSE(queue.Take().has_value()) << "two of three run";
  EXPECT_EQ(queue.CountsOf("a"), (std::pair<size_t, uint32_t>(1, 2)));
  queue.Finish("a", Lane::kBrief, absl::Seconds(1));
  EXPECT_EQ(queue.Take()->tenant, "a");
}

TEST_F(FairQueueTest, BulkTasksLeaveThreadsToBriefOnes) {
  FairQueue queue({.max_bulk = 1});
  Push(queue, "a", 3, Lane::kBulk);
  Push(queue, "a", 1);
  EXPECT_EQ(queue.Take()->lane, Lane::kBulk);
  EXPECT_EQ(queue.Take()->lane, Lane::kBrief) << "although it came later";
  EXPECT_FALSE(queue.Take().has_value());
  queue.Finish("a", Lane::kBulk, absl::Seconds(1));
  EXPECT_EQ(queue.Take()->lane, Lane::kBulk);
}

TEST_F(FairQueueTest, IsFullAtItsLimitWhoeverAsks) {
  FairQueue queue({.max_waiting = 2});
  Push(queue, "a", 2);
  EXPECT_EQ(queue.Push(Task("b")), FairQueue::Answer::kFull);
  queue.PushAlways(Task("b"));
  EXPECT_EQ(queue.CountsOf("b").first, 1u);
}

TEST_F(FairQueueTest, GivesUpWhatIsPastItsDeadline) {
  FairQueue queue({});
  const SteadyTime now = SteadyTime::Now();
  for (const int seconds : {3, 1, 2}) {
    QueuedTask task = Task("a", seconds == 2 ? Lane::kBulk : Lane::kBrief);
    task.deadline = now + absl::Seconds(seconds);
    ASSERT_EQ(queue.Push(std::move(task)), FairQueue::Answer::kTaken);
  }
  EXPECT_EQ(queue.NextDeadline(), now + absl::Seconds(1));
  EXPECT_TRUE(queue.TakeExpired(now).empty());
  const auto expired = queue.TakeExpired(now + absl::Seconds(2));
  ASSERT_EQ(expired.size(), 2u);
  EXPECT_EQ(expired[0].deadline, now + absl::Seconds(1));
  EXPECT_EQ(expired[1].lane, Lane::kBulk);
  EXPECT_EQ(queue.NextDeadline(), now + absl::Seconds(3));
  const auto left = queue.Take();
  ASSERT_TRUE(left.has_value());
  EXPECT_EQ(queue.NextDeadline(), SteadyTime::InfiniteFuture()) << "a task that runs has started";
}

}  // namespace
}  // namespace pqcached::service
