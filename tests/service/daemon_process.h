// The real binary in a process of its own, with all that it writes.
#ifndef PQCACHED_TESTS_SERVICE_DAEMON_PROCESS_H_
#define PQCACHED_TESTS_SERVICE_DAEMON_PROCESS_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

namespace pqcached::service {

// One run of the daemon. It is killed with this object, and with the test program.
//
// Waits end after kPatience: the test fails then, with what the daemon has written.
class Daemon {
 public:
  static constexpr std::chrono::seconds kPatience{100};

  explicit Daemon(std::vector<std::string> arguments, std::vector<std::string> environment = {},
                  const std::string& program = PQCACHED_DAEMON) {
    arguments.insert(arguments.begin(), program);
    for (const char* name : {"ASAN_OPTIONS", "LSAN_OPTIONS"}) {
      const char* value = getenv(name);
      environment.push_back(std::string(name) + "=" + (value ? value : ""));
    }
    const std::vector<char*> argv = PointersTo(arguments), envp = PointersTo(environment);
    int ends[2] = {};
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ == 0) {  // calls only what is safe after a fork of a program with threads
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(127);  // the test program has ended already
      dup2(ends[1], STDOUT_FILENO);
      dup2(ends[1], STDERR_FILENO);
      execve(program.c_str(), argv.data(), envp.data());
      _exit(127);
    }
    EXPECT_GT(pid_, 0);
    close(ends[1]);
    output_descriptor_ = ends[0];
  }

  ~Daemon() {
    if (!ended_) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(output_descriptor_);
  }
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Reads its output until the line with `words` has come, or its end.
  bool AwaitOutput(const std::string& words) { return AwaitFrom(0, words); }
  // Likewise, behind the words that came last.
  bool AwaitMore(const std::string& words) { return AwaitFrom(seen_, words); }

  void Signal(int number) { kill(pid_, number); }

  // Its exit status; -signal when a signal ended it. Kills it when it does not end.
  int Wait() {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (ReadMore(until)) {
    }
    if (!at_end_) kill(pid_, SIGKILL);
    int status = 0;
    waitpid(pid_, &status, 0);
    ended_ = true;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  const std::string& output() const { return output_; }
  pid_t pid() const { return pid_; }

  // Of the newest worker that is ready; 0 when there was none.
  pid_t WorkerPid() const {
    const size_t line = output_.rfind("event=ready ");
    const size_t at = output_.find(" pid=", line);
    if (line == std::string::npos || at == std::string::npos) return 0;
    return static_cast<pid_t>(std::stol(output_.substr(at + 5)));
  }

 private:
  static std::vector<char*> PointersTo(std::vector<std::string>& texts) {
    std::vector<char*> pointers;
    for (std::string& text : texts) pointers.push_back(text.data());
    pointers.push_back(nullptr);
    return pointers;
  }

  bool AwaitFrom(size_t begin, const std::string& words) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    size_t found = std::string::npos;
    while ((found = output_.find(words, begin)) == std::string::npos ||
           output_.find('\n', found) == std::string::npos) {
      if (!ReadMore(until)) return false;
    }
    seen_ = found + words.size();
    return true;
  }

  // False at the end of the output, and when nothing comes until then.
  bool ReadMore(std::chrono::steady_clock::time_point until) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    pollfd output = {.fd = output_descriptor_, .events = POLLIN, .revents = 0};
    const int ready = poll(&output, 1, std::max(0, static_cast<int>(left.count())));
    if (ready < 0 && errno == EINTR) return true;
    EXPECT_GT(ready, 0) << "the daemon writes nothing more:\n" << output_;
    if (ready <= 0) return false;
    char buffer[4096];
    const ssize_t got = read(output_descriptor_, buffer, sizeof(buffer));
    at_end_ = got <= 0;
    if (!at_end_) output_.append(buffer, static_cast<size_t>(got));
    return !at_end_;
  }

  pid_t pid_ = 0;
  int output_descriptor_ = -1;
  std::string output_;
  size_t seen_ = 0;
  bool at_end_ = false;  // of its output
  bool ended_ = false;
};

}  // namespace pqcached::service

#endif  // PQCACHED_TESTS_SERVICE_DAEMON_PROCESS_H_
