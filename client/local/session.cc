#include "client/local/session.h"

#include <algorithm>
#include <utility>

#include "client/base/deadline.h"
#include "client/base/error.h"
#include "client/local/sequence.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

using Phase = SessionPhase::Phase;

// The watcher checks at this interval that the worker lives: a killed sidecar wakes no waiter, and
// another holder may keep the connection open.
constexpr uint32_t kWatchMs = 100;
// When events are wanted, the watcher also looks at the leases after every change of the worker's
// words, and rests between two looks.
constexpr uint32_t kLeaseRestMs = 2;
constexpr std::chrono::milliseconds kFirstPause(10);
constexpr std::chrono::milliseconds kLongestPause(500);
// Timeout of the watcher's own attempts, because callers wait for them to end.
constexpr uint32_t kWatcherAttemptMs = 1000;

uint32_t MillisecondsUntil(LocalClock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - LocalClock::now());
  return static_cast<uint32_t>(std::clamp<int64_t>(left.count(), 0, UINT32_MAX));
}

// Returns true when the status means that the sidecar does not know the session, or that it has
// another version than this client, rather than that it cannot answer now.
bool IsFinal(pqc_status status) {
  return status == PQC_NOT_FOUND || status == PQC_UNAUTHENTICATED ||
         status == PQC_PERMISSION_DENIED || status == PQC_INVALID_ARGUMENT ||
         status == PQC_FAILED_PRECONDITION || status == PQC_UNIMPLEMENTED;
}

}  // namespace

LocalSession::LocalSession(std::shared_ptr<LocalLink> link, Resume resume, const Options& options)
    : resume_(std::move(resume)),
      timeout_ms_(options.timeout_ms),
      phase_(options.phase),
      workers_(options.workers),
      link_(std::move(link)) {
  staging_ =
      std::make_unique<Staging>(*this, options.staging_slot_bytes, options.staging_slot_count);
  watcher_ = std::thread([this] { Watch(); });
}

pqc_status LocalSession::Open(LocalLink::Parts parts, Resume resume, const Options& options,
                              std::shared_ptr<LocalSession>* session) {
  std::shared_ptr<LocalLink> link;
  RETURN_IF_ERROR(LocalLink::Make(std::move(parts), &link));
  session->reset(new LocalSession(std::move(link), std::move(resume), options));
  return PQC_OK;
}

LocalSession::~LocalSession() {
  Close();
  events_->Remove(new_worker_);
  events_->Remove(session_lost_);
}

void LocalSession::BeginClose() {
  closed_ = true;
  phase_->Set(Phase::kOver);
}

void LocalSession::Close() {
  if (ended_.exchange(true)) return;
  BeginClose();
  watcher_.join();
  link()->host().End();  // sequences that outlive the client keep this object alive
}

pqc_status LocalSession::ReportLost() const {
  const base::MutexLock lock(&mutex_);
  return Fail(PQC_UNAVAILABLE, "", "the session is lost, and its sequences with it: %s",
              why_lost_.c_str());
}

pqc_status LocalSession::Check() const {
  if (closed_) return Fail(PQC_FAILED_PRECONDITION, "client", "it is closed");
  if (lost()) return ReportLost();
  if (link()->CheckAlive()) return PQC_OK;
  return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "the sidecar's worker has ended"));
}

pqc_status LocalSession::CheckAttached() const {
  const pqc_status status = Check();
  if (status != PQC_UNAVAILABLE || lost()) return status;
  return SetRetry(kRetryConflict,
                  Fail(PQC_UNAVAILABLE, "",
                       "the sidecar's worker has ended, and no new worker has started yet"));
}

pqc_status LocalSession::Await() {
  std::shared_ptr<LocalLink> link;
  return Attached(&link);
}

pqc_status LocalSession::Attached(std::shared_ptr<LocalLink>* attached) {
  std::chrono::milliseconds pause = kFirstPause;
  LocalClock::time_point deadline = LocalClock::time_point::max();  // unknown until a wait begins
  for (;;) {
    if (closed_) return Fail(PQC_FAILED_PRECONDITION, "client", "it is closed");
    *attached = link();
    if ((*attached)->IsValid()) return PQC_OK;
    if (lost()) return ReportLost();
    if (deadline == LocalClock::time_point::max()) deadline = CallDeadline(timeout_ms_);
    bool again = false;
    const pqc_status status = Reattach(MillisecondsUntil(deadline), &again);
    if (status == PQC_OK) continue;
    const std::chrono::milliseconds left(MillisecondsUntil(deadline));
    if (!again || left.count() == 0) return status;
    phase_->Wait(Phase::kOver, static_cast<uint32_t>(std::min(pause, left).count()));
    pause = std::min(2 * pause, kLongestPause);
  }
}

