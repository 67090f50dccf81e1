#include "service/worker.h"

#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <ctime>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/worker.h"
#include "kvstore/clock.h"
#include "kvstore/memory/file_keeper.h"
#include "kvstore/memory/keeper.h"
#include "kvstore/plugins/plugin_library.h"
#include "kvstore/store.h"
#include "service/base/environment.h"
#include "service/base/exit_code.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/base/version.h"
#include "service/config/command_line.h"
#include "service/config/start_limits.h"
#include "service/rpc/server.h"
#include "service/session/broker.h"
#include "service/supervise/kept_sessions.h"
#include "service/supervise/notify.h"
#include "service/supervise/oom_score.h"

namespace pqcached::service {
namespace {

// Time beyond shutdown_timeout for work that does not notice its cancellation.
constexpr absl::Duration kShutdownGrace = absl::Seconds(5);
// Longest wait for the pool directory: the worker of a killed supervisor holds it until its memory
// is freed.
constexpr absl::Duration kOrphanTimeout = absl::Seconds(10);
constexpr absl::Duration kOrphanRetryPause = absl::Milliseconds(20);
// A wait that ends this much later than planned means that this process was stopped or suspended.
constexpr absl::Duration kSuspendThreshold = absl::Seconds(1);
// Further time for memory to be freed.
constexpr absl::Duration kEndGrace = absl::Seconds(10);

// Blocks the signals in all threads, which inherit the mask, so that only AwaitSignal receives
// them. The supervisor handles a terminal's SIGHUP.
sigset_t BlockSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGCONT);
  sigset_t blocked = signals;
  sigaddset(&blocked, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  return signals;
}

// Keeps freed memory in the heap. Received messages allocate and free hundreds of megabytes; by
// default the heap returns their pages to the kernel each time and requests new ones, which costs
// as much as copying the bytes. The store trims the heap when the machine is short of memory.
void KeepFreedMemory() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the largest value that glibc accepts
  mallopt(M_TRIM_THRESHOLD, 64 << 20);
  mallopt(M_TOP_PAD, 16 << 20);
}

// A supervisor gives up when workers keep failing to recover what it keeps, but not for two codes:
// memory of another layout_version waits for an operator, as an invalid configuration does, and a
// machine that is short of memory may have more later.
int ExitCodeOf(const absl::Status& created) {
  if (absl::IsResourceExhausted(created)) return kExitNoMemory;
  const bool refused = absl::IsInvalidArgument(created) || absl::IsFailedPrecondition(created);
  return refused ? kExitBadConfig : kExitFailed;
}

