// A client of the C ABI whose sidecar is a store in this process: mapped memory as on a host, and
// calls in place of RPCs that fail or wait on demand. No daemon, no gRPC.
#ifndef PQCACHED_TESTS_CLIENT_LOCAL_STORE_CLIENT_H_
#define PQCACHED_TESTS_CLIENT_LOCAL_STORE_CLIENT_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "client/step/handles.h"
#include "kvstore/store.h"
#include "pqcached/client.hpp"

namespace pqcached::testing {

inline constexpr char kTestTenant[] = "tenant";

// What the tests steer, and see.
struct Sidecar {
  explicit Sidecar(const kvstore::StoreOptions& options);

  std::unique_ptr<kvstore::Store> store;
  const std::string session = "client#1";
  std::atomic<uint64_t> boot_word = 77;
  std::atomic<bool> ended = false;              // the broker's connection
  std::atomic<bool> reachable = true;           // false: nobody is there to resume with
  std::atomic<bool> knows_session = true;       // false: it cannot be resumed
  std::atomic<bool> has_other_version = false;  // of the broker's protocol, when it is resumed
  std::atomic<int> connections = 0;             // that are open
  std::atomic<int> unavailable_appends = 0;     // so many Appends get UNAVAILABLE first
  std::atomic<int> lost_answers = 0;            // so many Appends are done, and yet UNAVAILABLE
  std::atomic<uint64_t> calls = 0;              // by threads inside a call of the C ABI
  std::atomic<uint64_t> background_calls = 0;   // by other threads
  std::atomic<uint64_t> closed_prefills = 0;    // calls of ClosePrefill
  std::atomic<uint64_t> builds = 0;             // calls of BuildIndex
  std::atomic<uint64_t> commits = 0;
  std::atomic<uint64_t> staged_appends = 0;  // items of Append whose rows came by staging
  std::atomic<uint64_t> inline_appends = 0;  // and whose rows did not
  std::atomic<bool> refuse_staging = false;  // of Append
  std::atomic<int> unanswered_appends = 0;   // so many Appends hold their slots, done with or not,
                                             // until LetGoOfSlots, and get UNAVAILABLE

  // What a client sees of a worker's end: its control memory says so, and leases and staging are gone.
  void EndWorker();
  // The same of a worker that is killed: what the client has mapped stays as it is. REQUIRES: the
  // store has a keeper.
  void KillWorker();
  // And of the next one: it can be resumed with.
  void StartWorker();
  // Keeps the control memory of the present worker's session.
  void KeepControl(kvstore::FileDescriptor control);
  // Under which the store knows leases and staging of the present worker.
  std::string local_session() const { return session + "-" + std::to_string(boot_word); }

  // Appends wait while it is closed, and ingests and builds of the client's own threads.
  void CloseGate();
  void OpenGate();
  void PassGate();

  void HoldSlots(std::vector<kvstore::StagedBytes> slots);
  // The slots as they are now, and nobody holds them any more.
  std::vector<std::vector<std::byte>> LetGoOfSlots();

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool closed_ = false;
  kvstore::FileDescriptor control_;  // invalid without a keeper
  std::vector<kvstore::StagedBytes> held_;
  std::vector<kvstore::StagedBytes> ended_rings_;  // a slot of each ring of a worker that has ended
};

kvstore::StoreOptions SmallSegments();

// Over the local path. The sidecar outlives it. The handle is the caller's to adopt or to close.
pqc_client* OpenStoreHandle(Sidecar& sidecar, const client::Workers::Options& workers = {},
                            uint32_t timeout_ms = 10000);
Client OpenStoreClient(Sidecar& sidecar, const client::Workers::Options& workers = {},
                       uint32_t timeout_ms = 10000);

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_LOCAL_STORE_CLIENT_H_
