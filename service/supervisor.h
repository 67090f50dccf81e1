// Supervisor: the small process that starts the worker, holds its memory, and starts the next one.
//
// The worker is the same program. It speaks the protocol of sd_notify (notify.h) to its supervisor:
// what it keeps here survives it. When it dies, its clients are told (kept_sessions.h) and the next
// one starts with all that is kept, after a pause that grows. One that says nothing for
// watchdog_timeout is killed. Workers that die before READY=1, max_failed_recoveries in a row, end in
// what is kept being let go of; one more that dies then ends the supervisor. A worker that refuses its
// configuration counts for nothing: the next one tries again.
//
//   SIGTERM, SIGINT   stops the worker, then this process
//   SIGHUP            stops the worker and starts the program anew: another binary at the same path
//                     goes on with what is kept
//   take-over         (take_over.h) stops the worker and hands what is kept to another supervisor
//
// Memory that nobody may map again for writing (strict_memory) survives a worker only in a mapping of the
// supervisor's: then workers are forks of it (Options::work), on SIGHUP nothing goes on and the supervisor
// is started anew itself, and a take-over leaves such memory behind.
//
// Single-thread, and no other thread may be in the process. If it is killed, the kernel kills its worker.
#ifndef PQCACHED_SERVICE_SUPERVISOR_H_
#define PQCACHED_SERVICE_SUPERVISOR_H_

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "service/config.h"
#include "service/log.h"
#include "service/notify.h"
#include "service/notify_socket.h"
#include "service/worker_process.h"

namespace pqcached::service {

class Supervisor {
 public:
  struct Options {
    ForkedWork work = {};              // of a worker that is a fork; empty: `command` is executed
    std::vector<std::string> command;  // of the worker; the first is the path that is executed
    size_t max_kept = 4096;            // descriptors
    uint32_t max_failed_recoveries = 5;
    absl::Duration watchdog_timeout = absl::Seconds(30);  // zero = none
    absl::Duration start_timeout = absl::Minutes(10);     // until READY=1
    absl::Duration stop_timeout = absl::Seconds(20);      // after SIGTERM, then SIGKILL
    absl::Duration first_pause = absl::Milliseconds(100);
    absl::Duration longest_pause = absl::Seconds(5);
    absl::Duration steady_after =
        absl::Seconds(60);  // served for so long: the pause is short again
    // How often who supervises this process wants to hear of it; zero = never.
    absl::Duration above_watchdog_timeout;
    // Before each start of a worker, when none is alive. May be empty, as the others.
    std::function<void()> before_start;
    std::function<bool()> keeps_files;  // whether something is kept that is no descriptor
    std::function<void()> drop_files;
  };

  struct Outcome {
    int exit_code = 0;
    bool start_anew = false;  // this program, in place of this process
    // Where it is valid: another supervisor has all that was kept, and goes on when this is closed,
    // which must be after this process has given up its claims.
    kvstore::FileDescriptor successor;
  };

  // `above` (may be null) gets what is kept here, too. `kept` is what an earlier supervisor held.
  Supervisor(Options options, NotifySocket& socket, Notifier* above, KeptDescriptors kept,
             const Log& log);
  // Kills the worker.
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // Until SIGTERM, a take-over, or an end of its own. Takes SIGTERM, SIGINT, SIGHUP and SIGCHLD.
  Outcome Run();

 private:
  using Clock = std::chrono::steady_clock;  // wall time jumps
  enum class State { kPausing, kStarting, kServing, kStopping };
  enum class Intent { kServe, kRestart, kExit, kHandOver };

  void Start();
  void Stop(Intent intent);
  void OnSignals();
  void OnMessages();
  void OnWorkerMessage(Notification& message);
  void OnReady();
  void OnTakeOver(Notification& message);
  void OnDeadline();
  void ReapWorker();
  void OnWorkerEnded(int status);
  void OnFailedStart(int status);
  void Pause();
  void HandOver();
  void Finish(int exit_code);
  void Keep(const std::string& name, kvstore::FileDescriptor descriptor, bool map);
  void Release(const std::string& name);
  void DropKept();
  void EndSessions();
  void PingAbove();
  void TellAbove(absl::string_view message) const;
  int MillisecondsToWait() const;
  void SetDeadline(absl::Duration after);

  const Options options_;
  NotifySocket& socket_;
  Notifier* const above_;
  const Log& log_;
  kvstore::FileDescriptor signals_;
  KeptDescriptors kept_;
  KeptMappings mappings_;  // of some of them
  size_t name_bytes_ = 0;
  pid_t worker_ = 0;  // 0 = none
  State state_ = State::kPausing;
  Intent intent_ = Intent::kServe;
  std::optional<Clock::time_point> deadline_;  // of the state
  Clock::time_point started_;
  Clock::time_point next_ping_;
  absl::Duration pause_;
  uint32_t failed_ = 0;  // workers in a row that died before READY=1
  uint32_t starts_ = 0;
  bool recovers_ = false;  // the worker was started with something kept
  bool ready_ = false;     // the worker said so
  bool ever_ready_ = false;
  bool dropped_ = false;  // what was kept, since the last READY=1
  kvstore::FileDescriptor successor_;
  std::optional<Outcome> outcome_;
};

// How many descriptors a worker keeps at most: of a session its connection and its control memory, twice
// while a client changes over; of a cache its pool and its records.
size_t MaxKeptOf(const Config& config);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SUPERVISOR_H_
