// Processes that are stopped, descriptors that run out, a clock that jumps, and a daemon too many.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "clock_shim.h"
#include "environment_fixture.h"
#include "preload.h"
#include "tests/skip.h"

namespace pqcached::testing {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

// Leaves a process the descriptors that it has.
class NoMoreDescriptors {
 public:
  explicit NoMoreDescriptors(pid_t process) : process_(process) {
    prlimit(process_, RLIMIT_NOFILE, nullptr, &before_);
    rlim_t first_free = 0;
    const std::string folder = "/proc/" + std::to_string(process_) + "/fd/";
    while (std::filesystem::is_symlink(folder + std::to_string(first_free))) ++first_free;
    const rlimit none = {.rlim_cur = first_free, .rlim_max = before_.rlim_max};
    prlimit(process_, RLIMIT_NOFILE, &none, nullptr);
  }
  ~NoMoreDescriptors() { prlimit(process_, RLIMIT_NOFILE, &before_, nullptr); }
  NoMoreDescriptors(const NoMoreDescriptors&) = delete;
  NoMoreDescriptors& operator=(const NoMoreDescriptors&) = delete;

 private:
  const pid_t process_;
  rlimit before_ = {};
};

// A group of processes that stand still together, of cgroup version 1.
class Freezer {
 public:
  Freezer() { valid_ = std::filesystem::create_directory(path_, error_); }
  ~Freezer() {
    Thaw();
    std::ifstream listed(path_ / "cgroup.procs");
    for (pid_t process; listed >> process;) {
      std::ofstream(path_.parent_path() / "cgroup.procs") << process;
    }
    std::filesystem::remove(path_, error_);
  }
  Freezer(const Freezer&) = delete;
  Freezer& operator=(const Freezer&) = delete;

  bool valid() const { return valid_; }
  bool Freeze(const std::vector<pid_t>& processes) const {
    for (const pid_t process : processes) std::ofstream(path_ / "cgroup.procs") << process;
    std::ofstream(path_ / "freezer.state") << "FROZEN";
    std::string state;
    for (int i = 0; i < 1000 && state != "FROZEN"; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      std::ifstream(path_ / "freezer.state") >> state;
    }
    return state == "FROZEN";
  }
  void Thaw() const { std::ofstream(path_ / "freezer.state") << "THAWED"; }

