// Executor, alarms, events, log.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "service/base/alarms.h"
#include "service/base/event.h"
#include "service/base/executor.h"
#include "service/base/log.h"

namespace pqcached::service {
namespace {

using kvstore::SteadyTime;
using testing::HasSubstr;
using testing::Not;

constexpr absl::Duration kPatience = absl::Minutes(1);

bool Takes(Executor& executor, std::function<void()> run) {
  return executor.TryRun({.tenant = "a", .lane = Lane::kBrief, .run = std::move(run)}) ==
         FairQueue::Answer::kTaken;
}

TEST(ExecutorTest, AnswersAWaitingTaskAtItsDeadline) {
  Event begun;
  Event expired;
  bool ran = false;
  Executor executor({.threads = 1, .queue = {}});
  ASSERT_TRUE(Takes(executor, [&] {
    begun.Notify();
    EXPECT_TRUE(expired.WaitFor(kPatience)) << "the only thread is busy until then";
  }));
  ASSERT_TRUE(begun.WaitFor(kPatience));
  ASSERT_EQ(executor.TryRun({.tenant = "b",
                             .lane = Lane::kBrief,
                             .run = [&] { ran = true; },
                             .deadline = SteadyTime::Now() + absl::Milliseconds(1),
                             .expire = [&] { expired.Notify(); }}),
            FairQueue::Answer::kTaken);
  EXPECT_TRUE(expired.WaitFor(kPatience));
  EXPECT_FALSE(ran);
}

TEST(ExecutorTest, RefusesWhatIsBeyondItsQueue) {
  Event begun;
  Event keep_going;
  std::atomic<int> done = 0;
  {
    Executor executor({.threads = 1, .queue = {.max_waiting = 2}});
    ASSERT_TRUE(Takes(executor, [&] {
      begun.Notify();
      EXPECT_TRUE(keep_going.WaitFor(kPatience));
      ++done;
    }));
    EXPECT_TRUE(begun.WaitFor(kPatience));
    EXPECT_TRUE(Takes(executor, [&] { ++done; }));
    EXPECT_TRUE(Takes(executor, [&] { ++done; }));
    EXPECT_FALSE(Takes(executor, [&] { done += 100; }));
    executor.Run({.tenant = "", .lane = Lane::kBrief, .run = [&] { ++done; }});
    keep_going.Notify();
  }
  EXPECT_EQ(done, 4) << "what was taken is finished before the executor goes";
}

TEST(ExecutorTest, UsesAllItsThreads) {
  std::atomic<int> waiting = 0;
  Event all_met;
  // Its threads end before what they use.
  Executor executor({.threads = 3, .queue = {.max_waiting = 3}});
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Takes(executor, [&] {
      if (++waiting == 3) all_met.Notify();
      EXPECT_TRUE(all_met.WaitFor(kPatience));
    }));
  }
  EXPECT_TRUE(all_met.WaitFor(kPatience));
}

TEST(AlarmsTest, ComeInOrderAndNotBeforeTheirTime) {
  std::vector<int> came;
  Event done;
  {
    Alarms alarms;
    Alarm first(alarms), second(alarms), third(alarms), never(alarms), cancelled(alarms);
    const SteadyTime now = SteadyTime::Now();
    third.Set(now + absl::Milliseconds(60), [&] {
      came.push_back(3);
      EXPECT_GE(SteadyTime::Now(), now + absl::Milliseconds(60));
      done.Notify();
    });
    first.Set(now - absl::Seconds(1), [&] { came.push_back(1); });
    second.Set(now + absl::Milliseconds(30), [&] { came.push_back(-2); });
    second.Set(now + absl::Milliseconds(30), [&] { came.push_back(2); });
    never.Set(SteadyTime::InfiniteFuture(), [&] { came.push_back(4); });
    cancelled.Set(now + absl::Milliseconds(40), [&] { came.push_back(5); });
    cancelled.Cancel();
    EXPECT_TRUE(done.WaitFor(absl::Seconds(60)));
  }
  EXPECT_EQ(came, (std::vector<int>{1, 2, 3}));
}

TEST(AlarmsTest, AnActionMaySetItsAlarmAnew) {
  int count = 0;
  Event done;
  Alarms alarms;
  kvstore::Mutex mutex;
  Alarm alarm(alarms);
  const std::function<void()> again = [&] {
    const kvstore::MutexLock lock(&mutex);
    if (++count == 3) return done.Notify();
    alarm.Set(SteadyTime::Now(), again);
  };
  {
    const kvstore::MutexLock lock(&mutex);
    alarm.Set(SteadyTime::Now(), again);
  }
  EXPECT_TRUE(done.WaitFor(absl::Seconds(60)));
}

TEST(EventTest, SaysWhenItHasNotHappened) {
  Event event;
  EXPECT_FALSE(event.WaitFor(absl::Milliseconds(1)));
  event.Notify();
  EXPECT_TRUE(event.WaitFor(absl::ZeroDuration()));
}

class LogTest : public testing::Test {
 protected:
  LogTest() {
    std::string path = testing::TempDir() + "pqcached-base-XXXXXX";
    directory_ = mkdtemp(path.data());
  }
  ~LogTest() override { std::filesystem::remove_all(directory_); }

  std::filesystem::path directory_;
};

TEST_F(LogTest, WritesKeysAndQuotesWhatHasSpaces) {
  const std::string path = directory_ / "log";
  const absl::StatusOr<std::unique_ptr<Log>> log = Log::Open("info", path);
  ASSERT_TRUE(log.ok()) << log.status();
  (*log)->Info(
      "ready",
      {{"endpoint", "unix:///a"}, {"count", 3}, {"text", "two words\n\"quoted\""}, {"none", ""}});
  (*log)->Debug("hidden", {});
  EXPECT_EQ(*(*log)->SetLevel("debug"), "info");
  (*log)->Debug("shown", {});
  EXPECT_EQ((*log)->SetLevel("loud").status().code(), absl::StatusCode::kInvalidArgument);
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_THAT(
      text.str(),
      HasSubstr(
          R"(level=info event=ready endpoint=unix:///a count=3 text="two words\n\"quoted\"" none="")"));
  EXPECT_THAT(text.str(), Not(HasSubstr("hidden")));
  EXPECT_THAT(text.str(), HasSubstr("level=debug event=shown"));
}

TEST_F(LogTest, SaysWhichFileCannotBeOpened) {
  const absl::Status status = Log::Open("info", "/dev/null/log").status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("log_file"));
}

}  // namespace
}  // namespace pqcached::service
