// LocalSession: one client's session over mapped memory: control page, pools, staging ring, threads.
//
// Thread-safe. Outlives its client's handle while sequences or steps still point to it; what needs the
// host then fails.
#ifndef PQCACHED_CLIENT_LOCAL_SESSION_H_
#define PQCACHED_CLIENT_LOCAL_SESSION_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "client/local/host.h"
#include "client/local/mapping.h"
#include "client/local/staging.h"
#include "client/local/workers.h"
#include "kvstore/read/layout.h"
#include "pqcached/client.h"

namespace pqcached::client {

using LocalClock = std::chrono::steady_clock;

class LocalSession {
 public:
  struct Options {
    Workers::Options workers;
    uint64_t staging_slot_bytes = 0;  // 0 = the default
    uint32_t staging_slot_count = 0;
  };

  // boot_word: of the control page, as the session was opened.
  //
  // Errors: PQC_INTERNAL (the control memory is no such thing), PQC_FAILED_PRECONDITION (its layout is
  //         of another version), PQC_UNAVAILABLE (the worker is gone already)
  static pqc_status Open(std::unique_ptr<LocalHost> host, std::shared_ptr<Mapping> control,
                         uint64_t boot_word, const Options& options,
                         std::shared_ptr<LocalSession>* session);

  // No call of the host's begins any more; those under way must have ended.
  void Close();

  // PQC_UNAVAILABLE when the worker that wrote the memory is gone, or the session has ended: nothing
  // read since may be used.
  pqc_status Check() const;

  // Null, with the status, when the client is closed.
  pqc_status Host(LocalHost** host) const;
  // Of a cache; mapped at the first use.
  pqc_status Pool(uint64_t cache_id, std::shared_ptr<Mapping>* pool);
  Staging& staging() { return *staging_; }
  Workers& workers() { return workers_; }

  // PQC_INTERNAL when the sidecar named words that there are not.
  pqc_status Words(uint32_t index, const kvstore::LeaseWords** words) const;

  // The futex word that is raised with every change of the control memory. Wait returns when it is no
  // longer `seen`, at the deadline, or soon after the session has ended; what changed is to be looked
  // up then.
  uint32_t wake_word() const { return page().wake_word.load(std::memory_order_acquire); }
  void Wait(uint32_t seen, LocalClock::time_point deadline) const;

  void CountLease(int change) { lease_count_ += static_cast<uint64_t>(change); }
  uint64_t lease_count() const { return lease_count_; }
  uint64_t mapped_bytes() const { return mapped_bytes_; }

 private:
  LocalSession(std::unique_ptr<LocalHost> host, std::shared_ptr<Mapping> control,
               uint64_t boot_word, const Options& options);

  const kvstore::ControlPage& page() const {
    return *reinterpret_cast<const kvstore::ControlPage*>(control_->data());
  }

  std::unique_ptr<LocalHost> host_;
  std::atomic<bool> closed_ = false;
  const std::shared_ptr<Mapping> control_;  // shared as mappings are
  const uint64_t boot_word_;
  Workers workers_;
  std::unique_ptr<Staging> staging_;
  std::atomic<uint64_t> lease_count_ = 0;
  std::atomic<uint64_t> mapped_bytes_ = 0;

  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Mapping>> pools_;  // by cache; shared with images
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_SESSION_H_
