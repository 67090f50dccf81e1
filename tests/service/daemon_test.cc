// The real binary: what it prints, how it ends, and what it leaves behind.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>

#include "tests/service/rpc_fixture.h"

namespace pqcached::service {
namespace {

using testing::HasSubstr;
using testing::Not;

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

  // Reads its output until `words` come, or its end.
  bool AwaitOutput(const std::string& words) {
    while (output_.find(words) == std::string::npos) {
      char buffer[4096];
      const ssize_t got = read(output_descriptor_, buffer, sizeof(buffer));
      if (got <= 0) return false;
      output_.append(buffer, static_cast<size_t>(got));
    }
    return true;
  }

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

 private:
  pid_t pid_ = 0;
  int output_descriptor_ = -1;
  std::string output_;
  bool ended_ = false;
};

class DaemonTest : public RpcTest {
 protected:
  std::string socket_path() const { return endpoint().substr(7); }
};

TEST_F(DaemonTest, SaysReadyServesAndEndsCleanlyOnSigtermAndSigint) {
  for (const int number : {SIGTERM, SIGINT}) {
    Daemon daemon({"--listen", endpoint(), "--log-level", "trace"});
    ASSERT_TRUE(daemon.AwaitOutput("event=ready endpoint=" + endpoint())) << daemon.output();
    struct stat status = {};
    ASSERT_EQ(stat(socket_path().c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600u);
    TestClient client(endpoint());
    client.Filled(50);
    daemon.Signal(number);
    EXPECT_EQ(daemon.Wait(), 0) << daemon.output();
    EXPECT_THAT(daemon.output(), HasSubstr("event=stopped"));
    EXPECT_THAT(daemon.output(), Not(HasSubstr(client.token()))) << "the token is a secret";
    EXPECT_TRUE(std::filesystem::is_empty(directory_)) << "the socket is removed";
  }
}

TEST_F(DaemonTest, EndsWithinItsBoundWithABuildAtWork) {
  Daemon daemon({"--listen", endpoint(), "--shutdown-timeout", "100ms", "--threads", "1"});
  ASSERT_TRUE(daemon.AwaitOutput("event=ready"));
  TestClient client(endpoint());
  v1::BuildIndexRequest request;
  request.set_sequence_id(client.Filled(1500));
  *request.mutable_index() = Pq(16, 8);
  request.set_iterations(1000);
  const auto context = client.Context();
  const auto reader = client.kv().BuildIndex(context.get(), request);
  v1::BuildProgress progress;
  reader->Read(&progress);
  const auto begin = std::chrono::steady_clock::now();
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.output();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST_F(DaemonTest, ASecondOneOnTheSameSocketIsRefused) {
  Daemon first({"--listen", endpoint()});
  ASSERT_TRUE(first.AwaitOutput("event=ready"));
  Daemon second({"--listen", endpoint()});
  EXPECT_EQ(second.Wait(), 1);
  EXPECT_THAT(second.output(), HasSubstr("listen: another process serves on " + socket_path()));
  TestClient client(endpoint());
  EXPECT_EQ(client.token().size(), 32u);
  first.Signal(SIGTERM);
  EXPECT_EQ(first.Wait(), 0);
}

TEST_F(DaemonTest, StartsOverTheSocketOfAKilledOne) {
  {
    Daemon killed({"--listen", endpoint()});
    ASSERT_TRUE(killed.AwaitOutput("event=ready"));
    killed.Signal(SIGKILL);
    EXPECT_EQ(killed.Wait(), -SIGKILL);
  }
  EXPECT_TRUE(std::filesystem::exists(socket_path()));
  Daemon next({"--listen", endpoint()});
  ASSERT_TRUE(next.AwaitOutput("event=ready")) << next.output();
  TestClient client(endpoint());
  EXPECT_EQ(client.token().size(), 32u);
}

TEST_F(DaemonTest, MakesItsDirectoryAndTakesTheGroupInWhenAsked) {
  const std::string path = directory_ / "run" / "socket";
  Daemon daemon({"--listen", "unix://" + path, "--socket-mode", "0660"});
  ASSERT_TRUE(daemon.AwaitOutput("event=ready")) << daemon.output();
  struct stat status = {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0660u);
  ASSERT_EQ(stat((directory_ / "run").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
}

TEST_F(DaemonTest, MergesFileEnvironmentAndFlags) {
  const std::string file = directory_ / "pqcached.yaml";
  std::ofstream(file) << "max_sessions: 11\nmax_caches: 12\nmax_sequences: 13\n";
  Daemon daemon({"--check-config", "--config", file, "--max-sequences", "33"},
                {"PQCACHED_MAX_CACHES=22", "PQCACHED_MAX_SEQUENCES=23"});
  EXPECT_EQ(daemon.Wait(), 0);
  EXPECT_THAT(daemon.output(), HasSubstr("max_sessions: 11\n"));
  EXPECT_THAT(daemon.output(), HasSubstr("max_caches: 22\n"));
  EXPECT_THAT(daemon.output(), HasSubstr("max_sequences: 33\n"));
}

TEST_F(DaemonTest, RefusesAWrongConfigurationWithTwo) {
  Daemon flag({"--segment-tokens", "130"});
  EXPECT_EQ(flag.Wait(), 2);
  EXPECT_THAT(
      flag.output(),
      HasSubstr("error: segment_tokens: '130' must be a multiple of 128 (flag --segment-tokens)"));
  Daemon unknown({"--segments", "130"});
  EXPECT_EQ(unknown.Wait(), 2);
  EXPECT_THAT(unknown.output(), HasSubstr("--segments"));
  Daemon tcp({"--listen", endpoint(), "--tcp-listen", "0.0.0.0:0"});
  EXPECT_EQ(tcp.Wait(), 2);
  EXPECT_THAT(tcp.output(), HasSubstr("0.0.0.0"));
  Daemon log({"--listen", endpoint(), "--log-file", "/dev/null/log"});
  EXPECT_EQ(log.Wait(), 2);
  EXPECT_THAT(log.output(), HasSubstr("log_file"));
}

TEST_F(DaemonTest, SaysWhereItCannotListen) {
  Daemon daemon({"--listen", "unix:///dev/null/pqcached.sock"});
  EXPECT_EQ(daemon.Wait(), 1);
  EXPECT_THAT(daemon.output(), HasSubstr("listen: /dev/null"));
}

TEST_F(DaemonTest, PrintsItsVersionAndConfiguration) {
  Daemon version({"--version"});
  EXPECT_EQ(version.Wait(), 0);
  EXPECT_THAT(version.output(), testing::StartsWith("pqcached "));
  Daemon config({"--print-config"});
  EXPECT_EQ(config.Wait(), 0);
  EXPECT_EQ(config.output(), ExampleConfig());
}

}  // namespace
}  // namespace pqcached::service
