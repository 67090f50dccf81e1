// The supervisor with workers that do as they are told (fake_worker.cc), one after another.
#include "service/supervise/supervisor.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvstore/share/control_memory.h"
#include "service/supervise/kept_sessions.h"
#include "service/supervise/take_over.h"
#include "service/supervise/worker_process.h"

namespace pqcached::service {
namespace {

using kvstore::FileDescriptor;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class SupervisorTest : public testing::Test {
 protected:
  SupervisorTest() {
    std::string name = "/tmp/pqs.XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
    log_ = *Log::Open("trace", directory_ / "log");
    options_.first_pause = absl::Milliseconds(1);
    options_.longest_pause = absl::Milliseconds(4);
    options_.watchdog_timeout = absl::ZeroDuration();
  }
  ~SupervisorTest() override { std::filesystem::remove_all(directory_); }

  Supervisor::Outcome Run(const std::vector<std::string>& steps, KeptDescriptors kept = {},
                          Notifier* above = nullptr) {
    options_.command = {PQCACHED_FAKE_WORKER, directory_};
    options_.command.insert(options_.command.end(), steps.begin(), steps.end());
    auto socket = NotifySocket::Bind(path());
    EXPECT_TRUE(socket.ok()) << socket.status();
    Supervisor supervisor(options_, **socket, above, std::move(kept), *log_);
    return supervisor.Run();
  }

  std::string path() const { return directory_ / "supervisor"; }
  std::string Read(const std::string& name) const {
    std::ifstream file(directory_ / name);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  size_t starts() const {
    const std::string text = Read("starts");
    return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
  }

  std::filesystem::path directory_;
  std::unique_ptr<Log> log_;
  Supervisor::Options options_;
};

TEST_F(SupervisorTest, EndsWithItsWorkerOnSigterm) {
  EXPECT_EQ(Run({"end"}).exit_code, 0);
  EXPECT_EQ(starts(), 1u);
  EXPECT_EQ(Read("names"), "");
  EXPECT_EQ(Read("watchdog"), "0");
}

// A stop that meets a worker that ends by itself at this moment, because its start fails.
TEST_F(SupervisorTest, AStopDuringAStartThatFailsIsAStop) {
  EXPECT_EQ(Run({"stop-and-bad-config"}).exit_code, 0);
  EXPECT_EQ(Run({"stop-before-a-handler"}).exit_code, 0);
  EXPECT_EQ(Run({"stop-and-crash"}).exit_code, 1);
  EXPECT_EQ(Run({"stop-and-ready"}).exit_code, 1);
}

TEST_F(SupervisorTest, StartsAnotherWhenAWorkerThatServedDies) {
  EXPECT_EQ(Run({"serve-and-crash", "serve-and-crash", "end"}).exit_code, 0);
  EXPECT_EQ(starts(), 3u);
  EXPECT_THAT(Read("log"), HasSubstr("how=\"signal 9\""));
}

TEST_F(SupervisorTest, AWorkerThatSaysWhatIsWrongAtFirstIsBelieved) {
  EXPECT_EQ(Run({"refuse", "end"}).exit_code, 1);
  EXPECT_EQ(starts(), 1u);
}

TEST_F(SupervisorTest, WhatAWorkerKeptComesToTheNextOne) {
  EXPECT_EQ(Run({"keep-serve-and-crash", "serve-and-crash", "end"}).exit_code, 0);
  EXPECT_EQ(Read("names"), "pool-1");
  EXPECT_EQ(Read("content"), "rows");
}

TEST_F(SupervisorTest, ConfirmsOnlyWhatItHolds) {
  options_.max_kept = 1;
  EXPECT_EQ(Run({"keep-two"}).exit_code, 0);
  EXPECT_EQ(Read("held"), "1 0");
}

TEST_F(SupervisorTest, WhatAWorkerReleasedIsForgotten) {
  EXPECT_EQ(Run({"keep-release-and-crash", "end"}).exit_code, 0);
  EXPECT_EQ(Read("names"), "");
}

TEST_F(SupervisorTest, ARefusalWithSomethingToRecoverIsTriedAgain) {
  EXPECT_EQ(Run({"keep-and-crash", "refuse", "refuse", "end"}).exit_code, 0);
  EXPECT_EQ(starts(), 4u);
  EXPECT_EQ(Read("names"), "pool-1");
}

// An operator that waits until the supervisor has given up, sends choices, and then ends it.
class RecoverTest : public SupervisorTest {
 protected:
  RecoverTest() {
    options_.max_failed_recoveries = 2;
    sigset_t signals;  // blocked in the operator's thread, too: they are for the supervisor
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  }

  // Returns the states that the supervisor answers before and behind each choice.
  std::vector<std::string> Operate(const std::vector<std::string>& steps,
                                   const std::vector<std::string>& choices) {
    const std::string status_path = directory_ / "status";
    auto status_socket = StatusSocket::Bind(status_path);
    EXPECT_TRUE(status_socket.ok()) << status_socket.status();
    options_.status_socket = status_socket->get();
    std::vector<std::string> states;
    std::thread choosing([&] {
      AwaitState(status_path, "given_up");
      states.push_back(ReadState(status_path));
      Notifier notifier({.socket = path()});
      for (const std::string& choice : choices) {
        EXPECT_TRUE(notifier.Send(absl::StrCat(kRecoverField, "=", choice)).ok());
        states.push_back(ReadState(status_path));
      }
      if (states.back().find("given_up") != std::string::npos) kill(getpid(), SIGTERM);
    });
    outcome_ = Run(steps);
    choosing.join();
    return states;
  }
  static std::string ReadState(const std::string& path) {
    const FileDescriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    if (connect(connection.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
      return "";
    }
    char line[4096];
    const ssize_t got = recv(connection.get(), line, sizeof(line), MSG_WAITALL);
    return {line, static_cast<size_t>(std::max<ssize_t>(got, 0))};
  }
  static void AwaitState(const std::string& path, const std::string& state) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(100);
    while (ReadState(path).find(state) == std::string::npos) {
      if (std::chrono::steady_clock::now() > until) std::abort();
      poll(nullptr, 0, 1);
    }
  }

  Supervisor::Outcome outcome_;
};

TEST_F(RecoverTest, NothingStartsEmptyByItself) {
  bool set_aside = false;
  options_.set_files_aside = [&]() -> absl::StatusOr<std::string> {
    set_aside = true;
    return "/volume/set-aside";
  };
  const auto states = Operate({"keep-serve-and-crash", "crash"}, {});
  EXPECT_EQ(outcome_.exit_code, 0);
  EXPECT_EQ(starts(), 3u) << "one that served, two recoveries";
  EXPECT_FALSE(set_aside);
  EXPECT_THAT(states[0], HasSubstr(R"("state":"given_up","worker_pid":0,"starts":3,)"
                                   R"("failed_recoveries":2,"recovers":true,"kept_descriptors":1,)"
                                   R"("last_end":"signal 11","set_aside":"")"));
  EXPECT_THAT(Read("log"), HasSubstr("event=recovery_given_up count=2"));
}

TEST_F(RecoverTest, RetryRecoversWhatIsKept) {
  const auto states = Operate({"keep-serve-and-crash", "crash", "crash", "end"}, {"retry"});
  EXPECT_EQ(outcome_.exit_code, 0);
  EXPECT_THAT(states[1], Not(HasSubstr("given_up")));
  EXPECT_EQ(Read("names"), "pool-1");
  EXPECT_EQ(Read("content"), "rows");
  EXPECT_THAT(Read("log"), HasSubstr("level=audit event=recover role=operator peer=\"uid=" +
                                     std::to_string(geteuid())));
}

TEST_F(RecoverTest, DiscardSetsFilesAsideAndStartsEmpty) {
  options_.set_files_aside = []() -> absl::StatusOr<std::string> { return "/volume/a\"side"; };
  const auto states = Operate({"keep-serve-and-crash", "crash", "crash", "end"}, {"discard"});
  EXPECT_EQ(outcome_.exit_code, 0);
  EXPECT_THAT(states[1], HasSubstr(R"("set_aside":"/volume/a\"side")"));
  EXPECT_EQ(Read("names"), "");
}

TEST_F(RecoverTest, FilesThatCannotBeSetAsideStopADiscard) {
  options_.set_files_aside = []() -> absl::StatusOr<std::string> {
    return absl::UnavailableError("no space");
  };
  const auto states = Operate({"keep-serve-and-crash", "crash"}, {"discard", "nonsense"});
  EXPECT_THAT(states[1], HasSubstr("given_up"));
  EXPECT_THAT(states[2], HasSubstr("given_up"));
  EXPECT_THAT(Read("log"), HasSubstr("event=files_not_set_aside message=\"no space\""));
  EXPECT_THAT(Read("log"), HasSubstr("event=recover_refused"));
}

TEST_F(RecoverTest, AChoiceWhileAWorkerServesChangesNothing) {
  // The choice waits at the socket when the first worker has been started.
  auto socket = NotifySocket::Bind(path());
  ASSERT_TRUE(socket.ok());
  options_.command = {PQCACHED_FAKE_WORKER, directory_, "keep-serve-and-crash", "end"};
  Supervisor supervisor(options_, **socket, nullptr, {}, *log_);
  Notifier notifier({.socket = path()});
  ASSERT_TRUE(notifier.Send(absl::StrCat(kRecoverField, "=discard")).ok());
  EXPECT_EQ(supervisor.Run().exit_code, 0);
  EXPECT_EQ(Read("names"), "pool-1");
  EXPECT_THAT(Read("log"), HasSubstr("event=recover_refused"));
}

TEST_F(RecoverTest, StartsEmptyByItselfOnlyWhenConfigured) {
  options_.start_empty_after_failure = true;
  options_.set_files_aside = []() -> absl::StatusOr<std::string> { return "/volume/aside"; };
  EXPECT_EQ(Run({"keep-serve-and-crash", "crash", "crash", "end"}).exit_code, 0);
  EXPECT_EQ(starts(), 4u);
  EXPECT_EQ(Read("names"), "");
  EXPECT_THAT(Read("log"), HasSubstr("event=memory_discarded released_descriptors=1"));
}

TEST_F(RecoverTest, EndsForWantOfMemoryAreNotCounted) {
  EXPECT_EQ(Run({"keep-serve-and-crash", "no-page", "out-of-memory", "no-memory", "no-page",
                 "out-of-memory", "no-memory", "end"})
                .exit_code,
            0);
  EXPECT_EQ(Read("names"), "pool-1");
  EXPECT_THAT(Read("log"), HasSubstr("event=recovery_postponed how=\"signal 7\""));
  EXPECT_THAT(Read("log"), Not(HasSubstr("recovery_given_up")));
}

TEST_F(RecoverTest, AWorkerThatItKillsItselfIsCounted) {
  options_.start_timeout = absl::Milliseconds(500);  // longer than a sanitizer needs to start
  KeptDescriptors kept;
  kept.emplace("pool-1", FileDescriptor(memfd_create("pool", MFD_CLOEXEC)));
  options_.start_empty_after_failure = true;
  options_.max_failed_recoveries = 1;
  EXPECT_EQ(Run({"silent"}, std::move(kept)).exit_code, 1);
  EXPECT_EQ(starts(), 2u);
}

TEST_F(SupervisorTest, AWorkerThatServesMakesEarlierFailuresForgotten) {
  options_.max_failed_recoveries = 2;
  EXPECT_EQ(Run({"keep-serve-and-crash", "crash", "serve-and-crash", "crash", "end"}).exit_code, 0);
  EXPECT_EQ(Read("names"), "pool-1");
}

TEST_F(SupervisorTest, ABrokenConfigurationCostsNothingThatIsKept) {
  options_.max_failed_recoveries = 1;
  EXPECT_EQ(
      Run({"keep-serve-and-crash", "bad-config", "bad-config", "bad-config", "end"}).exit_code, 0);
  EXPECT_EQ(Read("names"), "pool-1");
}

TEST_F(SupervisorTest, EndsWhenWorkersFailWithoutAnythingToRecover) {
  options_.max_failed_recoveries = 2;
  EXPECT_EQ(Run({"serve-and-crash", "crash"}).exit_code, 1);
  EXPECT_EQ(starts(), 3u);
  EXPECT_THAT(Read("log"), HasSubstr("event=worker_fails count=2"));
}

TEST_F(SupervisorTest, FilesAreSomethingToRecover) {
  options_.keeps_files = [] { return true; };
  EXPECT_EQ(Run({"refuse", "end"}).exit_code, 0);
  EXPECT_EQ(starts(), 2u);
}

TEST_F(SupervisorTest, KillsAWorkerThatDoesNotAnswer) {
  options_.watchdog_timeout = absl::Milliseconds(50);
  options_.start_timeout = absl::Seconds(60);
  EXPECT_EQ(Run({"hang", "end"}).exit_code, 0);
  EXPECT_EQ(starts(), 2u);
  EXPECT_THAT(Read("log"), HasSubstr("because=\"did not answer the watchdog\""));
  EXPECT_EQ(Read("watchdog"), "50ms");
}

TEST_F(SupervisorTest, KillsAWorkerThatDoesNotGetReady) {
  options_.start_timeout = absl::Milliseconds(50);
  KeptDescriptors kept;
  kept.emplace("pool-1", FileDescriptor(memfd_create("pool", MFD_CLOEXEC)));
  // The second one has to be quicker than that; it does next to nothing.
  options_.start_timeout = absl::Seconds(1);
  EXPECT_EQ(Run({"silent", "end"}, std::move(kept)).exit_code, 0);
  EXPECT_THAT(Read("log"), HasSubstr("because=\"did not become ready in time\""));
}

TEST_F(SupervisorTest, KillsAWorkerThatDoesNotStop) {
  options_.stop_timeout = absl::Milliseconds(50);
  EXPECT_EQ(Run({"deaf"}).exit_code, 1) << "it did not end cleanly";
  EXPECT_THAT(Read("log"), HasSubstr("because=\"did not stop in time\""));
}

TEST_F(SupervisorTest, SighupStartsTheProgramAnewWithAllThatIsKept) {
  EXPECT_EQ(Run({"keep-and-reload", "reload", "end"}).exit_code, 0);
  EXPECT_EQ(starts(), 3u);
  EXPECT_EQ(Read("names"), "pool-1");
  EXPECT_THAT(Read("log"), Not(HasSubstr("level=error"))) << "a restart is no failure";
}

TEST_F(SupervisorTest, ClearsTheWayBeforeEachStart) {
  int cleared = 0;
  options_.before_start = [&] { ++cleared; };
  EXPECT_EQ(Run({"serve-and-crash", "end"}).exit_code, 0);
  EXPECT_EQ(cleared, 2);
}

TEST_F(SupervisorTest, TellsTheClientsOfAWorkerThatHasEnded) {
  // Another process than the worker holds them, as it is after a crash of both.
  Notifier nobody({.socket = path()});
  const auto control = kvstore::ControlMemory::Create(1, 7, &nobody);
  ASSERT_TRUE(control.ok()) << control.status();
  int ends[2] = {};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const FileDescriptor client(ends[0]);
  KeptDescriptors kept;
  kept.emplace(ControlName("b", 1), *(*control)->ShareWithKeeper());
  kept.emplace(SocketName("b", 1), FileDescriptor(ends[1]));
  kept.emplace("control.none", FileDescriptor(memfd_create("none", MFD_CLOEXEC)));

  const auto shared = (*control)->Share();
  ASSERT_TRUE(shared.ok());
  void* mapped = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, shared->descriptor.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const auto* page = static_cast<const kvstore::ControlPage*>(mapped);
  EXPECT_EQ(page->boot_word, 7u);
  EXPECT_EQ(Run({"end"}, std::move(kept)).exit_code, 0);
  EXPECT_EQ(page->boot_word, 0u);
  EXPECT_EQ(page->wake_word, 1u) << "and waiters were woken, once";
  const auto* end = reinterpret_cast<const kvstore::WorkerEnd*>(static_cast<const char*>(mapped) +
                                                                kvstore::WorkerEnd::kOffsetBytes);
  EXPECT_EQ(end->boot_word, 7u);
  EXPECT_EQ(end->has_successor, 0u);
  munmap(mapped, 4096);
  char byte = 0;
  EXPECT_EQ(recv(client.get(), &byte, 1, MSG_DONTWAIT), 0) << "the connection has ended";
}

TEST_F(SupervisorTest, ForwardsWhatItKeepsToWhoSupervisesIt) {
  const std::string above_path = directory_ / "above";
  auto above_socket = NotifySocket::Bind(above_path);
  ASSERT_TRUE(above_socket.ok());
  Notifier above({.socket = above_path});
  options_.parent_watchdog_timeout = absl::Hours(1);
  EXPECT_EQ(Run({"keep-and-reload", "end"}, {}, &above).exit_code, 0);
  std::vector<std::string> heard;
  while (const auto message = (*above_socket)->Receive()) {
    for (const auto& [name, value] : message->fields) heard.push_back(name + "=" + value);
    if (message->Has("FDSTORE", "1")) {
      ASSERT_EQ(message->descriptors.size(), 1u);
      char content[5] = {};
      EXPECT_EQ(pread(message->descriptors[0].get(), content, 4, 0), 4);
      EXPECT_STREQ(content, "rows");
    }
  }
  for (const char* words :
       {"WATCHDOG=1", "READY=1", "FDNAME=pool-1", "FDSTORE=1", "FDPOLL=0", "STOPPING=1"}) {
    EXPECT_THAT(heard, testing::Contains(words));
  }
  EXPECT_THAT(heard, Not(testing::Contains("FDSTOREREMOVE=1")));
}

TEST_F(SupervisorTest, HearsNobodyButItsWorker) {
  auto socket = NotifySocket::Bind(path());
  ASSERT_TRUE(socket.ok());
  options_.command = {PQCACHED_FAKE_WORKER, directory_, "end"};
  Supervisor supervisor(options_, **socket, nullptr, {}, *log_);
  Notifier stranger({.socket = path()});  // of this process
  const FileDescriptor memory(memfd_create("foreign", MFD_CLOEXEC));
  ASSERT_TRUE(stranger.Forward("pool-1", memory.get()).ok());
  EXPECT_EQ(supervisor.Run().exit_code, 0);
  EXPECT_EQ(Read("names"), "");
}

// A supervisor with a worker that has kept a pool, in a child process.
class TakeOverTest : public SupervisorTest {
 protected:
  void StartOld(const std::vector<std::string>& steps) {
    old_ = fork();
    if (old_ != 0) return;
    Supervisor::Outcome outcome = Run(steps);
    _exit(outcome.exit_code);  // whereby it closes the successor's socket
  }
  void AwaitFile(const std::string& name) {
    while (!std::filesystem::exists(directory_ / name)) poll(nullptr, 0, 5);
  }
  int WaitForOld() {
    int status = 0;
    waitpid(old_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  pid_t old_ = -1;
};

TEST_F(TakeOverTest, GetsAllThatTheOtherHolds) {
  StartOld({"keep-and-wait"});
  AwaitFile("kept");
  auto kept = TakeOver(path(), absl::Minutes(1));
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(WaitForOld(), 0);
  EXPECT_FALSE(std::filesystem::exists(path()));
  EXPECT_EQ(kept->size(), 1u);
  std::filesystem::remove(directory_ / "starts");
  EXPECT_EQ(Run({"end"}, *std::move(kept)).exit_code, 0);
  EXPECT_EQ(Read("names"), "pool-1");
  EXPECT_EQ(Read("content"), "rows");
}

TEST_F(TakeOverTest, TheOldOneGoesOnWhenTheNewOneIsGone) {
  StartOld({"keep-and-wait", "end"});
  AwaitFile("kept");
  kill(old_, SIGSTOP);  // else it may answer before the new one has given up
  waitpid(old_, nullptr, WUNTRACED);
  EXPECT_EQ(TakeOver(path(), absl::ZeroDuration()).status().code(), absl::StatusCode::kUnavailable);
  kill(old_, SIGCONT);
  EXPECT_EQ(WaitForOld(), 0);
  EXPECT_EQ(starts(), 2u);
  EXPECT_EQ(Read("names"), "pool-1");
  EXPECT_THAT(Read("log"), HasSubstr("event=take_over_failed"));
}

TEST_F(TakeOverTest, NobodyThereIsNotFound) {
  EXPECT_EQ(TakeOver(path(), absl::Minutes(1)).status().code(), absl::StatusCode::kNotFound);
  std::ofstream(directory_ / "file") << "";
  EXPECT_FALSE(TakeOver(directory_ / "file", absl::Minutes(1)).ok());
}

TEST(WorkerProcessTest, SaysWhatCannotBeExecuted) {
  const KeptDescriptors none;
  const std::vector<std::string> command = {"/does/not/exist"};
  KeptMappings mappings;
  const pid_t pid = StartWorkerProcess(
      {.command = command, .notify_socket = "/x", .kept = none, .work = {}, .mappings = mappings});
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(WEXITSTATUS(status), 127);
}

TEST(WorkerProcessTest, KnowsThePathOfAProgram) {
  EXPECT_EQ(ProgramPath("/usr/bin/pqcached"), "/usr/bin/pqcached");
  EXPECT_EQ(ProgramPath("bin/pqcached"), std::filesystem::current_path() / "bin/pqcached");
  EXPECT_EQ(ProgramPath("pqcached"), std::filesystem::read_symlink("/proc/self/exe"));
}

}  // namespace
}  // namespace pqcached::service
