#include "tests/client/process.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace pqcached::testing {
namespace {

// Starts the command with its standard output (and error, if asked for) in a pipe, whose reading
// end is *output.
pid_t Spawn(const std::vector<std::string>& command, bool with_error, int* output) {
  std::vector<char*> arguments;
  for (const std::string& argument : command)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) throw std::runtime_error("fork");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that is killed leaves nothing running
    if (getppid() != parent) _exit(127);
    dup2(ends[1], STDOUT_FILENO);
    if (with_error) dup2(ends[1], STDERR_FILENO);
    execv(arguments[0], arguments.data());
    _exit(127);
  }
  close(ends[1]);
  *output = ends[0];
  return pid;
}

int ExitCode(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }

}  // namespace

TempFolder::TempFolder() {
  // Short, because the path of a unix socket has at most 107 bytes.
  std::string name = "/tmp/pqc.XXXXXX";
  if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp");
  path_ = name;
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

Process::Process(const std::vector<std::string>& command)
    : pid_(Spawn(command, /*with_error=*/false, &output_)) {}

Process::~Process() {
  Kill();
  close(output_);
}

std::string Process::ReadLine() {
  for (;;) {
    if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
      const std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    char bytes[512];
    const ssize_t count = read(output_, bytes, sizeof(bytes));
    if (count <= 0) return "";
    buffer_.append(bytes, static_cast<size_t>(count));
  }
}

bool Process::WaitForLine(const std::string& line) {
  for (;;) {
    const std::string read = ReadLine();
    if (read == line) return true;
    if (read.empty()) return false;
  }
}

void Process::Signal(int signal) const {
  if (pid_ > 0) kill(pid_, signal);
}

void Process::Kill() {
  Signal(SIGKILL);
  Wait();
}

int Process::Wait() {
  if (pid_ <= 0) return -1;
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  return ExitCode(status);
}

bool AllThreadsAreStopped(pid_t process) {
  const std::string tasks = "/proc/" + std::to_string(process) + "/task";
  for (const auto& task : std::filesystem::directory_iterator(tasks)) {
    std::ifstream stat(task.path() / "stat");
    std::string line;
    std::getline(stat, line);
    const size_t name_end = line.rfind(')');  // the name may have blanks
    if (name_end == std::string::npos || line.compare(name_end, 3, ") T") != 0) return false;
  }
  return true;
}

Outcome RunProgram(const std::vector<std::string>& command) {
  int output;
  const pid_t pid = Spawn(command, /*with_error=*/true, &output);
  Outcome outcome;
  char bytes[4096];
  for (ssize_t count; (count = read(output, bytes, sizeof(bytes))) > 0;) {
    outcome.output.append(bytes, static_cast<size_t>(count));
  }
  close(output);
  int status = 0;
  waitpid(pid, &status, 0);
  outcome.exit_code = ExitCode(status);
  return outcome;
}

}  // namespace pqcached::testing
