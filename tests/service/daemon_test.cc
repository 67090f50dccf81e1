// The real binary: what it prints, how it ends, and what it leaves behind.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>

#include <chrono>
#include <fstream>
#include <sstream>

#include "service/supervise/supervisor.h"
#include "tests/service/daemon_process.h"
#include "tests/service/rpc/rpc_fixture.h"

namespace pqcached::service {
namespace {

using testing::HasSubstr;
using testing::Not;

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

// Of daemon_process.h: a test that is killed must not leave its daemon on the machine.
TEST_F(DaemonTest, ADaemonEndsWithTheTestProgramThatStartedIt) {
  const pid_t program = fork();
  ASSERT_GE(program, 0);
  if (program == 0) {
    Daemon abandoned({"--listen", endpoint()});
    if (!abandoned.AwaitOutput("event=ready")) _exit(1);
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(program, &status, 0), program);
  ASSERT_TRUE(WIFSIGNALED(status));
  const auto until = std::chrono::steady_clock::now() + Daemon::kPatience;
  bool ready = false;
  while (!ready && std::chrono::steady_clock::now() < until) {
    Daemon next({"--listen", endpoint()});  // refused while the socket is in use
    ready = next.AwaitOutput("event=ready");
  }
  EXPECT_TRUE(ready);
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

TEST(UnitTest, SystemdHoldsAsMuchAsTheDefaultsNeed) {
  std::ifstream unit(PQCACHED_UNIT);
  ASSERT_TRUE(unit.is_open()) << PQCACHED_UNIT;
  const std::string key = "FileDescriptorStoreMax=";
  size_t limit = 0;
  for (std::string line; std::getline(unit, line);) {
    if (line.rfind(key, 0) == 0) limit = std::stoul(line.substr(key.size()));
  }
  EXPECT_GE(limit, MaxKeptDescriptors(Config().max_sessions, Config().max_caches));
}

}  // namespace
}  // namespace pqcached::service
