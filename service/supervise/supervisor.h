// Supervisor is the small process that starts the worker, holds its memory, and starts the next
// worker when it ends.
//
// The worker runs the same program. It sends sd_notify messages (notify.h) to its supervisor; the
// descriptors that it stores there survive it. When the worker dies, the supervisor notifies the
// worker's clients (kept_sessions.h) and starts the next worker with all kept descriptors, after a
// pause that grows with each death. A worker that does not report for watchdog_timeout is killed.
//
// A worker that dies before READY=1 has failed to recover the kept memory, but for faults of the
// environment: it was killed for want of memory (SIGBUS; a SIGKILL that this process did not send;
// kExitNoMemory), or it rejects its configuration. After such a fault the supervisor starts the
// next worker as often as it takes. After max_failed_recoveries other failures in a row it gives
// up: all memory stays as it is, no worker runs, and the state "given_up" is answered on the
// status socket until an operator chooses (kRecoverField):
//
//   retry     starts workers again, for example after an update of the program
//   discard   sets the files of pool_directory aside, releases the other memory, and starts empty
//
//   SIGTERM, SIGINT   stops the worker, then this process
//   SIGCONT           writes to the log that this process was stopped
//   SIGHUP            stops the worker and starts the program again: another binary at the same
//                     path continues with the kept memory
//   take-over         (take_over.h) stops the worker and passes the kept memory to another
//                     supervisor
//
// Memory that may never be mapped again for writing (strict_memory) survives a worker only in a
// mapping of the supervisor. Workers are then forks of the supervisor (Options::work), a SIGHUP
// starts the supervisor itself again and keeps nothing, and a take-over leaves such memory behind.
//
// Single-thread; the process must have no other threads. When the supervisor is killed, the kernel
// kills its worker.
#ifndef PQCACHED_SERVICE_SUPERVISE_SUPERVISOR_H_
#define PQCACHED_SERVICE_SUPERVISE_SUPERVISOR_H_

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "service/base/log.h"
#include "service/supervise/notify.h"
#include "service/supervise/notify_socket.h"
#include "service/supervise/status_socket.h"
#include "service/supervise/worker_process.h"

namespace pqcached::service {

// Field of a message to the supervisor from its own user, or from root: "retry" or "discard".
inline constexpr char kRecoverField[] = "PQCACHED_RECOVER";

class Supervisor {
 public:
  struct Options {
    ForkedWork work = {};              // run by a forked worker; empty: `command` is executed
    std::vector<std::string> command;  // of the worker; the first element is the path to execute
    size_t max_kept = 4096;            // largest number of kept descriptors
    uint32_t max_failed_recoveries = 5;
    bool start_empty_after_failure = false;               // discards instead of giving up
    absl::Duration watchdog_timeout = absl::Seconds(30);  // zero = none
    absl::Duration start_timeout = absl::Minutes(10);     // until READY=1
    absl::Duration stop_timeout = absl::Seconds(20);      // after SIGTERM, then SIGKILL
    absl::Duration first_pause = absl::Milliseconds(100);
    absl::Duration longest_pause = absl::Seconds(5);
    absl::Duration reset_pause_after =
        absl::Seconds(60);  // after serving this long, pauses restart from first_pause
    // Time within which this process's own supervisor expects WATCHDOG=1; zero = never.
    absl::Duration parent_watchdog_timeout;
    // Called before each start of a worker, when no worker runs. The functions may be empty.
    std::function<void()> before_start;
    std::function<bool()> keeps_files;  // whether memory is kept in files, without descriptors
    // Moves these files aside. Returns the folder that contains them now; empty if there were none.
    std::function<absl::StatusOr<std::string>()> set_files_aside;
    const StatusSocket* status_socket = nullptr;  // null = none
  };

  struct Outcome {
    int exit_code = 0;
    bool start_again = false;  // run this program again in place of this process
    // When valid, another supervisor has received all kept descriptors. It starts when this is
    // closed, which must happen after this process has released its claims.
    kvstore::FileDescriptor successor;
  };

  // `parent` (may be null) is this process's own supervisor, to which kept descriptors are
  // forwarded. `kept` are the descriptors that an earlier supervisor held.
  Supervisor(Options options, NotifySocket& socket, Notifier* parent, KeptDescriptors kept,
             const Log& log);
  // Kills the worker.
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // Supervises until SIGTERM, SIGINT, a take-over, or a failure. Handles SIGTERM, SIGINT, SIGHUP,
  // SIGCHLD and SIGCONT.
  Outcome Run();

 private:
  using Clock = std::chrono::steady_clock;  // wall time jumps
  enum class State { kPausing, kStarting, kServing, kStopping, kGivenUp };
  enum class Intent { kServe, kRestart, kExit, kHandOver };

  void Start();
  void Stop(Intent intent);
  void OnSignals();
  void OnMessages();
  void OnWorkerMessage(Notification& message);
  void OnReady();
  void OnTakeOver(Notification& message);
  void OnRecover(const Notification& message);
  void OnDeadline();
  void ReapWorker();
  void OnWorkerEnded(int status);
  void OnFailedStart(int status);
  void GiveUp();
  bool Discard();
  std::string StatusLine() const;
  void Pause();
  void MakePendingUpdate();
  void Finish(int exit_code);
  void Keep(const std::string& name, kvstore::FileDescriptor descriptor, bool map);
  void Release(const std::string& name);
  void DropKept();
  void EndSessions();
  void PingParent();
  void NotifyParent(absl::string_view message) const;
  int MillisecondsToWait() const;
  void SetDeadline(absl::Duration after);

  const Options options_;
  NotifySocket& socket_;
  Notifier* const parent_;
  const Log& log_;
  kvstore::FileDescriptor signals_;
  KeptDescriptors kept_;
  KeptMappings mappings_;  // mappings of some of `kept_`
  size_t name_bytes_ = 0;
  pid_t worker_ = 0;  // 0 = none
  State state_ = State::kPausing;
  Intent intent_ = Intent::kServe;
  std::optional<Clock::time_point> deadline_;  // end of the present state, if it is limited
  Clock::time_point started_;
  Clock::time_point next_ping_;
  absl::Duration pause_;
  uint32_t failed_ = 0;  // workers in a row that failed to recover
  uint32_t starts_ = 0;
  bool recovers_ = false;  // the worker was started with something kept
  bool ready_ = false;     // the worker has sent READY=1
  bool ever_ready_ = false;
  bool killed_ = false;     // by this process
  bool continued_ = false;  // SIGCONT has arrived, and the log does not name it yet
  std::string last_end_;    // how the last worker ended, and why
  std::string set_aside_;   // folder of the files that were set aside last
  kvstore::FileDescriptor successor_;
  std::optional<Outcome> outcome_;
};

// Returns the largest number of descriptors that a worker keeps: for each session its connection,
// its control memory and its staging ring (twice while a client resumes), for each cache its pool
// and its records.
size_t MaxKeptDescriptors(uint32_t max_sessions, uint32_t max_caches);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SUPERVISE_SUPERVISOR_H_
