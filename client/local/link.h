// LocalLink: what a session has of one worker: its connection, its control memory, the pools that it
// shares.
//
// When the worker ends, the session goes on over another link (LocalSession). The old one stays until
// nobody reads the memory that came over it; then its connection is closed, which tells the sidecar so.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_LOCAL_LINK_H_
#define PQCACHED_CLIENT_LOCAL_LINK_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "client/local/host.h"
#include "client/local/mapping.h"
#include "kvstore/read/layout.h"
#include "pqcached/client.h"

namespace pqcached::client {

using LocalClock = std::chrono::steady_clock;

class LocalLink : public std::enable_shared_from_this<LocalLink> {
 public:
  // What a new connection brings.
  struct Parts {
    std::unique_ptr<LocalHost> host;
    std::shared_ptr<Mapping> control;  // shared as mappings are
    uint64_t boot_word = 0;            // of the control page, as the session was opened
  };

  // Errors: PQC_INTERNAL (the control memory is no such thing), PQC_FAILED_PRECONDITION (its layout is
  //         of another version), PQC_UNAVAILABLE (the worker is gone already)
  static pqc_status Make(Parts parts, std::shared_ptr<LocalLink>* link);

  uint64_t boot_word() const { return boot_word_; }
  LocalHost& host() const { return *host_; }
  const std::shared_ptr<Mapping>& control() const { return control_; }

  // False when the worker that wrote the memory is gone: nothing read since may be used. Does not ask
  // the kernel.
  bool Stands() const {
    return !ended_.load(std::memory_order_acquire) &&
           page().boot_word.load(std::memory_order_acquire) == boot_word_;
  }
  // Looks at the connection, too.
  bool Lives() const;
  // The same, for at most so long as it lives.
  bool LivesFor(uint32_t wait_ms) const;

  // Of a cache; mapped at the first use. It holds the link.
  pqc_status Pool(uint64_t cache_id, std::shared_ptr<Mapping>* pool);
  // PQC_INTERNAL when the sidecar named words that there are not.
  pqc_status Words(uint32_t index, const kvstore::LeaseWords** words) const;

  // The generation below which no call that names the slot is at work or will be taken; 0 when the
  // sidecar does not tell.
  uint64_t SlotGeneration(uint32_t slot) const;
  bool tells_of_slots(uint32_t slot_count) const { return page().slot_word_count >= slot_count; }

  // The futex word that is raised with every change of the control memory. Wait returns when it is no
  // longer `seen`, at the deadline, or soon after the worker has ended; what changed is to be looked up
  // then.
  uint32_t wake_word() const { return page().wake_word.load(std::memory_order_acquire); }
  void Wait(uint32_t seen, LocalClock::time_point deadline) const;

  uint64_t mapped_bytes() const { return mapped_bytes_; }

 private:
  explicit LocalLink(Parts parts);

  const kvstore::ControlPage& page() const {
    return *reinterpret_cast<const kvstore::ControlPage*>(control_->data());
  }

  const std::unique_ptr<LocalHost> host_;
  const std::shared_ptr<Mapping> control_;
  const uint64_t boot_word_;
  mutable std::atomic<bool> ended_ = false;  // the connection
  std::atomic<uint64_t> mapped_bytes_ = 0;
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Mapping>> pools_;  // by cache
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_LINK_H_
