#include "service/supervise/worker_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace pqcached::service {
namespace {

constexpr int kCannotExecute = 127;

// Variables that are meant for this process; the worker gets its own values.
constexpr std::array<absl::string_view, 8> kReplaced = {
    "NOTIFY_SOCKET=", "LISTEN_PID=",    "LISTEN_FDS=",   "LISTEN_FDNAMES=",
    "FDSTORE=",       "WATCHDOG_USEC=", "WATCHDOG_PID=", "PQCACHED_CONFIRMS_KEPT=",
};

std::vector<std::string> EnvironmentOf(const WorkerProcess& worker) {
  std::vector<std::string> variables;
  for (char** each = environ; *each != nullptr; ++each) {
    const absl::string_view variable(*each);
    bool replaced = false;
    for (const absl::string_view name : kReplaced) replaced |= absl::StartsWith(variable, name);
    if (!replaced) variables.emplace_back(variable);
  }
  std::string names;
  for (const auto& [name, descriptor] : worker.kept) {
    absl::StrAppend(&names, names.empty() ? "" : ":", name);
  }
  variables.push_back(absl::StrCat("NOTIFY_SOCKET=", worker.notify_socket));
  variables.push_back(absl::StrCat("FDSTORE=", worker.max_kept));
  variables.push_back(absl::StrCat(kConfirmsVariable, "=1"));
  variables.push_back(absl::StrCat("LISTEN_PID=", getpid()));
  variables.push_back(absl::StrCat("LISTEN_FDS=", worker.kept.size()));
  variables.push_back(absl::StrCat("LISTEN_FDNAMES=", names));
  if (worker.watchdog_timeout > absl::ZeroDuration()) {
    variables.push_back(
        absl::StrCat("WATCHDOG_USEC=", absl::ToInt64Microseconds(worker.watchdog_timeout)));
    variables.push_back(absl::StrCat("WATCHDOG_PID=", getpid()));
  }
  return variables;
}

// Moves the descriptors to where LISTEN_FDS announces them, in the order of their names, and closes
// all others. Returns false when the kernel refuses.
bool PlaceDescriptors(const KeptDescriptors& kept) {
  const int end = kFirstListenDescriptor + static_cast<int>(kept.size());
  std::vector<int> copies;  // above the target range, so that none is overwritten too early
  for (const auto& [name, descriptor] : kept) {
    copies.push_back(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, end));
    if (copies.back() < 0) return false;
  }
  for (size_t i = 0; i < copies.size(); ++i) {
    if (dup2(copies[i], kFirstListenDescriptor + static_cast<int>(i)) < 0) return false;
  }
  close_range(static_cast<unsigned>(end), UINT_MAX, 0);
  return true;
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  pointers.reserve(texts.size() + 1);
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Runs `work` in the child, which has closed all descriptors but the kept ones. Ends without
// running destructors.
[[noreturn]] void Work(const WorkerProcess& worker, std::vector<std::string> environment) {
  std::vector<char*> variables = Pointers(environment);
  environ = variables.data();
  const int status = worker.work(std::move(worker.mappings));
  std::fflush(nullptr);
  _exit(status);
}

[[noreturn]] void ExecWorker(const WorkerProcess& worker, pid_t supervisor) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != supervisor) _exit(kCannotExecute);  // the supervisor has ended already
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  std::vector<std::string> command = worker.command;
  std::vector<std::string> environment = EnvironmentOf(worker);
  if (PlaceDescriptors(worker.kept)) {
    if (worker.work) Work(worker, std::move(environment));
    execve(command[0].c_str(), Pointers(command).data(), Pointers(environment).data());
  }
  std::fprintf(stderr, "error: cannot execute %s: %s\n", command[0].c_str(), std::strerror(errno));
  _exit(kCannotExecute);
}

}  // namespace

pid_t StartWorkerProcess(const WorkerProcess& worker) {
  const pid_t supervisor = getpid();
  const pid_t pid = fork();
  if (pid == 0) ExecWorker(worker, supervisor);
  return pid;
}

std::string ProgramPath(const char* argument) {
  std::error_code error;
  if (std::strchr(argument, '/') != nullptr) {
    const std::filesystem::path path = std::filesystem::absolute(argument, error);
    if (!error) return path;
  }
  const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? std::string(argument) : path.string();
}

}  // namespace pqcached::service
