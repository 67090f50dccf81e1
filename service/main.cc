// pqcached is one program that runs as the supervisor and as the worker that the supervisor starts.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvstore/memory/file_keeper.h"
#include "service/base/environment.h"
#include "service/base/exit_code.h"
#include "service/base/log.h"
#include "service/config/command_line.h"
#include "service/config/config.h"
#include "service/config/start_limits.h"
#include "service/session/broker.h"
#include "service/supervise/oom_score.h"
#include "service/supervise/socket_claim.h"
#include "service/supervise/status_socket.h"
#include "service/supervise/supervisor.h"
#include "service/supervise/take_over.h"
#include "service/supervise/worker_process.h"
#include "service/worker.h"

namespace pqcached::service {
namespace {

// Longest wait for the worker of a killed supervisor to free its memory and end.
constexpr absl::Duration kOrphanTimeout = absl::Seconds(10);
// Longest wait for systemd to accept a message; the worker is not supervised during that time.
constexpr absl::Duration kParentTimeout = absl::Milliseconds(500);
// Time that the old supervisor gets in a take-over, beyond the time that its worker needs to end.
constexpr absl::Duration kTakeOverGrace = absl::Minutes(1);
// A worker that has not sent READY=1 after this many watchdog timeouts (and Options::start_timeout)
// is killed.
constexpr int kStartFactor = 20;

int Fail(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

int Fail(const absl::Status& status, int exit_code, const Log& log) {
  log.Error("not_started", {{"message", status.message()}});
  return Fail(status, exit_code);
}

int PrintConfig(const Config& config) {
  for (const auto& [key, value] : DescribeConfig(config)) {
    std::printf("%s: %s\n", key.c_str(), value.empty() ? "\"\"" : value.c_str());
  }
  return 0;
}

// Raises the limit of descriptors as far as the kernel permits; the worker inherits it.
void RaiseDescriptorLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Claims on all sockets of the configuration, which the supervisor holds across the lives of its
// workers.
struct Claims {
  std::unique_ptr<SocketClaim> grpc;
  std::unique_ptr<SocketClaim> admin;
  std::unique_ptr<SocketClaim> broker;  // null without a broker
};

absl::StatusOr<Claims> AcquireClaims(const Config& config) {
  Claims claims;
  absl::StatusOr<std::unique_ptr<SocketClaim>> claim =
      SocketClaim::Acquire(SocketPath(config), kOrphanTimeout);
  if (!claim.ok()) return claim.status();
  claims.grpc = *std::move(claim);
  claim = SocketClaim::Acquire(AdminPath(config), kOrphanTimeout);
  if (!claim.ok()) return claim.status();
  claims.admin = *std::move(claim);
  if (!config.broker) return claims;
  claim = SocketClaim::Acquire(BrokerPath(SocketPath(config)), kOrphanTimeout);
  if (!claim.ok()) return claim.status();
  claims.broker = *std::move(claim);
  return claims;
}

// Returns the command that starts this program again, without the take-over flag. Symbolic links in
// its path are followed again at each start.
std::vector<std::string> CommandOf(int argc, const char* const* argv) {
  std::vector<std::string> command = {ProgramPath(argv[0])};
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) != kTakeOverFlag) command.emplace_back(argv[i]);
  }
  return command;
}

Supervisor::Options SupervisorOptionsOf(const Config& config, std::vector<std::string> command,
                                        const Claims& claims) {
  Supervisor::Options options;
  options.command = std::move(command);
  options.command.emplace_back(kWorkerFlag);
  if (config.strict_memory) {
    options.work = [&config](KeptMappings mappings) {
      return RunWorker(config, /*claimed=*/true, std::move(mappings));
    };
  }
  options.max_kept = MaxKeptDescriptors(config.max_sessions, config.max_caches);
  options.max_failed_recoveries = config.max_failed_recoveries;
  options.start_empty_after_failure = config.start_empty_after_failure;
  options.watchdog_timeout = config.watchdog_timeout;
  if (config.watchdog_timeout > absl::ZeroDuration()) {
    options.start_timeout = std::max(options.start_timeout, kStartFactor * config.watchdog_timeout);
  }
  options.stop_timeout = StopTimeoutOf(config);
  options.before_start = [&claims] {
    for (const SocketClaim* claim : {claims.grpc.get(), claims.admin.get(), claims.broker.get()}) {
      if (claim != nullptr) claim->Clear();
    }
  };
  if (config.pool_directory.empty()) return options;
  options.keeps_files = [directory = config.pool_directory] {
    const auto keeper = kvstore::FileKeeper::Open(directory);
    // A directory that another process holds may contain memory to recover.
    return keeper.ok() ? !(*keeper)->Names().empty() : absl::IsAlreadyExists(keeper.status());
  };
  options.set_files_aside = [directory = config.pool_directory]() -> absl::StatusOr<std::string> {
    const auto keeper = kvstore::FileKeeper::Open(directory);
    if (!keeper.ok()) return keeper.status();
    return (*keeper)->SetAside();
  };
  return options;
}

