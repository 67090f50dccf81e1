// The real binary in a process of its own, with all that it writes.
#ifndef PQCACHED_TESTS_SERVICE_DAEMON_PROCESS_H_
#define PQCACHED_TESTS_SERVICE_DAEMON_PROCESS_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace pqcached::service {

// One run of the daemon. Killed when the test forgets it.
class Daemon {
 public:
  explicit Daemon(std::vector<std::string> arguments, std::vector<std::string> environment = {}) {
    int ends[2] = {};
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    arguments.insert(arguments.begin(), PQCACHED_DAEMON);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    environment.push_back("ASAN_OPTIONS=" +
                          std::string(getenv("ASAN_OPTIONS") ? getenv("ASAN_OPTIONS") : ""));
    environment.push_back("LSAN_OPTIONS=" +
                          std::string(getenv("LSAN_OPTIONS") ? getenv("LSAN_OPTIONS") : ""));
    std::vector<char*> envp;
    for (std::string& variable : environment) envp.push_back(variable.data());
    envp.push_back(nullptr);
    EXPECT_EQ(posix_spawn(&pid_, PQCACHED_DAEMON, &actions, nullptr, argv.data(), envp.data()), 0);
    posix_spawn_file_actions_destroy(&actions);
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

  // Reads its output until the line with `words` has come, or its end.
  bool AwaitOutput(const std::string& words) { return AwaitFrom(0, words); }
  // Likewise, behind the words that came last.
  bool AwaitMore(const std::string& words) { return AwaitFrom(seen_, words); }

  void Signal(int number) { kill(pid_, number); }

  // Its exit status; -signal when a signal ended it.
  int Wait() {
    while (AwaitOutput(std::string(1, '\0'))) {
    }
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
  bool AwaitFrom(size_t begin, const std::string& words) {
    size_t found = std::string::npos;
    while ((found = output_.find(words, begin)) == std::string::npos ||
           output_.find('\n', found) == std::string::npos) {
      char buffer[4096];
      const ssize_t got = read(output_descriptor_, buffer, sizeof(buffer));
      if (got <= 0) return false;
      output_.append(buffer, static_cast<size_t>(got));
    }
    seen_ = found + words.size();
    return true;
  }

  pid_t pid_ = 0;
  int output_descriptor_ = -1;
  std::string output_;
  size_t seen_ = 0;
  bool ended_ = false;
};

}  // namespace pqcached::service

#endif  // PQCACHED_TESTS_SERVICE_DAEMON_PROCESS_H_
