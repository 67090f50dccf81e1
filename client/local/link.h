// LocalLink is a session's connection to one worker, with the worker's control memory and the pools
// that it shares.
//
// When the worker ends, the session continues over another link (LocalSession). The old link lives
// until its memory has no readers; then its connection is closed, which notifies the sidecar.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_LOCAL_LINK_H_
#define PQCACHED_CLIENT_LOCAL_LINK_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>

#include "client/local/host.h"
#include "client/local/mapping.h"
#include "kernels/base/mutex.h"
#include "kvstore/read/layout.h"
#include "pqcached/client.h"

namespace pqcached::client {

using LocalClock = std::chrono::steady_clock;

class LocalLink : public std::enable_shared_from_this<LocalLink> {
 public:
  // Parts of a new connection.
  struct Parts {
    std::unique_ptr<LocalHost> host;
    std::shared_ptr<Mapping> control;  // shared, as all mappings are
    uint64_t boot_word = 0;            // value in the control page when the session was opened
  };

  // Errors: PQC_INTERNAL (invalid control memory), PQC_FAILED_PRECONDITION (other layout version),
  //         PQC_UNAVAILABLE (the worker has already ended)
  static pqc_status Make(Parts parts, std::shared_ptr<LocalLink>* link);

  uint64_t boot_word() const { return boot_word_; }
  LocalHost& host() const { return *host_; }
  const std::shared_ptr<Mapping>& control() const { return control_; }

  // Returns false when the worker that wrote the memory has ended: data read since then must not be
  // used. Makes no system call.
  bool IsValid() const {
    return !ended_.load(std::memory_order_acquire) &&
           page().boot_word.load(std::memory_order_acquire) == boot_word_;
  }
  // Like IsValid, but also checks the connection.
  bool CheckAlive() const;
  // Like CheckAlive, but waits up to `wait_ms` for an end of the connection.
  bool WaitWhileAlive(uint32_t wait_ms) const;

  // State of the memory that was received over this link.
  enum class Memory {
    kServed,     // by its worker
    kKept,       // its worker has ended, and nothing changes it
    kSucceeded,  // the same, and the next worker serves, which knows its sequences
    kGone,       // it may be reused: data read from it must not be used
  };
  // Returns the state; makes system calls. What was read before the call is as old as the state.
  Memory CheckMemory() const;

  // Returns a cache's pool, mapped at the first use. The pool keeps the link alive.
  pqc_status Pool(uint64_t cache_id, std::shared_ptr<Mapping>* pool);
  // Implements Mapping::HoldPages of a pool: asks the sidecar once. PQC_UNAVAILABLE after the
  // worker's end.
  pqc_status HoldPool(uint64_t cache_id);
  // Finds the words of a lease; PQC_INTERNAL when the sidecar named an index out of range.
  pqc_status Words(uint32_t index, const kvstore::LeaseWords** words) const;

  // Returns the slot's completed generation: calls that name the slot with a smaller generation are
  // not in flight and will not be accepted. 0 when the sidecar has no word for the slot.
  uint64_t SlotGeneration(uint32_t slot) const;
  bool has_slot_words(uint32_t slot_count) const { return page().slot_word_count >= slot_count; }

  // Futex word that is increased with every change of the control memory. Wait returns when the
  // word differs from `seen`, at the deadline, or soon after the worker has ended; the caller then
  // checks what has changed.
  uint32_t wake_word() const { return page().wake_word.load(std::memory_order_acquire); }
  void Wait(uint32_t seen, LocalClock::time_point deadline) const;

  uint64_t mapped_bytes() const { return mapped_bytes_; }

 private:
  explicit LocalLink(Parts parts);

  // Null in memory that is too small for it.
  const kvstore::WorkerEnd* worker_end() const;
  const kvstore::ControlPage& page() const {
    return *reinterpret_cast<const kvstore::ControlPage*>(control_->data());
  }

  const std::unique_ptr<LocalHost> host_;
  const std::shared_ptr<Mapping> control_;
  const uint64_t boot_word_;
  mutable std::atomic<bool> ended_ = false;  // the connection has ended
  std::atomic<uint64_t> mapped_bytes_ = 0;
  base::Mutex mutex_;
  // By cache id.
  std::map<uint64_t, std::shared_ptr<Mapping>> pools_ PQCACHED_GUARDED_BY(mutex_);
  std::map<uint64_t, pqc_status> holds_ PQCACHED_GUARDED_BY(mutex_);  // answers to HoldPool
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_LINK_H_
