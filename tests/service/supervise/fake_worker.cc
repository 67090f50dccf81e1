// A worker for tests: fake_worker DIRECTORY STEP... [--worker]. The n-th process that is
// started with a directory does the n-th step, and the last one again after that.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "service/supervise/notify.h"

namespace pqcached::service {
namespace {

size_t CountStart(const std::string& directory) {
  std::ofstream(directory + "/starts", std::ios::app) << getpid() << "\n";
  std::ifstream starts(directory + "/starts");
  size_t count = 0;
  for (std::string line; std::getline(starts, line);) ++count;
  return count;
}

void Write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

// What it keeps: a pool, and the control memory and connection of a session.
bool Keep(Notifier& notifier) {
  const kvstore::FileDescriptor pool(memfd_create("pool", MFD_CLOEXEC));
  if (write(pool.get(), "rows", 4) != 4) return false;
  return notifier.Keep("pool-1", pool.get()).ok();
}

[[noreturn]] void AwaitTerm(int exit_code = 0) {
  sigset_t term;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  int number = 0;
  sigwait(&term, &number);
  _exit(exit_code);
}

void WriteWhatIsKept(const Notifier& notifier, const std::string& directory) {
  Write(directory + "/names", absl::StrJoin(notifier.Names(), ","));
  char content[16] = {};
  const kvstore::FileDescriptor pool = notifier.Take("pool-1");
  if (pread(pool.get(), content, sizeof(content) - 1, 0) < 0) return;
  Write(directory + "/content", content);
}

// Ends this process by `signal`, also where a sanitizer has a handler for it.
void EndBy(int signal) {
  ::signal(signal, SIG_DFL);
  raise(signal);
}

int Run(const std::string& directory, const std::string& step) {
  const pid_t supervisor = getppid();
  sigset_t term;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  sigprocmask(SIG_BLOCK, &term, nullptr);
  const Environment environment = [](const char* name) -> const char* { return getenv(name); };
  const auto made = Notifier::FromEnvironment(environment);
  if (!made.ok() || *made == nullptr) return 99;
  Notifier& notifier = **made;
  const auto ready = [&] { return notifier.Send("READY=1\nSTATUS=" + step).ok(); };

  if (step == "refuse") return 1;
  if (step == "bad-config") return 2;
  if (step == "stop-and-bad-config") {
    kill(supervisor, SIGTERM);
    AwaitTerm(/*exit_code=*/2);
  }
  if (step == "stop-and-ready") {  // becomes ready meanwhile, and then does not end in order
    kill(supervisor, SIGTERM);
    int number = 0;
    sigwait(&term, &number);
    if (!ready()) return 98;
    return 1;
  }
  if (step == "stop-and-crash") {
    kill(supervisor, SIGTERM);
    EndBy(SIGSEGV);
  }
  if (step == "stop-before-a-handler") {
    sigprocmask(SIG_UNBLOCK, &term, nullptr);
    kill(supervisor, SIGTERM);
    while (true) pause();
  }
  if (step == "crash") EndBy(SIGSEGV);
  if (step == "no-page") EndBy(SIGBUS);
  if (step == "out-of-memory") EndBy(SIGKILL);
  if (step == "no-memory") return 3;
  if (step == "keep-and-crash" && (Keep(notifier), true)) raise(SIGKILL);
  if (step == "silent") pause();
  if (step == "end") {  // before the watchdog counts
    WriteWhatIsKept(notifier, directory);
    Write(directory + "/watchdog", absl::FormatDuration(WatchdogTimeout(environment)));
  }
  if (!ready()) return 98;
  if (step == "serve-and-crash") raise(SIGKILL);
  if (step == "keep-serve-and-crash" && Keep(notifier)) raise(SIGKILL);
  if (step == "keep-release-and-crash" && Keep(notifier) && notifier.Release("pool-1").ok()) {
    raise(SIGKILL);
  }
  if (step == "hang") pause();
  if (step == "deaf") {
    kill(supervisor, SIGTERM);
    while (true) pause();
  }
  if (step == "reload") {
    kill(supervisor, SIGHUP);
    AwaitTerm();
  }
  if (step == "keep-and-reload" && Keep(notifier)) {
    kill(supervisor, SIGHUP);
    AwaitTerm();
  }
  if (step == "keep-two") {
    Notifier greedy({.socket = getenv("NOTIFY_SOCKET"), .confirms = true});
    const bool first = Keep(greedy);
    const kvstore::FileDescriptor more(memfd_create("more", MFD_CLOEXEC));
    const bool second = greedy.Keep("pool-2", more.get()).ok();
    Write(directory + "/held", absl::StrCat(first, " ", second));
  }
  if (step == "keep-and-wait") {
    if (!Keep(notifier)) return 97;
    Write(directory + "/kept", "");
    AwaitTerm();
  }
  // "end": has said what it found, and has all ended.
  kill(supervisor, SIGTERM);
  AwaitTerm();
}

}  // namespace
}  // namespace pqcached::service

int main(int argc, char** argv) {
  if (argc < 3) return 96;
  const std::string directory = argv[1];
  const size_t start = pqcached::service::CountStart(directory);
  const size_t last = static_cast<size_t>(argc) - 1;
  return pqcached::service::Run(directory, argv[std::min(start + 1, last)]);
}