// Runs the supervisor. Returns its exit status, or nothing when this program must be started again.
std::optional<int> Supervise(const Config& config, const CommandLine& command_line,
                             const std::vector<std::string>& command) {
  RaiseDescriptorLimit();
  const absl::StatusOr<std::unique_ptr<Log>> log = Log::Open(config.log_level, config.log_file);
  if (!log.ok()) return Fail(log.status(), kExitBadConfig);
  if (absl::Status status = CheckStartLimits(config, **log); !status.ok()) {
    return Fail(status, kExitBadConfig, **log);
  }
  if (absl::Status status = AdjustOomScore(config.oom_score_adjust); !status.ok()) {
    (*log)->Info("oom_score_not_adjusted", {{"message", status.message()}});
  }
  const Environment environment = ProcessEnvironment();
  const absl::StatusOr<std::unique_ptr<Notifier>> above =
      Notifier::FromEnvironment(environment, kParentTimeout);
  if (!above.ok()) return Fail(above.status(), kExitFailed, **log);
  KeptDescriptors kept;
  if (*above != nullptr) kept = (*above)->DuplicateAll();
  if (command_line.take_over) {
    absl::StatusOr<KeptDescriptors> taken =
        TakeOver(SupervisorPath(config), StopTimeoutOf(config) + kTakeOverGrace);
    if (!taken.ok() && !absl::IsNotFound(taken.status()))
      return Fail(taken.status(), kExitFailed, **log);
    if (taken.ok()) kept.merge(*taken);
  }
  // Declared first, so that it closes last: the successor starts when it is closed, after this
  // process has released its sockets.
  kvstore::FileDescriptor successor;
  absl::StatusOr<Claims> claims = AcquireClaims(config);
  if (!claims.ok()) return Fail(claims.status(), kExitFailed, **log);
  const absl::StatusOr<std::unique_ptr<NotifySocket>> socket =
      NotifySocket::Bind(SupervisorPath(config));
  if (!socket.ok()) return Fail(socket.status(), kExitFailed, **log);
  const absl::StatusOr<std::unique_ptr<StatusSocket>> status_socket =
      StatusSocket::Bind(SupervisorStatusPath(config));
  if (!status_socket.ok()) return Fail(status_socket.status(), kExitFailed, **log);
  Supervisor::Options options = SupervisorOptionsOf(config, command, *claims);
  options.status_socket = status_socket->get();
  options.parent_watchdog_timeout = WatchdogTimeout(environment);
  Supervisor supervisor(std::move(options), **socket, above->get(), std::move(kept), **log);
  Supervisor::Outcome outcome = supervisor.Run();
  successor = std::move(outcome.successor);
  if (outcome.start_again) return std::nullopt;
  return outcome.exit_code;
}

// Replaces this process by a new run of the program that inherits none of its memory. Returns only
// on failure.
int ReplaceProcess(std::vector<std::string> command) {
  std::vector<char*> pointers;
  pointers.reserve(command.size() + 1);
  for (std::string& argument : command) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  for (const char* each : {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}) unsetenv(each);
  execv(pointers[0], pointers.data());
  std::fprintf(stderr, "error: cannot execute %s: %s\n", pointers[0], std::strerror(errno));
  return kExitFailed;
}

int Main(int argc, const char* const* argv) {
  const CommandLine command_line = ParseCommandLine(argc, argv);
  if (command_line.action == Action::kPrint) {
    std::fputs(command_line.text.c_str(), command_line.exit_code == 0 ? stdout : stderr);
    return command_line.exit_code;
  }
  const absl::StatusOr<Config> config = LoadConfig(command_line.sources, ProcessEnvironment());
  if (!config.ok()) return Fail(config.status(), kExitBadConfig);
  switch (command_line.action) {
    case Action::kCheckConfig:
      return PrintConfig(*config);
    case Action::kWork:
      return RunWorker(*config, /*claimed=*/true);
    default:
      break;
  }
  if (!config->supervise) return RunWorker(*config, /*claimed=*/false);
  const std::vector<std::string> command = CommandOf(argc, argv);
  const std::optional<int> exit_code = Supervise(*config, command_line, command);
  return exit_code.has_value() ? *exit_code : ReplaceProcess(command);
}

}  // namespace
}  // namespace pqcached::service

int main(int argc, char** argv) { return pqcached::service::Main(argc, argv); }