pqc_status LocalSession::Reattach(uint32_t timeout_ms, bool* again) {
  *again = false;
  if (const auto old = link(); !old->IsValid()) {
    phase_->Set(Phase::kDetached);
    old->host().Abandon();  // calls in progress hold resources that a new link needs
  }
  const auto deadline = LocalClock::now() + std::chrono::milliseconds(timeout_ms);
  if (!attaching_.TryLockUntil(deadline)) {
    return SetRetry(kRetryMemory,
                    Fail(PQC_UNAVAILABLE, "",
                         "the sidecar's worker has ended, and no new worker has started in time"));
  }
  const base::HeldLock lock(&attaching_);
  if (link()->CheckAlive()) return PQC_OK;  // another thread was faster
  if (lost()) return ReportLost();
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - LocalClock::now()).count();
  LocalLink::Parts parts;
  pqc_status status = resume_(static_cast<uint32_t>(std::max<int64_t>(left, 1)), &parts);
  std::shared_ptr<LocalLink> resumed;
  if (status == PQC_OK) status = LocalLink::Make(std::move(parts), &resumed);
  if (status == PQC_OK) {
    Replace(std::move(resumed));
    return PQC_OK;
  }
  const std::string why = pqc_last_error();  // for people, inside of another text
  if (IsFinal(status)) {
    {
      const base::MutexLock own(&mutex_);
      why_lost_ = why;
    }
    lost_.store(true, std::memory_order_release);
    phase_->Set(Phase::kOver);
    events_->AddIfWanted(session_lost_);
    return ReportLost();
  }
  *again = true;
  return SetRetry(
      kRetryMemory,
      Fail(PQC_UNAVAILABLE, "",
           "the sidecar's worker has ended, and no new worker has started yet: %s", why.c_str()));
}

void LocalSession::Replace(std::shared_ptr<LocalLink> link) {
  const std::shared_ptr<LocalLink> kept = link;
  // The order matters: no check of a sequence passes with the new link and memory of the old one.
  ReleaseOldLinks(*kept);
  {
    const base::MutexLock lock(&mutex_);
    link_.swap(link);
  }
  phase_->Set(Phase::kAttached);
  events_->AddIfWanted(new_worker_);
  staging_->DropRing();
  ReleaseOldLinks(*kept);  // which a call in progress may have used once more
  std::function<void()> release;
  {
    const base::MutexLock lock(&sequences_mutex_);
    release = on_replaced_;
  }
  if (release) release();
}

// Sequences that are not in use must not keep the old memory mapped either.
void LocalSession::ReleaseOldLinks(const LocalLink& present) {
  const base::MutexLock lock(&sequences_mutex_);
  for (LocalSequence* sequence : sequences_) sequence->ReleaseOldLink(present);
}

void LocalSession::WatchLeases(const LocalLink& link) {
  // The order matters: a change after the look ends the wait.
  const uint32_t seen = link.wake_word();
  {
    const base::MutexLock lock(&sequences_mutex_);
    for (LocalSequence* sequence : sequences_) sequence->AddEvents();
  }
  if (phase_->Wait(Phase::kOver, kLeaseRestMs)) return;
  link.Wait(seen, LocalClock::now() + std::chrono::milliseconds(kWatchMs));
}

void LocalSession::Watch() {
  std::chrono::milliseconds pause = kFirstPause;
  while (!closed_ && !lost()) {
    if (const auto present = link(); present->CheckAlive()) {
      pause = kFirstPause;
      if (events_->wanted()) {
        WatchLeases(*present);
      } else {
        phase_->Wait(Phase::kOver, kWatchMs);
      }
      continue;
    }
    bool again = false;
    if (Reattach(kWatcherAttemptMs, &again) == PQC_OK) continue;
    phase_->Wait(Phase::kOver, static_cast<uint32_t>(pause.count()));
    pause = std::min(2 * pause, kLongestPause);
  }
}

void LocalSession::Add(LocalSequence& sequence) {
  const base::MutexLock lock(&sequences_mutex_);
  sequences_.insert(&sequence);
}

void LocalSession::Remove(LocalSequence& sequence) {
  const base::MutexLock lock(&sequences_mutex_);
  sequences_.erase(&sequence);
}

}  // namespace pqcached::client
