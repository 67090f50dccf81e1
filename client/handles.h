// What the opaque handles of the C ABI point at.
#ifndef PQCACHED_CLIENT_HANDLES_H_
#define PQCACHED_CLIENT_HANDLES_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "client/error.h"
#include "client/remote.h"
#include "pqcached/client.h"

namespace pqcached::client {

struct RemoteCloser {
  void operator()(Remote* remote) const { remote->Close(); }
};

// A connection and its session. Null `remote`: the client is closed. Only pqc_client_close writes
// here, and it excludes all other calls by contract.
struct ClientState {
  std::unique_ptr<Remote, RemoteCloser> remote;
};

// Immutable.
struct CacheState {
  std::shared_ptr<ClientState> client;  // shared: the handles may be closed in any order
  uint64_t cache_id = 0;
  std::string model_fingerprint;
  std::map<uint32_t, LayerShape> stored_layers;
};

// Sets *remote, or fails when the client is closed.
inline pqc_status GetRemote(const ClientState& client, Remote** remote) {
  *remote = client.remote.get();
  return *remote ? PQC_OK : Fail(PQC_FAILED_PRECONDITION, "client: it is closed");
}

// Passes on what a Remote returned, and its reason.
inline pqc_status Report(pqc_status status, const ErrorText& error) {
  return status == PQC_OK ? PQC_OK : Fail(status, "%s", error.text);
}

}  // namespace pqcached::client

struct pqc_client {
  std::shared_ptr<pqcached::client::ClientState> state;  // shared with the caches opened on it
};

struct pqc_cache {
  std::shared_ptr<const pqcached::client::CacheState> state;  // shared with its sequences
};

struct pqc_sequence {
  std::shared_ptr<const pqcached::client::CacheState> cache;
  uint64_t sequence_id = 0;
  std::atomic<bool> changing = false;  // a call that changes the sequence is under way
};

namespace pqcached::client {

// Keeps other calls that change the sequence out for as long as it lives.
class ChangeLock {
 public:
  explicit ChangeLock(pqc_sequence& sequence)
      : sequence_(sequence), held_(!sequence.changing.exchange(true)) {}
  ~ChangeLock() {
    if (held_) sequence_.changing = false;
  }
  ChangeLock(const ChangeLock&) = delete;
  ChangeLock& operator=(const ChangeLock&) = delete;

  pqc_status status() const {
    return held_ ? PQC_OK
                 : Fail(PQC_ABORTED, "sequence: another thread is changing it; repeat later");
  }

 private:
  pqc_sequence& sequence_;
  const bool held_;
};

// Finds a layer whose rows are stored.
inline pqc_status FindLayer(const pqc_sequence& sequence, uint32_t layer, const char* name,
                            LayerShape* shape) {
  const auto found = sequence.cache->stored_layers.find(layer);
  if (found == sequence.cache->stored_layers.end()) {
    return Fail(PQC_INVALID_ARGUMENT, "%s: the cache stores no layer %u", name, layer);
  }
  *shape = found->second;
  return PQC_OK;
}

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_HANDLES_H_
