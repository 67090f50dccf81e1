// EnvironmentTest: a daemon whose log can be searched, and engines that act while something is wrong
// with what surrounds it.
#ifndef PQCACHED_TESTS_FAULT_ENVIRONMENT_ENVIRONMENT_FIXTURE_H_
#define PQCACHED_TESTS_FAULT_ENVIRONMENT_ENVIRONMENT_FIXTURE_H_

#include <gtest/gtest.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fault_table.h"
#include "faults.h"

namespace pqcached::testing {

// A variable of the environment of the processes that this one starts.
class ScopedVariable {
 public:
  ScopedVariable(std::string name, const std::string& value);
  ~ScopedVariable();
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const std::string name_;
};

class EnvironmentTest : public ::testing::Test {
 protected:
  void TearDown() override { Stop(); }

  void Start(std::vector<std::string> flags = {});
  // Ends engines and daemon.
  void Stop();

  Daemon& daemon() { return *daemon_; }
  pid_t supervisor() { return daemon_->process().pid(); }
  pid_t worker() { return AwaitWorker(supervisor()); }
  std::string log_path() const { return folder_.File("log"); }
  std::string Log() const { return LogOf(log_path()); }
  static std::string LogOf(const std::string& path);
  // Waits until the log has `words` behind its first `from` bytes.
  bool AwaitLog(const std::string& words, size_t from = 0) const;

  // An engine with a cache of its own. It acts, so that it has something to lose.
  Engine& AddEngine(pqc_path_choice path = PQC_PATH_ONLY_LOCAL);
  // An engine whose cache may be refused. Its counts are kept, and it ends, if that was so.
  Engine* TryEngine(pqc_path_choice path = PQC_PATH_ONLY_LOCAL);
  // The options of another engine, for a thread that makes it itself and adds its counts.
  Engine::Options NextOptions(pqc_path_choice path);
  void Count(const Engine::Counts& counts) { ended_ += counts; }
  // Lets all engines act, one after the other.
  void Act(int operations);
  // Lets each engine compare everything that was acknowledged.
  void Verify();
  uint64_t refusals() const;
  // Returns what all engines have seen, and ends them.
  Engine::Counts EndEngines();
  // The fault is over: a new engine finds room for all that it does, and the others go on.
  void ExpectServes();

  // Ends the engines, and records that the fault was survived: nothing was lost, nothing is left,
  // and `log` has the events of the row, which names this test.
  void Survived(Fault fault) { Survived(fault, Log()); }
  void Survived(Fault fault, const std::string& log);

 private:
  TempFolder folder_;
  std::unique_ptr<Daemon> daemon_;
  std::vector<std::unique_ptr<Engine>> engines_;
  Engine::Counts ended_;  // of engines that have ended
  uint32_t made_ = 0;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_ENVIRONMENT_ENVIRONMENT_FIXTURE_H_