 private:
  const std::filesystem::path path_ =
      "/sys/fs/cgroup/freezer/pqcached-test-" + std::to_string(getpid());
  std::error_code error_;
  bool valid_ = false;
};

class ProcessFaultsTest : public EnvironmentTest {
 protected:
  // A worker that has no more descriptors, with engines and another client.
  void ExhaustDescriptors(const std::vector<std::string>& flags) {
    Start(flags);
    AddEngine(PQC_PATH_ONLY_LOCAL);
    AddEngine(PQC_PATH_ONLY_REMOTE);
    {
      Client client = daemon().OpenClient();
      const Cache cache = Must(client.OpenCache(SpecOf("one", {0})));  // connects
      const NoMoreDescriptors none(worker());
      EXPECT_EQ(client.OpenCache(SpecOf("another", {0})).status().code(), PQC_RESOURCE_EXHAUSTED);
      EXPECT_TRUE(AwaitLog("event=short_of_descriptors call=OpenCache "));
      // The worker may close some that it had, such as those of connections that have ended.
      std::vector<Client> others;
      for (const pqc_path_choice path : {PQC_PATH_ONLY_LOCAL, PQC_PATH_ONLY_REMOTE}) {
        bool refused = false;
        for (int i = 0; i < 20 && !refused; ++i) {
          Result<Client> opened =
              Client::Open({.endpoint = daemon().endpoint(), .timeout_ms = 1000, .path = path});
          refused = !opened.ok();
          if (!refused) others.push_back(std::move(*opened));
        }
        EXPECT_TRUE(refused) << "there were descriptors for " << others.size() << " sessions";
      }
      const std::string socket = daemon().endpoint().substr(std::string("unix://").size());
      EXPECT_TRUE(AwaitLog("event=cannot_accept socket=" + socket + " "));
      EXPECT_TRUE(AwaitLog("event=cannot_accept socket=" + socket + ".broker "));
      Act(50);
      Verify();
    }
    ExpectServes();
    EXPECT_EQ(refusals(), 0u) << "calls of open sessions were refused";
  }
  void ActFor(std::chrono::milliseconds time) {
    const auto until = steady_clock::now() + time;
    while (steady_clock::now() < until) Act(1);
  }
};

TEST_F(ProcessFaultsTest, DescriptorsExhausted) {
  ExhaustDescriptors({});
  Survived(Fault::kDescriptors);
}

TEST_F(ProcessFaultsTest, DescriptorsExhaustedWithFiles) {
  TempFolder folder;
  const std::string directory = folder.File("pools");
  ASSERT_EQ(mkdir(directory.c_str(), 0700), 0);
  ExhaustDescriptors({"--pool-directory", directory});
}

// Then the supervisor cannot receive memory: a cache that it does not hold would end with the worker.
TEST_F(ProcessFaultsTest, DescriptorsOfTheSupervisorExhausted) {
  Start();
  AddEngine(PQC_PATH_ONLY_LOCAL);
  AddEngine(PQC_PATH_ONLY_REMOTE);
  {
    const NoMoreDescriptors none(supervisor());
    EXPECT_EQ(TryEngine(), nullptr) << "a session that the supervisor does not hold";
    EXPECT_TRUE(AwaitLog("event=short_of_descriptors call="));
    Act(20);
  }
  ExpectServes();
  const pid_t before = worker();
  kill(before, SIGKILL);
  ASSERT_GT(AwaitWorker(supervisor(), before), 0);
  Act(20);
  Verify();
  const Engine::Counts counts = EndEngines();
  EXPECT_TRUE(counts.clean()) << counts.ToString();
}

TEST_F(ProcessFaultsTest, SupervisorStopped) {
  Start({"--watchdog-timeout", "4s"});  // the worker's reports of 10 s would be missed
  AddEngine(PQC_PATH_ONLY_LOCAL);
  AddEngine(PQC_PATH_ONLY_REMOTE);
  const pid_t before = worker();
  Engine::Counts counts;
  std::thread newcomer;
  {
    const Stopped stopped(supervisor());
    newcomer = std::thread([&, options = NextOptions(PQC_PATH_ONLY_LOCAL)] {
      Engine engine(options);
      for (int i = 0; i < 20; ++i) engine.Act();
      engine.Verify();
      counts = engine.counts();
    });
    ActFor(seconds(10));
    Verify();
  }
  newcomer.join();
  Count(counts);
  EXPECT_TRUE(AwaitLog("event=session_not_kept "));
  EXPECT_TRUE(AwaitLog("event=supervisor_paused "));
  EXPECT_EQ(worker(), before) << "the supervisor has killed a worker that reported";
  const size_t from = Log().size();
  {
    const Stopped stopped(supervisor());  // too short for a wait that ends late
    ActFor(std::chrono::milliseconds(800));
  }
  EXPECT_TRUE(AwaitLog("event=supervisor_paused ", from));
  ExpectServes();
  // The supervisor has what the next worker needs.
  kill(before, SIGKILL);
  ASSERT_GT(AwaitWorker(supervisor(), before), 0);
  Act(20);
  Survived(Fault::kStoppedSupervisor);
}

TEST_F(ProcessFaultsTest, WorkerStopped) {
  Start({"--watchdog-timeout", "10s"});
  AddEngine(PQC_PATH_ONLY_LOCAL);
  AddEngine(PQC_PATH_ONLY_REMOTE);
  const pid_t before = worker();
  {
    const Stopped stopped(before);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  EXPECT_TRUE(AwaitLog("event=worker_paused "));
  Act(10);
  Verify();
  EXPECT_EQ(worker(), before) << "the supervisor has killed the worker early";
  {
    const Stopped stopped(before);
    Act(5);  // until the next worker serves
    EXPECT_TRUE(AwaitLog("event=worker_killed "));
  }
  EXPECT_NE(worker(), before);
  ExpectServes();
  Survived(Fault::kStoppedWorker);
}

// A container that is paused: no process of it gets a signal when it continues.
TEST_F(ProcessFaultsTest, Frozen) {
  Start({"--watchdog-timeout", "3s"});
  AddEngine(PQC_PATH_ONLY_LOCAL);
  AddEngine(PQC_PATH_ONLY_REMOTE);
  const pid_t before = worker();
  {
    const Freezer freezer;
    if (!freezer.valid()) PQC_SKIP("freezer_cgroup") << "no process can be frozen";
    ASSERT_TRUE(freezer.Freeze({supervisor(), before}));
    std::this_thread::sleep_for(seconds(5));
    freezer.Thaw();
  }
  EXPECT_TRUE(AwaitLog("event=supervisor_paused "));
  EXPECT_TRUE(AwaitLog("event=worker_paused "));
  Act(20);
  Verify();
  EXPECT_EQ(worker(), before) << "the supervisor has counted its own pause:\n" << Log();
  const Engine::Counts counts = EndEngines();
  EXPECT_TRUE(counts.clean()) << counts.ToString();
}

TEST_F(ProcessFaultsTest, ClientStopped) {
  Start({"--lease-timeout", "1s"});
  AddEngine(PQC_PATH_ONLY_LOCAL);
  AddEngine(PQC_PATH_ONLY_REMOTE);
  Process client(
      {PQCACHED_ENGINE_PROCESS, daemon().endpoint(), std::to_string(PQC_PATH_ONLY_LOCAL), "77"});
  ASSERT_EQ(client.ReadLine(), "working");
  const size_t from = Log().size();
  {
    const Stopped stopped(client.pid());
    ActFor(seconds(3));
    EXPECT_TRUE(AwaitLog("event=leases_expired ", from));
    Verify();
  }
  ActFor(seconds(1));
  client.Signal(SIGTERM);
  EXPECT_EQ(client.ReadLine(), "clean");
  EXPECT_EQ(client.Wait(), 0);
  ExpectServes();
  Survived(Fault::kStoppedClient);
}

TEST_F(ProcessFaultsTest, ClockJumps) {
  TempFolder folder;
  const SharedFile<ShimmedClock> clock(folder.File("clock"));
  {
    const ScopedVariable shim("LD_PRELOAD", PreloadOf(PQCACHED_CLOCK_SHIM));
    const ScopedVariable file(kClockShimVariable, clock.path());
    Start({"--lease-timeout", "5m", "--watchdog-timeout", "10s"});
  }
  AddEngine(PQC_PATH_ONLY_LOCAL);
  AddEngine(PQC_PATH_ONLY_REMOTE);
  const pid_t before = worker();
  for (const auto jump : {std::chrono::hours(1), std::chrono::hours(-1)}) {
    const size_t from = Log().size();
    clock->offset_ns.fetch_add(std::chrono::nanoseconds(jump).count());
    ActFor(seconds(1));
    daemon().OpenClient();  // a line of the log
    const std::string by = std::to_string(std::chrono::seconds(jump).count());
    EXPECT_TRUE(AwaitLog("event=clock_jumped seconds=" + by, from)) << Log();
    Verify();
  }
  EXPECT_EQ(worker(), before);
  ExpectServes();
  EXPECT_EQ(refusals(), 0u);
  Survived(Fault::kClockJump);
}

TEST_F(ProcessFaultsTest, TwoDaemons) {
  TempFolder folder;
  const std::string directory = folder.File("pools"), log = folder.File("log");
  ASSERT_EQ(mkdir(directory.c_str(), 0700), 0);
  Start({"--pool-directory", directory});
  AddEngine(PQC_PATH_ONLY_LOCAL);
  AddEngine(PQC_PATH_ONLY_REMOTE);
  {
    Process second({PQCACHED_DAEMON, "--listen", daemon().endpoint(), "--log-file", log});
    Act(20);
    EXPECT_EQ(second.Wait(), 1);
    EXPECT_NE(LogOf(log).find("event=not_started "), std::string::npos) << LogOf(log);
    Verify();
  }
  Process second({PQCACHED_DAEMON, "--listen", "unix://" + folder.File("s"), "--log-file", log,
                  "--pool-directory", directory});
  const auto until = steady_clock::now() + std::chrono::minutes(1);
  while (LogOf(log).find("event=configuration_refused ") == std::string::npos &&
         steady_clock::now() < until) {
    ActFor(std::chrono::milliseconds(100));
  }
  EXPECT_NE(LogOf(log).find("another process uses it"), std::string::npos) << LogOf(log);
  second.Signal(SIGTERM);
  EXPECT_EQ(second.Wait(), 0);
  ExpectServes();
  Survived(Fault::kTwoDaemons, LogOf(log));
}

}  // namespace
}  // namespace pqcached::testing