int Fail(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

int Fail(const absl::Status& status, int exit_code, const Log& log) {
  log.Error("not_started", {{"message", status.message()}});
  return Fail(status, exit_code);
}

// Keepers of memory and descriptors beyond the end of this process; null = none.
struct Keepers {
  std::unique_ptr<Notifier> notifier;
  std::unique_ptr<kvstore::FileKeeper> files;

  kvstore::DescriptorKeeper* memory() const {
    if (files != nullptr) return files.get();
    return notifier.get();
  }
};

absl::StatusOr<Keepers> OpenKeepers(const Config& config, std::optional<KeptMappings> mappings) {
  Keepers keepers;
  ASSIGN_OR_RETURN(std::unique_ptr<Notifier> notifier,
                   Notifier::FromEnvironment(ProcessEnvironment()));
  keepers.notifier = std::move(notifier);
  if (keepers.notifier != nullptr && mappings.has_value()) {
    keepers.notifier->Inherit(*std::move(mappings));
  }
  if (config.pool_directory.empty()) return keepers;
  absl::StatusOr<std::unique_ptr<kvstore::FileKeeper>> files =
      kvstore::FileKeeper::Open(config.pool_directory);
  for (const kvstore::SteadyTime until = kvstore::SteadyTime::Now() + kOrphanTimeout;
       absl::IsAlreadyExists(files.status()) && kvstore::SteadyTime::Now() < until;) {
    absl::SleepFor(kOrphanRetryPause);
    files = kvstore::FileKeeper::Open(config.pool_directory);
  }
  if (!files.ok()) {
    return PrefixField("pool_directory", files.status());
  }
  keepers.files = *std::move(files);
  return keepers;
}

// Waits for SIGTERM or SIGINT, which `signals` contains. In the meantime notifies the supervisor
// that the server answers, as often as the watchdog needs, and the log when this process was
// stopped or suspended.
int AwaitSignal(const sigset_t& signals, Server& server, const Notifier* notifier, const Log& log) {
  const absl::Duration timeout = WatchdogTimeout(ProcessEnvironment());
  const bool watched = notifier != nullptr && timeout > absl::ZeroDuration();
  const timespec pause = absl::ToTimespec(timeout / 4);
  kvstore::SteadyTime begun = kvstore::SteadyTime::Now();
  while (true) {
    const int signal_number = sigtimedwait(&signals, nullptr, watched ? &pause : nullptr);
    if (signal_number > 0 && signal_number != SIGCONT) return signal_number;
    if (signal_number < 0 && errno == EINTR) continue;  // a SIGCONT may follow
    const absl::Duration waited = kvstore::SteadyTime::Now() - begun;
    if (signal_number == SIGCONT || waited > timeout / 4 + kSuspendThreshold) {
      log.Warning("worker_paused", {{"within_seconds", absl::ToDoubleSeconds(waited)},
                                    {"message", "it was stopped, or the machine was suspended"}});
    }
    // A server that hangs blocks IsResponsive, so that no message is sent and the supervisor kills
    // this process.
    if (watched && server.IsResponsive(timeout / 4)) notifier->Send("WATCHDOG=1").IgnoreError();
    begun = kvstore::SteadyTime::Now();
  }
}

// Shuts the server down. Ends the process by force if that takes longer than `timeout`.
void ShutDownWithin(absl::Duration timeout, const Config& config, Server& server, const Log& log) {
  base::Worker watchdog("pqc-watchdog");
  watchdog.RunAfter(absl::ToChronoNanoseconds(timeout), [&] {
    log.Error("shutdown_forced", {{"after_seconds", absl::ToDoubleSeconds(timeout)}});
    const std::string path = SocketPath(config);
    unlink(path.c_str());
    unlink(AdminPath(config).c_str());
    unlink(BrokerPath(path).c_str());
    _exit(kExitFailed);
  });
  server.Shutdown();
  watchdog.Stop();
}

void LogRecovery(const kvstore::RecoveryReport& report, const Log& log) {
  if (!report.recovered) return;
  log.Info("recovered", {{"caches", report.caches},
                         {"sequences", report.sequences},
                         {"segments", report.segments},
                         {"bytes", report.bytes},
                         {"quarantined_bytes", report.quarantined_bytes},
                         {"dropped_records", report.dropped_records},
                         {"moved_pools", report.moved_caches.size()},
                         {"seconds", report.seconds}});
  for (const std::string& what : report.dropped) {
    log.Warning("record_dropped", {{"message", what}});
  }
  for (const std::string& reason : report.refused_moves) {
    log.Warning("move_refused", {{"message", reason}});
  }
}

// Loads the plug-ins that the configuration names.
absl::Status LoadPlugins(const Config& config, kvstore::DescriptorKeeper* keeper, const Log& log) {
  if (config.index_plugins.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const auto loaded, kvstore::PluginLibraries::Load(config.index_plugins, keeper));
  for (const kvstore::PluginLibraries::Report& plugin : loaded.reports()) {
    log.Info("index_plugin_loaded", {{"index", plugin.name}, {"path", plugin.path}});
    if (plugin.has_crashed) {
      log.Error("index_plugin_crashed",
                {{"index", plugin.name},
                 {"crashes", plugin.crashes},
                 {"message", "the last worker ended during a call of the plug-in"}});
    }
    if (!plugin.is_off) continue;
    log.Error("index_plugin_switched_off",
              {{"index", plugin.name},
               {"path", plugin.path},
               {"message", "its layers are searched exactly until the file is another one"}});
  }
  return absl::OkStatus();
}

void LogReady(const Config& config, const Server& server, const Log& log) {
  log.Info("ready",
           {{"endpoint", absl::StrJoin(server.endpoints(), ",")},
            {"pid", getpid()},
            {"version", kVersion},
            {"boot_id", server.boot_id()},
            {"kernel_level", std::string(kernels::LevelName(StoreOptionsOf(config).exec.level))},
            {"max_pool_bytes", config.max_pool_bytes}});
}

}  // namespace

