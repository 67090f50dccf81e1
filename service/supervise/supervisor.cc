#include "service/supervise/supervisor.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "service/base/exit_code.h"
#include "service/supervise/kept_sessions.h"
#include "service/supervise/take_over.h"
#include "service/supervise/worker_process.h"

namespace pqcached::service {
namespace {

using kvstore::FileDescriptor;

// A wait that ends this much later than planned means that this process was stopped or suspended,
// and perhaps the worker with it.
constexpr std::chrono::seconds kSuspendThreshold(1);
constexpr size_t kMaxNameBytes = 120 << 10;  // total of all names: they are passed in one variable

std::chrono::nanoseconds Nanoseconds(absl::Duration duration) {
  return absl::ToChronoNanoseconds(duration);
}

bool EndedBy(int status, int signal) { return WIFSIGNALED(status) && WTERMSIG(status) == signal; }

// Returns why the environment, and not the worker, has caused this end; empty if it has not.
absl::string_view EnvironmentFault(int status, bool killed_by_supervisor) {
  if (EndedBy(status, SIGBUS)) return "the kernel could not provide a page of memory";
  if (EndedBy(status, SIGKILL) && !killed_by_supervisor) {
    return "another process killed it, or the kernel for want of memory";
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == kExitNoMemory) return "too little memory";
  return "";
}

// Returns whether a worker that was told to stop has done so. A worker that was not ready yet may
// have refused its configuration at that moment, or may not have handled SIGTERM yet.
bool EndedCleanly(int status, bool ready) {
  if (ready) return status == 0;
  return WIFEXITED(status) || EndedBy(status, SIGTERM);
}

std::string DescribeExit(int status) {
  if (WIFSIGNALED(status)) return absl::StrCat("signal ", WTERMSIG(status));
  return absl::StrCat("exit ", WEXITSTATUS(status));
}

FileDescriptor BlockAndReadSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int each : {SIGTERM, SIGINT, SIGHUP, SIGCHLD, SIGCONT}) sigaddset(&signals, each);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  return FileDescriptor(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
}

}  // namespace

size_t MaxKeptDescriptors(uint32_t max_sessions, uint32_t max_caches) {
  return 6 * size_t{max_sessions} + 4 * size_t{max_caches} + 64;
}

Supervisor::Supervisor(Options options, NotifySocket& socket, Notifier* parent,
                       KeptDescriptors kept, const Log& log)
    : options_(std::move(options)),
      socket_(socket),
      parent_(parent),
      log_(log),
      signals_(BlockAndReadSignals()),
      pause_(options_.first_pause) {
  while (!kept.empty()) {
    auto node = kept.extract(kept.begin());
    Keep(node.key(), std::move(node.mapped()), /*map=*/false);
  }
}

Supervisor::~Supervisor() {
  if (worker_ == 0) return;
  kill(worker_, SIGKILL);
  waitpid(worker_, nullptr, 0);
  EndSessions();
}

Supervisor::Outcome Supervisor::Run() {
  EndSessions();  // sessions of the worker of an earlier supervisor
  next_ping_ = Clock::now();
  Start();
  while (!outcome_) {
    const StatusSocket* status = options_.status_socket;
    std::array<pollfd, 3> waiting = {
        pollfd{signals_.get(), POLLIN, 0}, pollfd{socket_.descriptor(), POLLIN, 0},
        pollfd{status == nullptr ? -1 : status->descriptor(), POLLIN, 0}};
    const std::optional<Clock::time_point> deadline = deadline_;
    const Clock::time_point before = Clock::now();
    const int milliseconds = MillisecondsToWait();
    poll(waiting.data(), waiting.size(), milliseconds);
    const Clock::duration waited = Clock::now() - before;
    const bool late =
        milliseconds >= 0 && waited > std::chrono::milliseconds(milliseconds) + kSuspendThreshold;
    OnMessages();
    OnSignals();
    if (std::exchange(continued_, false) || late) {
      log_.Warning("supervisor_paused",
                   {{"within_seconds", std::chrono::duration<double>(waited).count()},
                    {"message", "it was stopped, or the machine was suspended"}});
      // The worker may have paused as long, and gets the time that it had before.
      if (deadline_ && deadline_ == deadline) *deadline_ += waited;
    }
    OnDeadline();
    PingParent();
    if (status != nullptr && waiting[2].revents != 0) {
      // A message that was sent before a connection was opened shows in its answer.
      status->Answer([this] {
        OnMessages();
        return StatusLine();
      });
    }
  }
  return std::move(*outcome_);
}

