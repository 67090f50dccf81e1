// The parts of the daemon that need no gRPC: executor, alarms, sessions, counters, log, claim on the
// socket.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "service/alarms.h"
#include "service/event.h"
#include "service/executor.h"
#include "service/log.h"
#include "service/rpc_stats.h"
#include "service/sessions.h"
#include "service/socket_claim.h"

namespace pqcached::service {
namespace {

using kvstore::SteadyTime;
using testing::HasSubstr;
using testing::Not;

TEST(ExecutorTest, RefusesWhatIsBeyondItsQueue) {
  absl::Notification begun;
  absl::Notification keep_going;
  std::atomic<int> done = 0;
  {
    Executor executor({.threads = 1, .max_pending = 2});
    ASSERT_TRUE(executor.TryRun([&] {
      begun.Notify();
      keep_going.WaitForNotification();
      ++done;
    }));
    begun.WaitForNotification();
    EXPECT_TRUE(executor.TryRun([&] { ++done; }));
    EXPECT_TRUE(executor.TryRun([&] { ++done; }));
    EXPECT_FALSE(executor.TryRun([&] { done += 100; }));
    executor.Run([&] { ++done; });
    keep_going.Notify();
  }
  EXPECT_EQ(done, 4) << "what was taken is finished before the executor goes";
}

TEST(ExecutorTest, UsesAllItsThreads) {
  Executor executor({.threads = 3, .max_pending = 3});
  absl::Mutex mutex;
  int waiting = 0;
  absl::Notification all_met;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(executor.TryRun([&] {
      {
        absl::MutexLock lock(&mutex);
        if (++waiting == 3) all_met.Notify();
      }
      all_met.WaitForNotification();
    }));
  }
  all_met.WaitForNotification();
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

TEST(SessionsTest, FindsByTokenUntilClosed) {
  Sessions sessions(4);
  const absl::StatusOr<OpenedSession> opened = sessions.Open("tenant-a", "engine 1");
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->token.size(), 32u);
  const absl::StatusOr<Session> found = sessions.Find(opened->token);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->tenant, "tenant-a");
  EXPECT_EQ(ClientNameOf(found->id), "engine 1");
  EXPECT_THAT(found->id, Not(HasSubstr(opened->token)));
  EXPECT_EQ(sessions.count(), 1u);
  sessions.Close(opened->token);
  EXPECT_EQ(sessions.Find(opened->token).status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(sessions.Find("").status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(sessions.count(), 0u);
}

TEST(SessionsTest, TokensAndIdsAreDistinct) {
  Sessions sessions(100);
  std::set<std::string> tokens;
  std::set<std::string> ids;
  for (int i = 0; i < 100; ++i) {
    const absl::StatusOr<OpenedSession> opened = sessions.Open("", "same name#1");
    ASSERT_TRUE(opened.ok());
    EXPECT_EQ(opened->session.tenant, "default");
    EXPECT_EQ(ClientNameOf(opened->session.id), "same name#1");
    tokens.insert(opened->token);
    ids.insert(opened->session.id);
  }
  EXPECT_EQ(tokens.size(), 100u);
  EXPECT_EQ(ids.size(), 100u);
}

TEST(SessionsTest, LimitsTheirNumberAndNames) {
  Sessions sessions(1);
  EXPECT_EQ(sessions.Open("Upper", "").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(sessions.Open(std::string(65, 'a'), "").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(sessions.Open("a", std::string(129, 'a')).status().code(),
            absl::StatusCode::kInvalidArgument);
  const absl::StatusOr<OpenedSession> opened =
      sessions.Open(std::string(64, 'a'), std::string(128, 'a'));
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(sessions.Open("b", "").status().code(), absl::StatusCode::kResourceExhausted);
  sessions.Close(opened->token);
  EXPECT_TRUE(sessions.Open("b", "").ok());
}

TEST(RpcStatsTest, AddsUpFromManyThreads) {
  RpcStats stats;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&stats] {
      for (int i = 0; i < 1000; ++i) {
        stats.Record(Rpc::kTopK, i % 4 == 0 ? absl::StatusCode::kNotFound : absl::StatusCode::kOk,
                     absl::Microseconds(i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<RpcStats::Row> rows = stats.Snapshot();
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(RpcName(rows[0].rpc), "TopK");
  EXPECT_EQ(rows[0].count_by_status[static_cast<size_t>(absl::StatusCode::kOk)], 3000u);
  EXPECT_EQ(rows[0].count_by_status[static_cast<size_t>(absl::StatusCode::kNotFound)], 1000u);
  EXPECT_EQ(rows[0].longest, absl::Microseconds(999));
  EXPECT_EQ(rows[0].total, absl::Microseconds(4 * 999 * 500));
}

TEST(RpcStatsTest, NamesEveryRpcAndStatus) {
  std::set<std::string> names;
  for (size_t i = 0; i < kRpcCount; ++i) names.insert(std::string(RpcName(static_cast<Rpc>(i))));
  EXPECT_EQ(names.size(), kRpcCount);
  EXPECT_EQ(RpcName(Rpc::kAttend), "Attend");
  EXPECT_EQ(RpcName(Rpc::kSelfTest), "SelfTest");
  EXPECT_EQ(StatusName(absl::StatusCode::kOk), "OK");
  EXPECT_EQ(StatusName(absl::StatusCode::kUnauthenticated), "UNAUTHENTICATED");
  EXPECT_EQ(StatusName(static_cast<absl::StatusCode>(99)), "UNKNOWN");
}

class FilesTest : public testing::Test {
 protected:
  FilesTest() {
    std::string path = testing::TempDir() + "pqcached-base-XXXXXX";
    directory_ = mkdtemp(path.data());
  }
  ~FilesTest() override { std::filesystem::remove_all(directory_); }

  std::filesystem::path directory_;
};

using LogTest = FilesTest;

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

kvstore::KeptSession KeptSessionOf(const std::string& id, const std::string& token) {
  return {.id = id, .tenant = "team-a", .client_name = "engine", .token = token};
}

TEST(SessionsTest, ARestoredSessionWaitsForItsClient) {
  Sessions sessions(2);
  const Session restored = sessions.Restore(KeptSessionOf("engine#7", "secret"));
  EXPECT_EQ(restored.number, 7u);
  ASSERT_TRUE(sessions.Find("secret").ok()) << "its token is good meanwhile";
  EXPECT_EQ(sessions.Find("secret")->tenant, "team-a");
  EXPECT_EQ(sessions.Open("", "other")->session.id, "other#8") << "no id is given twice";

  EXPECT_EQ(sessions.Resume("wrong").status().code(), absl::StatusCode::kNotFound);
  const auto resumed = sessions.Resume("secret", 42);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->token, "secret");
  EXPECT_EQ(resumed->session.id, "engine#7");
  EXPECT_EQ(sessions.PeerPidOf("engine#7"), 42u);
  EXPECT_EQ(sessions.Resume("secret").status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(sessions.CloseDetached("secret")) << "its client has come";
  sessions.Detach("secret");
  EXPECT_TRUE(sessions.CloseDetached("secret"));
  EXPECT_FALSE(sessions.CloseDetached("secret"));
  EXPECT_EQ(sessions.Resume("secret").status().code(), absl::StatusCode::kNotFound);
}

TEST(SessionsTest, RestoredOnesCountAgainstTheLimitOfNewOnes) {
  Sessions sessions(1);
  sessions.Restore(KeptSessionOf("a#1", "one"));
  sessions.Restore(KeptSessionOf("b#2", "two"));
  EXPECT_EQ(sessions.count(), 2u) << "nobody is turned out";
  EXPECT_EQ(sessions.Open("", "c").status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(SessionsTest, AWorkerThatEndsLeavesItsSessions) {
  Sessions sessions(4);
  const auto opened = sessions.Open("", "engine");
  sessions.Restore(KeptSessionOf("a#9", "one"));
  sessions.LeaveToNextWorker();
  EXPECT_FALSE(sessions.Close(opened->token));
  EXPECT_FALSE(sessions.CloseDetached("one"));
  EXPECT_TRUE(sessions.IsOpen(opened->token));
}

class SocketClaimTest : public FilesTest {
 protected:
  // Leaves a socket file behind, as a killed daemon does; the descriptor tells whether anyone still
  // listens.
  int Listen() {
    const int descriptor = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(descriptor, 1), 0);
    return descriptor;
  }

  const std::string path_ = directory_ / "run" / "pqcached.sock";
};

TEST_F(SocketClaimTest, MakesItsDirectoryForTheOwnerAlone) {
  const auto claim = SocketClaim::Acquire(path_);
  ASSERT_TRUE(claim.ok()) << claim.status();
  struct stat status = {};
  ASSERT_EQ(stat((directory_ / "run").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
}

TEST_F(SocketClaimTest, IsGivenOnce) {
  {
    const auto claim = SocketClaim::Acquire(path_);
    ASSERT_TRUE(claim.ok());
    const absl::Status second = SocketClaim::Acquire(path_).status();
    EXPECT_EQ(second.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(std::string(second.message()), HasSubstr(path_));
  }
  EXPECT_TRUE(SocketClaim::Acquire(path_).ok());
  EXPECT_TRUE(std::filesystem::is_empty(directory_ / "run")) << "nothing is left behind";
}

TEST_F(SocketClaimTest, ClearsAStaleSocketAway) {
  std::filesystem::create_directory(directory_ / "run");
  close(Listen());
  ASSERT_TRUE(std::filesystem::exists(path_));
  const auto claim = SocketClaim::Acquire(path_);
  ASSERT_TRUE(claim.ok()) << claim.status();
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(SocketClaimTest, RefusesASocketThatSomebodyServes) {
  std::filesystem::create_directory(directory_ / "run");
  const int listener = Listen();
  EXPECT_EQ(SocketClaim::Acquire(path_).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(std::filesystem::exists(path_));
  close(listener);
}

TEST_F(SocketClaimTest, RefusesToRemoveAFile) {
  std::filesystem::create_directory(directory_ / "run");
  std::ofstream(path_) << "precious";
  EXPECT_EQ(SocketClaim::Acquire(path_).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(std::filesystem::is_regular_file(path_));
}

}  // namespace
}  // namespace pqcached::service
