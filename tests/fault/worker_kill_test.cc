// A worker that is killed at any moment loses nothing that was acknowledged: engines work at random,
// and each compares every byte that was acknowledged to it after each kill. PQCACHED_KILL_ENGINES
// chooses fewer than three engines, and PQCACHED_KILL_ROUNDS more rounds.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "faults.h"

namespace pqcached::testing {
namespace {

// The pauses between workers grow, so a supervisor gets only so many kills.
constexpr int kKillsPerSupervisor = 5;
constexpr size_t kMaxEngines = 3;

size_t FromEnvironment(const char* name, size_t otherwise) {
  const char* wanted = std::getenv(name);
  return wanted != nullptr ? static_cast<size_t>(std::atoi(wanted)) : otherwise;
}

size_t EngineCount() {
  return std::clamp<size_t>(FromEnvironment("PQCACHED_KILL_ENGINES", kMaxEngines), 1, kMaxEngines);
}

// Kills the workers of a supervisor, on a thread of its own.
class Killer {
 public:
  Killer(pid_t supervisor, uint32_t seed)
      : supervisor_(supervisor), random_(seed), thread_([this] { Run(); }) {}
  ~Killer() { thread_.join(); }

  int kills() const { return kills_; }
  bool done() const { return done_; }
  // The engine has worked since so many kills.
  void GoOn(size_t engine, int kills) { gone_on_[engine] = kills; }

 private:
  bool AllHaveGoneOn() const {
    return std::all_of(gone_on_.begin(), gone_on_.begin() + engine_count_,
                       [this](const auto& kills) { return kills >= kills_; });
  }

  void Run() {
    pid_t last = 0;
    while (kills_ < kKillsPerSupervisor) {
      const pid_t worker = AwaitWorker(supervisor_, last);
      if (worker == 0) break;
      // Mostly a worker that serves, now and then one that is about to recover.
      const bool early = kills_ > 0 && random_() % 4 == 0;
      for (int i = 0; !early && !AllHaveGoneOn() && i < 30000; ++i) {
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
  std::atomic<int> kills_ = 0;
  const size_t engine_count_ = EngineCount();
  std::array<std::atomic<int>, kMaxEngines> gone_on_ = {};
  std::atomic<bool> done_ = false;
  std::thread thread_;
};

// Works until the killer has done, and compares everything after each kill.
Engine::Counts Work(const Engine::Options& options, size_t number, Killer& killer) {
  Engine engine(options);
  for (int i = 0; i < 20; ++i) engine.Act();
  while (!killer.done()) {
    const int before = killer.kills();
    for (int i = 0; i < 5; ++i) engine.Act();
    if (killer.kills() == before) killer.GoOn(number, before);
    if (killer.kills() != before) engine.Verify();
  }
  engine.Verify();
  return engine.counts();
}

struct Way {
  const char* name;
  pqc_path_choice path;
  bool strict = false;
};

class WorkerKillTest : public ::testing::TestWithParam<Way> {};

TEST_P(WorkerKillTest, LosesNothingThatWasAcknowledged) {
  const auto supervisors = static_cast<int>(
      FromEnvironment("PQCACHED_KILL_ROUNDS", static_cast<size_t>(FaultCount(1, 50))));
  uint64_t kills = 0;
  Engine::Counts counts;
  Left all_left;
  for (int round = 0; round < supervisors; ++round) {
    SCOPED_TRACE(round);
    const auto seed = static_cast<uint32_t>(round) * 2 + static_cast<uint32_t>(GetParam().path);
    Daemon daemon({"--strict-memory", GetParam().strict ? "true" : "false"});
    Client admin = daemon.OpenClient("default", PQC_PATH_ONLY_REMOTE);
    {
      Killer killer(daemon.process().pid(), seed);
      std::array<Engine::Counts, kMaxEngines> seen;
      std::vector<std::thread> engines;
      for (size_t i = 0; i < EngineCount(); ++i) {
        engines.emplace_back([&, i] {
          seen[i] = Work({.endpoint = daemon.endpoint(),
                          .path = GetParam().path,
                          .seed = seed + 1000 * static_cast<uint32_t>(i),
                          .cache_name = "cache-" + std::to_string(i)},
                         i, killer);
        });
      }
      for (std::thread& engine : engines) engine.join();
      for (const Engine::Counts& one : seen) counts += one;
      kills += static_cast<uint64_t>(killer.kills());
      EXPECT_EQ(killer.kills(), kKillsPerSupervisor);
    }
    const Left left = AwaitNothingLeft(admin, 1);
    EXPECT_TRUE(left.nothing_but(1)) << left.ToString();
    all_left += left;
  }
  EXPECT_TRUE(counts.clean()) << counts.ToString();
  std::printf("%llu kills, %s\n", static_cast<unsigned long long>(kills),
              counts.ToString().c_str());
  Record("daemon_kills_survived", kills, counts, all_left);
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
