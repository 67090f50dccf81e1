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

#include "client/handles.h"
#include "kvstore/store.h"
#include "pqcached/client.hpp"

namespace pqcached::testing {

inline constexpr char kTestTenant[] = "tenant";

// What the tests steer, and see.
struct Sidecar {
  explicit Sidecar(const kvstore::StoreOptions& options);

  std::unique_ptr<kvstore::Store> store;
  const std::string session = "client#1";
  std::atomic<bool> ended = false;             // the broker's connection
  std::atomic<int> unavailable_appends = 0;    // so many Appends get UNAVAILABLE first
  std::atomic<int> lost_answers = 0;           // so many Appends are done, and yet UNAVAILABLE
  std::atomic<uint64_t> calls = 0;             // that somebody waited for
  std::atomic<uint64_t> background_calls = 0;  // and that nobody did
  std::atomic<uint64_t> commits = 0;

  // Appends wait while it is closed.
  void CloseGate();
  void OpenGate();
  void PassGate();

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool closed_ = false;
};

kvstore::StoreOptions SmallSegments();

// Over the local path. The sidecar outlives it.
Client OpenStoreClient(Sidecar& sidecar, const client::Workers::Options& workers = {},
                       uint32_t timeout_ms = 10000);

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_LOCAL_STORE_CLIENT_H_