absl::Duration StopTimeoutOf(const Config& config) {
  return config.shutdown_timeout + kShutdownGrace + kEndGrace;
}

int RunWorker(const Config& config, bool claimed, std::optional<KeptMappings> mappings) {
  KeepFreedMemory();
  const sigset_t signals = BlockSignals();
  const absl::StatusOr<Keepers> keepers = OpenKeepers(config, std::move(mappings));
  absl::StatusOr<std::unique_ptr<Log>> log = Log::Open(config.log_level, config.log_file);
  if (!log.ok()) return Fail(log.status(), kExitBadConfig);
  if (!keepers.ok()) return Fail(keepers.status(), kExitBadConfig, **log);
  if (!claimed) {  // a supervisor does this for its workers
    if (absl::Status status = CheckStartLimits(config, **log); !status.ok()) {
      return Fail(status, kExitBadConfig, **log);
    }
    if (absl::Status status = AdjustOomScore(config.oom_score_adjust); !status.ok()) {
      (*log)->Info("oom_score_not_adjusted", {{"message", status.message()}});
    }
  }
  const Notifier* notifier = keepers->notifier.get();
  if (absl::Status status = LoadPlugins(config, keepers->memory(), **log); !status.ok()) {
    return Fail(status, ExitCodeOf(status), **log);
  }
  if (!config.image_directory.empty()) {
    if (absl::Status status = kvstore::RemovePartialImages(config.image_directory); !status.ok()) {
      return Fail(status, ExitCodeOf(status), **log);
    }
  }

  kvstore::StoreOptions options = StoreOptionsOf(config);
  options.keeper = keepers->memory();
  options.on_live_index_failure = [&log](uint64_t sequence_id, const absl::Status& status) {
    (*log)->Warning("live_index_failed",
                    {{"sequence_id", sequence_id}, {"message", status.message()}});
  };
  options.on_cache_evicted = [&log](const std::string& tenant, const kvstore::CacheInfo& cache) {
    (*log)->Info("cache_evicted", {{"cache_id", cache.cache_id},
                                   {"tenant", tenant},
                                   {"name", cache.spec.name},
                                   {"capacity_bytes", cache.capacity_bytes},
                                   {"cached_prefixes", cache.cached_prefix_count}});
  };
  options.on_expired_leases = [&log](const std::string& session, uint32_t count) {
    (*log)->Warning("leases_expired", {{"session", session}, {"count", count}});
  };
  absl::StatusOr<std::unique_ptr<kvstore::Store>> store = kvstore::Store::Create(options);
  if (!store.ok()) {
    return Fail(store.status(), ExitCodeOf(store.status()), **log);
  }
  LogRecovery((*store)->Recovery(), **log);
  ServerOptions server_options{
      .claimed = claimed,
      .keepers = {.memory = keepers->memory(), .connections = keepers->notifier.get()}};
  if (claimed && notifier != nullptr) {  // otherwise the messages go to systemd
    server_options.request_restart = [notifier] {
      return notifier->Send(absl::StrCat(kRestartField, "=1"));
    };
  }
  absl::StatusOr<std::unique_ptr<Server>> server =
      Server::Start(config, **store, **log, server_options);
  if (!server.ok()) {
    return Fail(server.status(),
                absl::IsResourceExhausted(server.status()) ? kExitNoMemory : kExitFailed, **log);
  }
  if (notifier != nullptr) {
    notifier->Send(absl::StrCat("READY=1\nSTATUS=serving as ", getpid())).IgnoreError();
  }
  LogReady(config, **server, **log);  // after READY=1: readers may rely on the watchdog

  const int signal_number = AwaitSignal(signals, **server, notifier, **log);
  if (notifier != nullptr) notifier->Send("STOPPING=1").IgnoreError();
  (*log)->Info("stopping", {{"signal", signal_number == SIGTERM ? "SIGTERM" : "SIGINT"},
                            {"within_seconds", absl::ToDoubleSeconds(config.shutdown_timeout)}});
  ShutDownWithin(config.shutdown_timeout + kShutdownGrace, config, **server, **log);
  (*log)->Info("stopped", {});
  return 0;
}

}  // namespace pqcached::service