int Supervisor::MillisecondsToWait() const {
  std::optional<Clock::time_point> until = deadline_;
  if (options_.parent_watchdog_timeout > absl::ZeroDuration()) {
    until = until ? std::min(*until, next_ping_) : next_ping_;
  }
  if (!until) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*until - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

void Supervisor::SetDeadline(absl::Duration after) {
  deadline_ = Clock::now() + Nanoseconds(after);
}

void Supervisor::NotifyParent(absl::string_view message) const {
  if (parent_ != nullptr) parent_->Send(message).IgnoreError();
}

void Supervisor::PingParent() {
  if (options_.parent_watchdog_timeout <= absl::ZeroDuration() || Clock::now() < next_ping_) return;
  NotifyParent("WATCHDOG=1");
  next_ping_ = Clock::now() + Nanoseconds(options_.parent_watchdog_timeout / 3);
}

void Supervisor::Start() {
  if (options_.before_start) options_.before_start();
  recovers_ = !kept_.empty() || (options_.keeps_files && options_.keeps_files());
  worker_ = StartWorkerProcess({.command = options_.command,
                                .notify_socket = socket_.path(),
                                .kept = kept_,
                                .max_kept = options_.max_kept,
                                .watchdog_timeout = options_.watchdog_timeout,
                                .work = options_.work,
                                .mappings = mappings_});
  if (worker_ < 0) {
    log_.Error("worker_not_started", {{"message", std::strerror(errno)}});
    worker_ = 0;
    Pause();
    return;
  }
  state_ = State::kStarting;
  ready_ = false;
  killed_ = false;
  intent_ = Intent::kServe;
  started_ = Clock::now();
  SetDeadline(options_.start_timeout);
  log_.Info("supervising", {{"pid", getpid()},
                            {"worker", worker_},
                            {"start", ++starts_},
                            {"kept_descriptors", kept_.size()}});
}

void Supervisor::Pause() {
  state_ = State::kPausing;
  SetDeadline(pause_);
  pause_ = std::min(2 * pause_, options_.longest_pause);
}

void Supervisor::Finish(int exit_code) {
  outcome_ = Outcome{.exit_code = exit_code, .successor = std::move(successor_)};
}

// A later intent replaces an earlier one: a stop overrides a restart.
void Supervisor::Stop(Intent intent) {
  intent_ = intent;
  if (worker_ == 0) {
    OnWorkerEnded(0);
    return;
  }
  kill(worker_, SIGTERM);
  if (state_ == State::kStopping) return;
  state_ = State::kStopping;
  SetDeadline(options_.stop_timeout);
}

void Supervisor::OnSignals() {
  signalfd_siginfo info = {};
  bool child = false;
  while (read(signals_.get(), &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
    if (outcome_) return;
    const int number = static_cast<int>(info.ssi_signo);
    if (number == SIGCHLD) {
      child = true;
    } else if (number == SIGCONT) {
      continued_ = true;
    } else if (number == SIGHUP) {
      log_.Info("restarting", {{"signal", "SIGHUP"}});
      if (intent_ == Intent::kServe) Stop(Intent::kRestart);
    } else {
      log_.Info("stopping_worker", {{"signal", number == SIGTERM ? "SIGTERM" : "SIGINT"}});
      NotifyParent("STOPPING=1");
      Stop(Intent::kExit);
    }
  }
  if (child && !outcome_) ReapWorker();
}

void Supervisor::ReapWorker() {
  if (worker_ == 0) return;
  OnMessages();  // messages sent before its death, matched by its pid
  int status = 0;
  if (waitpid(worker_, &status, WNOHANG) != worker_) return;
  OnMessages();  // messages that arrived between the two calls
  log_.Write(intent_ == Intent::kServe ? LogLevel::kError : LogLevel::kInfo, "worker_ended",
             {{"pid", worker_},
              {"how", DescribeExit(status)},
              {"seconds", std::chrono::duration<double>(Clock::now() - started_).count()}});
  worker_ = 0;
  last_end_ = DescribeExit(status);
  if (const absl::string_view fault = EnvironmentFault(status, killed_); !fault.empty()) {
    absl::StrAppend(&last_end_, ": ", fault);
  }
  OnWorkerEnded(status);
}

// The worker has ended, so that only this process writes to the control memory of the sessions now.
void Supervisor::OnWorkerEnded(int status) {
  EndSessions();
  deadline_.reset();
  switch (intent_) {
    case Intent::kExit:
      Finish(EndedCleanly(status, ready_) ? 0 : kExitFailed);
      return;
    case Intent::kHandOver:
      MakePendingUpdate();
      return;
    case Intent::kRestart:
      if (options_.work) {  // a fork would run the old program
        DropKept();
        outcome_ = Outcome{.exit_code = 0, .start_again = true, .successor = {}};
        return;
      }
      pause_ = options_.first_pause;
      failed_ = 0;
      Start();
      return;
    case Intent::kServe:
      break;
  }
  if (!ready_) {
    OnFailedStart(status);
    return;
  }
  if (Clock::now() - started_ >= Nanoseconds(options_.reset_pause_after))
    pause_ = options_.first_pause;
  Pause();
}

void Supervisor::OnFailedStart(int status) {
  if (WIFEXITED(status) && !recovers_ && !ever_ready_) {
    // The worker has reported its error, and had nothing to recover: another start would fail in
    // the same way.
    Finish(WEXITSTATUS(status) == 0 ? kExitFailed : WEXITSTATUS(status));
    return;
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == kExitBadConfig) {
    // The worker failed before recovery: the kept memory waits until the operator has corrected the
    // configuration.
    log_.Error("configuration_refused", {{"kept_descriptors", kept_.size()}});
    Pause();
    return;
  }
  if (const absl::string_view fault = EnvironmentFault(status, killed_); !fault.empty()) {
    log_.Error(
        "recovery_postponed",
        {{"how", DescribeExit(status)}, {"message", fault}, {"kept_descriptors", kept_.size()}});
    Pause();
    return;
  }
  ++failed_;
  if (failed_ < options_.max_failed_recoveries) {
    Pause();
    return;
  }
  if (!recovers_) {
    log_.Error("worker_fails", {{"count", failed_}, {"message", "without anything to recover"}});
    Finish(kExitFailed);
    return;
  }
  if (options_.start_empty_after_failure && Discard()) {
    Pause();
    return;
  }
  GiveUp();
}

void Supervisor::GiveUp() {
  state_ = State::kGivenUp;
  log_.Error("recovery_given_up", {{"count", failed_},
                                   {"last", last_end_},
                                   {"kept_descriptors", kept_.size()},
                                   {"message", "run pqcachectl recover --retry or --discard"}});
  NotifyParent(
      absl::StrCat("STATUS=not serving: recovery failed ", failed_, " times: ", last_end_));
}

// Returns false when files could not be set aside; then nothing has changed.
bool Supervisor::Discard() {
  if (options_.set_files_aside) {
    const absl::StatusOr<std::string> folder = options_.set_files_aside();
    if (!folder.ok()) {
      log_.Error("files_not_set_aside", {{"message", folder.status().message()}});
      return false;
    }
    set_aside_ = *folder;
  }
  log_.Warning("memory_discarded",
               {{"released_descriptors", kept_.size()}, {"files_set_aside_in", set_aside_}});
  DropKept();
  failed_ = 0;
  return true;
}

// An operator's choice. It applies only while workers fail to recover: after a worker that served,
// the next one recovers.
void Supervisor::OnRecover(const Notification& message) {
  const bool fails = state_ == State::kGivenUp || (state_ == State::kPausing && !ready_);
  const std::string choice = message.Get(kRecoverField);
  const bool allowed = message.uid == 0 || message.uid == geteuid();
  if (!allowed || !fails || (choice != "retry" && choice != "discard")) {
    log_.Warning("recover_refused", {{"pid", message.pid}, {"uid", message.uid}});
    return;
  }
  log_.Audit("recover", {{"role", "operator"},
                         {"peer", absl::StrCat("uid=", message.uid, " pid=", message.pid)},
                         {"request", choice}});
  if (choice == "discard" && !Discard()) return;
  failed_ = 0;
  pause_ = options_.first_pause;
  Start();
}

std::string Supervisor::StatusLine() const {
  const char* states[] = {"pausing", "starting", "serving", "stopping", "given_up"};
  return absl::StrCat(
      "{\"state\":\"", states[static_cast<size_t>(state_)], "\",\"worker_pid\":", worker_,
      ",\"starts\":", starts_, ",\"failed_recoveries\":", failed_,
      ",\"recovers\":", recovers_ && !ready_ ? "true" : "false",
      ",\"kept_descriptors\":", kept_.size(), ",\"last_end\":\"", last_end_, "\",\"set_aside\":\"",
      absl::StrReplaceAll(set_aside_, {{"\\", "\\\\"}, {"\"", "\\\""}}), "\"}\n");
}

void Supervisor::EndSessions() {
  for (const auto& [name, descriptor] : kept_) EndKeptSession(name, descriptor.get());
}

void Supervisor::DropKept() {
  while (!kept_.empty()) Release(std::string(kept_.begin()->first));
}

void Supervisor::MakePendingUpdate() {
  KeptDescriptors stay;  // useless to the successor without their mappings
  for (const auto& [name, mapping] : mappings_) stay.insert(kept_.extract(name));
  const absl::Status status = SendKept(successor_.get(), kept_);
  kept_.merge(stay);
  if (status.ok()) {
    log_.Info("handed_over", {{"descriptors", kept_.size()}});
    Finish(0);
    return;
  }
  log_.Error("take_over_failed", {{"message", status.message()}});
  successor_ = FileDescriptor();
  Start();
}

void Supervisor::OnDeadline() {
  if (outcome_ || !deadline_ || Clock::now() < *deadline_) return;
  deadline_.reset();
  if (state_ == State::kPausing) {
    Start();
    return;
  }
  log_.Error("worker_killed",
             {{"pid", worker_},
              {"because", state_ == State::kStopping   ? "did not stop in time"
                          : state_ == State::kStarting ? "did not become ready in time"
                                                       : "did not answer the watchdog"}});
  killed_ = true;
  kill(worker_, SIGKILL);
}

void Supervisor::OnMessages() {
  while (std::optional<Notification> message = socket_.Receive()) {
    if (message->Has(kTakeOverField, "1")) {
      OnTakeOver(*message);
    } else if (!message->Get(kRecoverField).empty()) {
      OnRecover(*message);
    } else if (worker_ != 0 && message->pid == worker_) {
      OnWorkerMessage(*message);
    }
    // The descriptor of a BARRIER=1 message is closed when `message` is destroyed.
  }
}

void Supervisor::OnWorkerMessage(Notification& message) {
  const std::string name = message.Get("FDNAME");
  if (message.Has("FDSTORE", "1") && message.descriptors.size() == 1) {
    Keep(name, std::move(message.descriptors[0]), message.Has(kMapField, "1"));
  }
  if (message.Has("FDSTOREREMOVE", "1")) Release(name);
  if (message.Has("BARRIER", "1") && message.descriptors.size() == 1 && kept_.contains(name)) {
    // See kConfirmsVariable. The worker may have given up.
    send(message.descriptors[0].get(), "1", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  if (const std::string status = message.Get("STATUS"); !status.empty()) {
    NotifyParent(absl::StrCat("STATUS=", status));
  }
  if (message.Has("STOPPING", "1") && state_ != State::kStopping) {
    state_ = State::kStopping;
    SetDeadline(options_.stop_timeout);
  }
  if (message.Has("READY", "1")) {
    if (state_ == State::kStarting) OnReady();
    if (state_ == State::kStopping) ready_ = true;
  }
  if (message.Has(kRestartField, "1") && state_ == State::kServing) {
    log_.Info("restarting", {{"worker", worker_}});
    if (intent_ == Intent::kServe) Stop(Intent::kRestart);
  }
  const bool alive = message.Has("WATCHDOG", "1") || message.Has("READY", "1");
  if (alive && state_ == State::kServing) {
    deadline_.reset();
    if (options_.watchdog_timeout > absl::ZeroDuration()) SetDeadline(options_.watchdog_timeout);
  }
}

void Supervisor::OnReady() {
  state_ = State::kServing;
  ready_ = true;
  failed_ = 0;
  ever_ready_ = true;
  NotifyParent("READY=1");
}

void Supervisor::OnTakeOver(Notification& message) {
  const bool allowed = message.uid == 0 || message.uid == geteuid();
  if (!allowed || message.descriptors.size() != 1 || intent_ == Intent::kExit ||
      intent_ == Intent::kHandOver) {
    log_.Warning("take_over_refused", {{"pid", message.pid}, {"uid", message.uid}});
    return;
  }
  log_.Info("handing_over", {{"pid", message.pid}});
  successor_ = std::move(message.descriptors[0]);
  NotifyParent("STOPPING=1");
  Stop(Intent::kHandOver);
}

void Supervisor::Keep(const std::string& name, FileDescriptor descriptor, bool map) {
  if (!kvstore::IsKeeperName(name) || kept_.size() >= options_.max_kept ||
      name_bytes_ + name.size() + 1 > kMaxNameBytes) {
    log_.Error("descriptor_not_kept", {{"name", name}, {"kept_descriptors", kept_.size()}});
    return;
  }
  const auto [place, added] = kept_.try_emplace(name, std::move(descriptor));
  if (!added) return;
  name_bytes_ += name.size() + 1;
  if (map) {
    auto mapping = kvstore::Mapping::Map(place->second, kvstore::SizeOf(place->second),
                                         kvstore::Mapping::Access::kReadWrite);
    if (mapping.ok()) {
      mappings_.emplace(name, *std::move(mapping));
    } else {
      log_.Error("mapping_not_kept", {{"name", name}, {"message", mapping.status().message()}});
      name_bytes_ -= name.size() + 1;
      kept_.erase(place);
    }
    return;
  }
  if (parent_ != nullptr) parent_->Forward(name, place->second.get()).IgnoreError();
}

void Supervisor::Release(const std::string& name) {
  if (kept_.erase(name) == 0) return;
  name_bytes_ -= name.size() + 1;
  if (mappings_.erase(name) != 0) return;
  if (parent_ != nullptr) parent_->Release(name).IgnoreError();
}

}  // namespace pqcached::service
