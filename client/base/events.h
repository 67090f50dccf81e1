// Events of one client that its engine has not taken yet, and the descriptor that is readable while
// there are any.
//
// Each subject (an operation, a sequence, the session) owns its entries, and an entry is pending at
// most once. So events of one subject coalesce, their memory is bounded by the subjects, and adding
// one neither allocates nor fails.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_BASE_EVENTS_H_
#define PQCACHED_CLIENT_BASE_EVENTS_H_

#include <atomic>
#include <cstdint>
#include <list>

#include "kernels/base/mutex.h"
#include "pqcached/client.h"
#include "pqcached/operation.h"

namespace pqcached::client {

class Events {
 public:
  // An event that may occur repeatedly. The owner calls Remove before its end.
  class Entry {
   public:
    explicit Entry(pqc_event_kind kind, uint64_t sequence_id = 0)
        : node_(1, this), place_(node_.begin()) {
      event_.kind = kind;
      event_.sequence_id = sequence_id;
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

    // Sets the operation that the event names. REQUIRES: not added yet.
    void SetOperation(pqc_operation* operation, void* context) {
      event_.operation = operation;
      event_.context = context;
    }

   private:
    friend class Events;
    pqc_event event_{};
    // Its node, in this list while the entry is not pending; guarded by the mutex of Events.
    std::list<Entry*> node_;
    const std::list<Entry*>::iterator place_;
  };

  Events() = default;
  ~Events() { Close(); }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  // Opens the descriptor at the first call, and sets *fd to it. From then on events are wanted.
  //
  // Errors: PQC_RESOURCE_EXHAUSTED  the process has no descriptor left
  pqc_status Open(int* fd);
  // Returns whether events are wanted of subjects that are watched only on demand.
  bool wanted() const { return wanted_.load(std::memory_order_acquire); }

  void Add(Entry& entry);
  void AddIfWanted(Entry& entry) {
    if (wanted()) Add(entry);
  }
  void Remove(Entry& entry);
  // Takes the oldest event; returns false when there is none.
  bool Take(pqc_event* event);

  // Closes the descriptor, and drops the events and those that follow.
  void Close();

 private:
  // Moves the entry's node back to it.
  void TakeBackLocked(Entry& entry) PQCACHED_REQUIRES(mutex_);
  void SetReadableLocked(bool readable) PQCACHED_REQUIRES(mutex_);

  std::atomic<bool> wanted_ = false;
  base::Mutex mutex_;
  int fd_ PQCACHED_GUARDED_BY(mutex_) = -1;
  bool closed_ PQCACHED_GUARDED_BY(mutex_) = false;
  std::list<Entry*> pending_ PQCACHED_GUARDED_BY(mutex_);
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_EVENTS_H_
