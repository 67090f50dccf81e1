#include "faults.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>

namespace pqcached::testing {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::minutes kPatience(1);
constexpr uint64_t kExtentBytes = 65536;

// A number of an answer in protobuf's JSON; 64-bit ones are quoted, zeros may be absent.
uint64_t NumberOf(const std::string& json, const std::string& name) {
  const size_t found = json.find('"' + name + "\":");
  if (found == std::string::npos) return 0;
  size_t begin = found + name.size() + 3;
  while (json[begin] == '"' || json[begin] == ' ') ++begin;
  return std::strtoull(json.c_str() + begin, nullptr, 10);
}

}  // namespace

std::vector<pid_t> ChildrenOf(pid_t process) {
  const std::string number = std::to_string(process);
  std::ifstream file("/proc/" + number + "/task/" + number + "/children");
  std::vector<pid_t> children;
  for (pid_t child; file >> child;) children.push_back(child);
  return children;
}

pid_t AwaitWorker(pid_t supervisor, pid_t last) {
  const auto until = steady_clock::now() + kPatience;
  while (steady_clock::now() < until) {
    for (const pid_t child : ChildrenOf(supervisor)) {
      if (child != last) return child;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return 0;
}

// A thread goes on for a moment after kill().
Stopped::Stopped(pid_t process) : process_(process) {
  kill(process_, SIGSTOP);
  const auto until = steady_clock::now() + kPatience;
  while (!AllThreadsAreStopped(process_) && steady_clock::now() < until) std::this_thread::yield();
}

Stopped::~Stopped() { kill(process_, SIGCONT); }

std::string Left::ToString() const {
  return std::to_string(sessions) + " sessions, " + std::to_string(sequences) + " sequences, " +
         std::to_string(leases) + " leases, " + std::to_string(staging_bytes) +
         " bytes of staging, " + std::to_string(used_bytes) + " bytes in use";
}

Left& Left::operator+=(const Left& other) {
  sessions += other.sessions;
  sequences += other.sequences;
  leases += other.leases;
  staging_bytes += other.staging_bytes;
  used_bytes += other.used_bytes;
  return *this;
}

Left LeftIn(Client& admin) {
  Left left;
  Result<std::string> stats = admin.AdminJson("Stats");
  if (!stats.ok()) return {.sessions = ~uint64_t{0}};
  left.sessions = NumberOf(*stats, "session_count");
  left.sequences = NumberOf(*stats, "sequence_count");
  left.leases = NumberOf(*stats, "lease_count");
  left.staging_bytes = NumberOf(*stats, "staging_bytes");
  left.used_bytes = NumberOf(*stats, "pool_used_bytes");
  return left;
}

Left AwaitNothingLeft(Client& admin, uint64_t sessions) {
  const auto until = steady_clock::now() + kPatience;
  for (;;) {
    const Left left = LeftIn(admin);
    if (left.nothing_but(sessions) || steady_clock::now() > until) return left;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

int FaultCount(int few, int many) { return std::getenv("PQCACHED_FULL_TESTS") ? many : few; }

void Record(const std::string& name, uint64_t done, const Engine::Counts& counts,
            const Left& left) {
  const auto record = [](const std::string& property, uint64_t value) {
    ::testing::Test::RecordProperty(property, std::to_string(value));
  };
  record(name, ::testing::Test::HasFailure() ? 0 : done);
  record("acknowledged_bytes_lost", counts.acknowledged_bytes_lost);
  record("wrong_rows_seen", counts.wrong_rows_seen);
  record("calls_past_deadline", counts.calls_past_deadline);
  record("extents_leaked", left.used_bytes / kExtentBytes);
  record("leases_leaked", left.leases);
}

}  // namespace pqcached::testing
