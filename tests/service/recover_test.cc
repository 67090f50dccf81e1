// The daemon after a bad update: workers of the new program die, the supervisor gives up, and an
// operator chooses what becomes of the memory.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/service/daemon_process.h"
#include "tests/service/rpc/rpc_fixture.h"

namespace pqcached::service {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr char kReady[] = "event=ready ";
constexpr char kGivenUp[] = "event=recovery_given_up ";

class DaemonRecoverTest : public RpcTest {
 protected:
  DaemonRecoverTest() {
    std::filesystem::create_directory(pools());
    std::filesystem::permissions(pools(), std::filesystem::perms::owner_all);
    std::ofstream(broken()) << "#!/bin/sh\nkill -SEGV $$\n";
    std::filesystem::permissions(broken(), std::filesystem::perms::owner_all);
    Install(PQCACHED_DAEMON);
  }

  std::filesystem::path pools() const { return directory_ / "pools"; }
  std::filesystem::path broken() const { return directory_ / "broken"; }
  std::string program() const { return directory_ / "program"; }

  // Replaces the program that the next worker runs.
  void Install(const std::filesystem::path& path) const {
    std::filesystem::create_symlink(path, directory_ / "next");
    std::filesystem::rename(directory_ / "next", program());
  }
  std::vector<std::string> Arguments(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {
        "--listen",         endpoint(), "--max-pool-bytes",        "64mib",
        "--segment-tokens", "128",      "--max-failed-recoveries", "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  void BreakAndKill(Daemon& daemon) const {
    Install(broken());
    ASSERT_EQ(kill(daemon.WorkerPid(), SIGKILL), 0);
    ASSERT_TRUE(daemon.AwaitMore(kGivenUp)) << daemon.output();
  }

  struct Outcome {
    int exit_code = -1;
    std::string output;
  };
  Outcome Ctl(const std::string& arguments) const {
    const std::string command = std::string(PQCACHED_CTL) + " --endpoint " + endpoint() +
                                " --timeout-ms 60000 " + arguments + " 2>&1";
    Outcome outcome;
    FILE* pipe = popen(command.c_str(), "r");
    std::array<char, 4096> buffer;
    size_t got = 0;
    while ((got = fread(buffer.data(), 1, buffer.size(), pipe)) > 0) {
      outcome.output.append(buffer.data(), got);
    }
    outcome.exit_code = WEXITSTATUS(pclose(pipe));
    return outcome;
  }

  // All rows of a sequence; the error, if there is one.
  std::string Rows(const std::string& token, uint64_t sequence_id, uint64_t tokens) const {
    std::string all;
    for (const uint32_t layer : kLayers) {
      v1::FetchBlocksRequest request;
      request.set_sequence_id(sequence_id);
      request.set_layer(layer);
      request.add_ranges()->set_end(tokens);
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      const auto kv = v1::KvCache::NewStub(
          grpc::CreateCustomChannel(endpoint(), grpc::InsecureChannelCredentials(), arguments));
      grpc::ClientContext context;
      context.AddMetadata("pqcached-session", token);
      context.set_wait_for_ready(true);
      context.set_deadline(std::chrono::system_clock::now() + Daemon::kPatience);
      v1::FetchBlocksResponse rows;
      const grpc::Status status = kv->FetchBlocks(&context, request, &rows);
      rows.clear_rows_epoch();  // of the worker
      all += status.ok() ? rows.SerializeAsString() : status.error_message();
    }
    return all;
  }
};

constexpr uint64_t kTokens = 300;

TEST_F(DaemonRecoverTest, AfterTheOldProgramIsBackRetryRecoversEveryRow) {
  Daemon daemon(Arguments({}), {}, program());
  ASSERT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
  TestClient client(endpoint());
  const std::string token = client.token();
  const uint64_t sequence_id = client.Filled(kTokens);
  const std::string rows = Rows(token, sequence_id, kTokens);
  const Outcome early = Ctl("recover --discard");
  EXPECT_EQ(early.exit_code, 1) << "a worker serves";
  EXPECT_THAT(early.output, HasSubstr("no recovery has failed"));

  BreakAndKill(daemon);
  const Outcome ping = Ctl("ping");
  EXPECT_EQ(ping.exit_code, 3);
  EXPECT_THAT(ping.output, HasSubstr("NOT_SERVING: 2 workers failed to recover"));
  EXPECT_THAT(ping.output, HasSubstr("signal 11"));
  EXPECT_EQ(Ctl("recover").exit_code, 2);
  EXPECT_EQ(Ctl("recover --retry --discard").exit_code, 2);

  Install(PQCACHED_DAEMON);
  const Outcome retry = Ctl("recover --retry");
  EXPECT_EQ(retry.exit_code, 0) << retry.output;
  ASSERT_TRUE(daemon.AwaitMore(kReady)) << daemon.output();
  EXPECT_TRUE(Rows(token, sequence_id, kTokens) == rows);
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.output();
  EXPECT_FALSE(std::filesystem::exists(endpoint().substr(7) + ".status"));
}

TEST_F(DaemonRecoverTest, DiscardKeepsTheFilesForTheOperatorAndChargesThem) {
  Daemon daemon(Arguments({"--pool-directory", pools()}), {}, program());
  ASSERT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
  std::string token;
  uint64_t sequence_id = 0;
  {
    TestClient client(endpoint());
    token = client.token();
    sequence_id = client.Filled(kTokens);
    BreakAndKill(daemon);
  }
  Install(PQCACHED_DAEMON);
  const Outcome discard = Ctl("recover --discard");
  EXPECT_EQ(discard.exit_code, 0) << discard.output;
  EXPECT_THAT(discard.output, HasSubstr("pools/set-aside@"));
  ASSERT_TRUE(daemon.AwaitMore(kReady)) << daemon.output();
  EXPECT_THAT(Rows(token, sequence_id, kTokens), HasSubstr("session"));

  EXPECT_THAT(Ctl("stats").output, HasSubstr("set_aside"));
  size_t files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(pools())) {
    if (entry.path().parent_path().filename().string().starts_with("set-aside@")) ++files;
  }
  EXPECT_GE(files, 3u) << "the root's records, a pool and its records";
  for (const auto& entry : std::filesystem::directory_iterator(pools())) {
    if (entry.is_directory()) std::filesystem::remove_all(entry.path());
  }
  EXPECT_THAT(Ctl("stats").output, Not(HasSubstr("set_aside")));
}

TEST_F(DaemonRecoverTest, StrictStartRefusesWhatTheMachineCannotHold) {
  // The largest value is more than any machine has.
  std::vector<std::string> arguments = {"--listen", endpoint(), "--max-pool-bytes", "64tib"};
  {
    Daemon daemon(arguments);
    ASSERT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
    EXPECT_THAT(daemon.output(), HasSubstr("event=limit_too_low message=\"max_pool_bytes 64tib: "));
    daemon.Signal(SIGTERM);
    EXPECT_EQ(daemon.Wait(), 0);
  }
  arguments.insert(arguments.end(), {"--strict-start", "true"});
  Daemon daemon(arguments);
  EXPECT_EQ(daemon.Wait(), 2);
  EXPECT_THAT(daemon.output(), HasSubstr("error: strict_start: max_pool_bytes 64tib: "));
}

}  // namespace
}  // namespace pqcached::service
