// A worker that is killed at any moment takes nothing along that was acknowledged: an engine that works
// at random goes on, and every byte that the sidecar has acknowledged to it is compared after each kill.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>

#include "faults.h"

namespace pqcached::testing {
namespace {

// The pauses between workers grow, so a supervisor gets only so many kills.
constexpr int kKillsPerSupervisor = 5;

// Kills the workers of a supervisor, on a thread of its own.
class Killer {
 public:
  Killer(pid_t supervisor, uint32_t seed)
      : supervisor_(supervisor), random_(seed), thread_([this] { Run(); }) {}
  ~Killer() { thread_.join(); }

  int kills() const { return kills_; }
  bool done() const { return done_; }
  // The engine has gone on since the last kill.
  void ProcessNext() { gone_on_ = kills_.load(); }

 private:
  void Run() {
    pid_t last = 0;
    while (kills_ < kKillsPerSupervisor) {
      const pid_t worker = AwaitWorker(supervisor_, last);
      if (worker == 0) break;
      // Mostly a worker that serves, now and then one that is about to recover.
      const bool early = kills_ > 0 && random_() % 4 == 0;
      const int seen = kills_;
      for (int i = 0; !early && gone_on_ < seen && i < 30000; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(random_() % (early ? 40 : 200)));
      kill(worker, SIGKILL);
      last = worker;
      ++kills_;
    }
    done_ = true;
  }

  const pid_t supervisor_;
  std::minstd_rand random_;
  std::atomic<int> kills_ = 0, gone_on_ = 0;
  std::atomic<bool> done_ = false;
  std::thread thread_;
};

struct Way {
  const char* name;
  pqc_path_choice path;
  bool strict = false;
};

class WorkerKillTest : public ::testing::TestWithParam<Way> {};

TEST_P(WorkerKillTest, LosesNothingThatWasAcknowledged) {
  const int supervisors = FaultCount(1, 50);
  uint64_t kills = 0;
  Engine::Counts counts;
  Left all_left;
  for (int round = 0; round < supervisors; ++round) {
    SCOPED_TRACE(round);
    const auto seed = static_cast<uint32_t>(round) * 2 + static_cast<uint32_t>(GetParam().path);
    Daemon daemon({"--strict-memory", GetParam().strict ? "true" : "false"});
    Client admin = daemon.OpenClient("default", PQC_PATH_ONLY_REMOTE);
    {
      Engine engine({.endpoint = daemon.endpoint(), .path = GetParam().path, .seed = seed});
      for (int i = 0; i < 20; ++i) engine.Act();
      Killer killer(daemon.process().pid(), seed);
      while (!killer.done()) {
        const int before = killer.kills();
        for (int i = 0; i < 5; ++i) engine.Act();
        if (killer.kills() == before) killer.ProcessNext();
        if (killer.kills() != before) engine.Verify();
      }
      engine.Verify();
      kills += static_cast<uint64_t>(killer.kills());
      counts += engine.counts();
      EXPECT_EQ(killer.kills(), kKillsPerSupervisor);
    }
    const Left left = AwaitNothingLeft(admin, 1);
    EXPECT_TRUE(left.nothing_but(1)) << left.ToString();
    all_left += left;
  }
  EXPECT_TRUE(counts.clean()) << counts.ToString();
  std::printf("%llu kills, %s\n", static_cast<unsigned long long>(kills),
              counts.ToString().c_str());
  Record("kills_survived", kills, counts, all_left);
}

INSTANTIATE_TEST_SUITE_P(Paths, WorkerKillTest,
                         ::testing::Values(Way{"Local", PQC_PATH_ONLY_LOCAL},
                                           Way{"Remote", PQC_PATH_ONLY_REMOTE},
                                           Way{"LocalStrict", PQC_PATH_ONLY_LOCAL, true}),
                         [](const auto& way) { return std::string(way.param.name); });

// The documented end: without its supervisor a worker is killed, and what it held is gone.
TEST(SupervisorKillTest, TakesItsWorkerAlongAndANewDaemonServesTheSocket) {
  TempFolder folder;
  const std::string endpoint = "unix://" + folder.File("s");
  const std::vector<std::string> command = {PQCACHED_DAEMON, "--listen", endpoint, "--log-file",
                                            folder.File("log")};
  pid_t worker = 0;
  {
    Process daemon(command);
    worker = AwaitWorker(daemon.pid());
    ASSERT_NE(worker, 0);
    daemon.Kill();
  }
  for (int i = 0; kill(worker, 0) == 0 && i < 30000; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_NE(kill(worker, 0), 0) << "the worker lives on";
  Process next(command);
  Engine engine({.endpoint = endpoint});
  for (int i = 0; i < 20; ++i) engine.Act();
  engine.Verify();
  EXPECT_EQ(engine.counts().acknowledged_bytes_lost, 0u);
}

}  // namespace
}  // namespace pqcached::testing
