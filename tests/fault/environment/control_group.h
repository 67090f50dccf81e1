// ControlGroup: a control group of this test with a limit of memory. Hog: a process in it that takes
// memory.
#ifndef PQCACHED_TESTS_FAULT_ENVIRONMENT_CONTROL_GROUP_H_
#define PQCACHED_TESTS_FAULT_ENVIRONMENT_CONTROL_GROUP_H_

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

namespace pqcached::testing {

class ControlGroup {
 public:
  // `version`: 1 or 2, of the interface that the machine has at its usual place.
  ControlGroup(int version, uint64_t limit_bytes) : version_(version), limit_bytes_(limit_bytes) {
    const std::filesystem::path root = version == 1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup";
    if (version == 2) {
      std::string controllers;
      std::getline(std::ifstream(root / "cgroup.controllers"), controllers);
      if (controllers.find("memory") == std::string::npos) return;
      std::ofstream(root / "cgroup.subtree_control") << "+memory" << std::flush;
    }
    const std::filesystem::path path = root / ("pqcached-test-" + std::to_string(getpid()));
    std::error_code error;
    if (!std::filesystem::create_directory(path, error)) return;
    path_ = path;
    home_ = root / GroupOf(version);
    std::ofstream(path_ / Limit()) << limit_bytes << std::flush;
    valid_ = Number(Limit()) == limit_bytes;
  }
  ~ControlGroup() {
    if (path_.empty()) return;
    // A process that has just ended may still be listed.
    std::error_code error;
    for (int i = 0; i < 1000 && !std::filesystem::remove(path_, error); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  ControlGroup(const ControlGroup&) = delete;
  ControlGroup& operator=(const ControlGroup&) = delete;

  // Returns false where this process may not limit memory.
  bool valid() const { return valid_; }
  // Moves a process into the group, with all children that it starts from then on.
  bool Add(pid_t process) const { return Move(process, path_); }
  // Moves this process out again, to where it was.
  bool Leave() const { return Move(getpid(), home_); }
  uint64_t left_bytes() const {
    const uint64_t used = Number(version_ == 1 ? "memory.usage_in_bytes" : "memory.current");
    return limit_bytes_ - std::min(limit_bytes_, used);
  }

 private:
  static bool Move(pid_t process, const std::filesystem::path& group) {
    std::ofstream file(group / "cgroup.procs");
    file << process << std::flush;
    return file.good();
  }
  // Returns the group of this process, as a path without the place of the interface.
  static std::string GroupOf(int version) {
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
      const size_t mark = line.find(version == 1 ? ":memory:/" : "0::/");
      if (mark != std::string::npos) return line.substr(line.rfind(":/") + 2);
    }
    return "";
  }
  const char* Limit() const { return version_ == 1 ? "memory.limit_in_bytes" : "memory.max"; }
  uint64_t Number(const char* file) const {
    uint64_t number = 0;
    std::ifstream(path_ / file) >> number;
    return number;
  }

  const int version_;
  const uint64_t limit_bytes_;
  std::filesystem::path path_;
  std::filesystem::path home_;  // of this process
  bool valid_ = false;
};

// Takes its memory once it is in the group, and ends with this object.
class Hog {
 public:
  Hog(const ControlGroup& group, uint64_t bytes) {
    int go[2] = {}, done[2] = {};
    if (pipe2(go, O_CLOEXEC) != 0 || pipe2(done, O_CLOEXEC) != 0) return;
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ == 0) Run(parent, go, done, bytes);
    std::ofstream("/proc/" + std::to_string(pid_) + "/oom_score_adj") << 1000;
    group.Add(pid_);
    for (const int each : {go[0], done[1]}) close(each);
    char byte = 0;
    if (write(go[1], &byte, 1) == 1) took_ = read(done[0], &byte, 1) == 1;
    for (const int each : {go[1], done[0]}) close(each);
  }
  ~Hog() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Hog(const Hog&) = delete;
  Hog& operator=(const Hog&) = delete;

  // Returns false when the kernel has killed it before it had all.
  bool took() const { return took_; }

 private:
  // Calls only what is safe after a fork of a program with threads.
  [[noreturn]] static void Run(pid_t parent, const int* go, const int* done, uint64_t bytes) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    for (const int each : {go[1], done[0]}) close(each);
    char byte = 0;
    if (read(go[0], &byte, 1) != 1) _exit(1);
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) _exit(1);
    std::memset(memory, 1, bytes);
    if (write(done[1], &byte, 1) != 1) _exit(1);
    for (;;) pause();
  }

  pid_t pid_ = -1;
  bool took_ = false;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_ENVIRONMENT_CONTROL_GROUP_H_
