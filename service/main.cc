// pqcached: wires configuration, log, store and server together, and ends cleanly on SIGTERM.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "kvstore/store.h"
#include "service/broker.h"
#include "service/command_line.h"
#include "service/config.h"
#include "service/log.h"
#include "service/server.h"
#include "service/version.h"

namespace pqcached::service {
namespace {

// Beyond shutdown_timeout, for work that does not notice that it was cancelled.
constexpr absl::Duration kShutdownGrace = absl::Seconds(5);

// All threads inherit the mask, so that signals are only ever taken by sigwait below.
sigset_t BlockSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

int Fail(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

int PrintConfig(const Config& config) {
  for (const auto& [key, value] : DescribeConfig(config)) {
    std::printf("%s: %s\n", key.c_str(), value.empty() ? "\"\"" : value.c_str());
  }
  return 0;
}

// Shuts the server down. The process ends anyway when that takes longer than promised.
void ShutDownWithin(absl::Duration timeout, const Config& config, Server& server, const Log& log) {
  absl::Notification done;
  std::thread watchdog([&] {
    if (done.WaitForNotificationWithTimeout(timeout)) return;
    log.Error("shutdown_forced", {{"after_seconds", absl::ToDoubleSeconds(timeout)}});
    const std::string path = config.listen.substr(std::string("unix://").size());
    unlink(path.c_str());
    unlink(BrokerPath(path).c_str());
    _exit(kExitFailed);
  });
  server.Shutdown();
  done.Notify();
  watchdog.join();
}

int Serve(const Config& config) {
  const sigset_t signals = BlockSignals();
  absl::StatusOr<std::unique_ptr<Log>> log = Log::Open(config.log_level, config.log_file);
  if (!log.ok()) return Fail(log.status(), kExitBadConfig);
  kvstore::StoreOptions options = StoreOptionsOf(config);
  options.live_index_failed = [&log](uint64_t sequence_id, const absl::Status& status) {
    (*log)->Warning("live_index_failed",
                    {{"sequence_id", sequence_id}, {"message", status.message()}});
  };
  absl::StatusOr<std::unique_ptr<kvstore::Store>> store = kvstore::Store::Create(options);
  if (!store.ok()) return Fail(store.status(), kExitBadConfig);
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(config, **store, **log);
  if (!server.ok()) return Fail(server.status(), kExitFailed);

  (*log)->Info("ready", {{"endpoint", absl::StrJoin((*server)->endpoints(), ",")},
                         {"pid", getpid()},
                         {"version", kVersion},
                         {"kernel_level",
                          std::string(kernels::LevelName(StoreOptionsOf(config).exec.level))},
                         {"max_pool_bytes", config.max_pool_bytes}});
  int signal_number = 0;
  sigwait(&signals, &signal_number);
  (*log)->Info("stopping", {{"signal", signal_number == SIGTERM ? "SIGTERM" : "SIGINT"},
                            {"within_seconds", absl::ToDoubleSeconds(config.shutdown_timeout)}});
  ShutDownWithin(config.shutdown_timeout + kShutdownGrace, config, **server, **log);
  (*log)->Info("stopped", {});
  return 0;
}

int Main(int argc, const char* const* argv) {
  const CommandLine command_line = ParseCommandLine(argc, argv);
  if (command_line.action == Action::kPrint) {
    std::fputs(command_line.text.c_str(), command_line.exit_code == 0 ? stdout : stderr);
    return command_line.exit_code;
  }
  const absl::StatusOr<Config> config = LoadConfig(command_line.sources, ProcessEnvironment());
  if (!config.ok()) return Fail(config.status(), kExitBadConfig);
  if (command_line.action == Action::kCheckConfig) return PrintConfig(*config);
  return Serve(*config);
}

}  // namespace
}  // namespace pqcached::service

int main(int argc, char** argv) { return pqcached::service::Main(argc, argv); }
