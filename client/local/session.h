// LocalSession is one client's session over mapped memory: its link to the worker, its staging ring
// and its threads.
//
// A session outlives workers. When a worker ends, readers of its memory fail with PQC_UNAVAILABLE;
// the session is resumed with the next worker, by the next call or by the session's own thread,
// whichever is first. Sequence ids stay valid; leases and staging do not: sequences release them
// and attach again. A session that the sidecar does not know any more is lost for good.
//
// Thread-safe. Outlives its client's handle while sequences or steps refer to it; operations that
// need the host then fail.
#ifndef PQCACHED_CLIENT_LOCAL_SESSION_H_
#define PQCACHED_CLIENT_LOCAL_SESSION_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "client/base/events.h"
#include "client/local/link.h"
#include "client/local/staging.h"
#include "client/local/workers.h"
#include "kernels/base/mutex.h"
#include "pqcached/client.h"

namespace pqcached::client {

class LocalSequence;

// Phase of a session, which others can wait for. Thread-safe.
class SessionPhase {
 public:
  enum class Phase { kAttached, kDetached, kOver };  // kOver: closed or lost, for good

  void Set(Phase phase) {
    {
      const base::MutexLock lock(&mutex_);
      if (phase_ == Phase::kOver || phase_ == phase) return;
      phase_ = phase;
    }
    changed_.SignalAll();
  }
  // Waits until the phase is at least `least` or the time is over; returns true if the phase is
  // reached.
  bool Wait(Phase least, uint32_t wait_ms) const {
    const base::MutexLock lock(&mutex_);
    return changed_.WaitFor(&mutex_, std::chrono::milliseconds(wait_ms),
                            [&]() PQCACHED_REQUIRES(mutex_) { return phase_ >= least; });
  }

 private:
  mutable base::Mutex mutex_;
  mutable base::CondVar changed_;
  Phase phase_ PQCACHED_GUARDED_BY(mutex_) = Phase::kAttached;
};

class LocalSession {
 public:
  // Resumes the session with the present worker. PQC_NOT_FOUND and other errors about the request
  // mean that the session does not exist any more, PQC_FAILED_PRECONDITION that the sidecar has
  // another version; errors about the present moment do not.
  using Resume = std::function<pqc_status(uint32_t timeout_ms, LocalLink::Parts* parts)>;

  struct Options {
    Workers::Options workers;
    uint64_t staging_slot_bytes = 0;  // 0 = the default
    uint32_t staging_slot_count = 0;
    uint32_t timeout_ms = 10000;          // timeout of a call
    std::shared_ptr<SessionPhase> phase;  // shared with the Remote; never null
  };

  // Errors: as LocalLink::Make
  static pqc_status Open(LocalLink::Parts parts, Resume resume, const Options& options,
                         std::shared_ptr<LocalSession>* session);
  ~LocalSession();

  // Ends the waits for a worker: calls fail that begin or wait from now on.
  void BeginClose();
  // Ends the session: no call of the host begins any more. REQUIRES: calls in progress have ended.
  void Close();

  // Returns PQC_UNAVAILABLE when the worker whose memory was read has ended: data read since then
  // must not be used.
  pqc_status Check() const;

  // Like Check, but for a call that begins: says that the call may be repeated.
  pqc_status CheckAttached() const;

  // Returns the link to a worker that lives, as far as is known; waits for one at most as long as
  // the thread's call may wait.
  //
  // Errors: PQC_UNAVAILABLE (not in time; or the session is lost), PQC_FAILED_PRECONDITION (closed)
  pqc_status Attached(std::shared_ptr<LocalLink>* link);
  // Like Attached, for callers that need no link. Fast when the session is attached.
  pqc_status Await();
  // Returns the present link, whatever its state.
  std::shared_ptr<LocalLink> link() const {
    const base::MutexLock lock(&mutex_);
    return link_;
  }
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  bool lost() const { return lost_.load(std::memory_order_acquire); }

  // Sets what is called when the session goes on with another worker: it releases the memory of
  // former ones. Called before the session has other users of such memory.
  void OnReplaced(std::function<void()> release) {
    const base::MutexLock lock(&sequences_mutex_);
    on_replaced_ = std::move(release);
  }

  // Returns the client's events. The session adds those about itself and its sequences once they
  // are wanted.
  const std::shared_ptr<Events>& events() const { return events_; }
  // Adds the event of a session that was lost before events were wanted.
  void AddEarlierEvents() {
    if (lost()) events_->Add(session_lost_);
  }

  Staging& staging() { return *staging_; }
  Workers& workers() { return workers_; }

  // Refer to the present link (LocalLink::Wait).
  uint32_t wake_word() const { return link()->wake_word(); }
  void Wait(uint32_t seen, LocalClock::time_point deadline) const { link()->Wait(seen, deadline); }

  void CountLease(int change) { lease_count_ += static_cast<uint64_t>(change); }
  uint64_t lease_count() const { return lease_count_; }
  uint64_t mapped_bytes() const { return link()->mapped_bytes(); }

  // Registers a sequence that holds memory of a link, to be notified when the link is replaced.
  void Add(LocalSequence& sequence);
  void Remove(LocalSequence& sequence);

 private:
  LocalSession(std::shared_ptr<LocalLink> link, Resume resume, const Options& options);

  // Makes one attempt to get a live link, when there is none. *again: another attempt may succeed.
  pqc_status Reattach(uint32_t timeout_ms, bool* again);
  void Replace(std::shared_ptr<LocalLink> link) PQCACHED_REQUIRES(attaching_);
  // Has all sequences release the memory of other links.
  void ReleaseOldLinks(const LocalLink& present);
  pqc_status ReportLost() const;
  // Adds events about leases, and waits for changes of the link's words, at most a while.
  void WatchLeases(const LocalLink& link);
  void Watch();

  const Resume resume_;
  const uint32_t timeout_ms_;
  const std::shared_ptr<SessionPhase> phase_;
  Workers workers_;
  std::unique_ptr<Staging> staging_;
  const std::shared_ptr<Events> events_ = std::make_shared<Events>();  // shared with the client
  Events::Entry new_worker_{PQC_EVENT_NEW_WORKER};
  Events::Entry session_lost_{PQC_EVENT_SESSION_LOST};
  std::atomic<bool> closed_ = false;
  std::atomic<bool> ended_ = false;
  std::atomic<bool> lost_ = false;
  std::atomic<uint64_t> lease_count_ = 0;

  // Held for one attempt at a time.
  base::TimedMutex attaching_ PQCACHED_ACQUIRED_BEFORE(mutex_, sequences_mutex_);
  mutable base::Mutex mutex_;
  // Shared with readers of its memory.
  std::shared_ptr<LocalLink> link_ PQCACHED_GUARDED_BY(mutex_);
  std::string why_lost_ PQCACHED_GUARDED_BY(mutex_);
  base::Mutex sequences_mutex_;
  std::set<LocalSequence*> sequences_ PQCACHED_GUARDED_BY(sequences_mutex_);
  std::function<void()> on_replaced_ PQCACHED_GUARDED_BY(sequences_mutex_);
  std::thread watcher_;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_SESSION_H_
