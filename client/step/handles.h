// State behind the opaque handles of the C ABI.
#ifndef PQCACHED_CLIENT_STEP_HANDLES_H_
#define PQCACHED_CLIENT_STEP_HANDLES_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/base/error.h"
#include "client/base/events.h"
#include "client/base/remote.h"
#include "client/local/sequence.h"
#include "client/local/session.h"
#include "kernels/base/exec.h"
#include "kernels/base/mutex.h"
#include "kernels/base/worker.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/layout.h"
#include "kvstore/read/scratch.h"
#include "pqcached/client.h"

namespace pqcached::client {

class DeviceLoads;
class Offload;
class Operations;
class Preparer;
class ReadBackend;
class Sender;
class StepPool;

struct RemoteCloser {
  void operator()(Remote* remote) const { remote->Close(); }
};

// Connection of a client and its session. A null `remote` means that the client is closed. Only
// pqc_client_close writes to this struct, and its contract excludes all concurrent calls.
struct ClientState {
  ClientState();
  ~ClientState();
  // Creates what sends and reads over `remote` and `local`.
  void Start();
  void Close();

  uint32_t timeout_ms = 0;
  // Instruction set of selection and attention in this process; benches and tests limit it.
  kernels::Exec exec;
  uint64_t max_message_bytes = 0;  // limit of the sidecar; 0 = unknown
  std::unique_ptr<Remote, RemoteCloser> remote;
  uint32_t remote_version = 0;  // of the library of `remote`, which may be older than this one
  std::shared_ptr<LocalSession> local;  // null on the remote path; shared with sequences
  std::unique_ptr<Sender> sender;       // sends rows of finished steps
  std::unique_ptr<Offload> offload;     // sends rows that a GPU packs
  // Runs asynchronous attentions, for which a step waits later, each on all of the workers of
  // `local`.
  base::Worker step_worker{"pqc-step"};
  const std::unique_ptr<StepPool> steps;
  kvstore::ReadScratchPool scratch;
  std::unique_ptr<ReadBackend> reads;  // of the client's path
  std::unique_ptr<Preparer> preparer;  // RPCs that calls need and do not wait for
  std::shared_ptr<Events> events;      // shared with operations and the session
  std::unique_ptr<Operations> operations;
  base::Mutex device_loads_mutex;
  // Made by the first use of a GPU; shared with loads (client/gpu/load.h).
  std::shared_ptr<DeviceLoads> device_loads PQCACHED_GUARDED_BY(device_loads_mutex);
};

// Immutable.
struct CacheState {
  std::shared_ptr<ClientState> client;  // shared, because handles may be closed in any order
  uint64_t cache_id = 0;
  std::string model_fingerprint;
  kvstore::IndexDescriptor default_index;
  std::map<uint32_t, LayerShape> stored_layers;
  std::map<uint32_t, uint32_t> windows;  // window_tokens of the layers of kind window
  bool has_indexed_layers = false;       // a layer is of kind selected
};

// Progress of what a Preparer does for a sequence.
struct Preparation {
  base::Mutex mutex;
  bool running PQCACHED_GUARDED_BY(mutex) = false;
  // Failure of the last one, until a call has returned it.
  pqc_status status PQCACHED_GUARDED_BY(mutex) = PQC_OK;
  std::unique_ptr<RefusalBuffer> refusal PQCACHED_GUARDED_BY(mutex);
  // When the last one began that closed the prefill.
  DeadlineClock::time_point closed_at PQCACHED_GUARDED_BY(mutex);
  // On the remote path: when the last one ended that asked for the number of tokens, and how often
  // this client has shortened the sequence, which an older answer does not know.
  DeadlineClock::time_point described_at PQCACHED_GUARDED_BY(mutex);
  uint64_t shortenings PQCACHED_GUARDED_BY(mutex) = 0;
};

// End positions of the layers whose rows this client has ingested one by one.
class IngestedLayers {
 public:
  // Records the end of a layer's rows. Returns the end of the shortest of the cache's layers, or 0
  // while some of them have not been ingested.
  uint64_t Add(const CacheState& cache, uint32_t layer, uint64_t end) {
    const base::MutexLock lock(&mutex_);
    uint64_t& known = ends_[layer];
    known = std::max(known, end);
    if (ends_.size() < cache.stored_layers.size()) return 0;
    for (const auto& [other, other_end] : ends_) end = std::min(end, other_end);
    return end;
  }
  // Forgets all ends, because rows are removed.
  void Clear() {
    const base::MutexLock lock(&mutex_);
    ends_.clear();
  }

 private:
  base::Mutex mutex_;
  std::map<uint32_t, uint64_t> ends_ PQCACHED_GUARDED_BY(mutex_);
};

// State of a sequence, shared by its handle, the steps that contain it, and its unacknowledged
// rows.
struct SequenceState {
  std::shared_ptr<const CacheState> cache;
  uint64_t sequence_id = 0;
  std::unique_ptr<LocalSequence> local;  // null on the remote path
  std::atomic<bool> changing = false;    // a call that changes the sequence is in progress
  std::atomic<bool> in_step = false;
  std::atomic<bool> suspended = false;    // suspended by this client
  std::atomic<uint64_t> token_count = 0;  // complete over all layers, from the last answer
  IngestedLayers ingested;
  kvstore::IndexDescriptor live_index;  // index that the sidecar updates incrementally; flat = none
  // The sidecar may index the newest rows only when the prefill is closed, or only when its work on
  // the index is tried again: the next step that selects by the index calls ClosePrefill.
  std::atomic<bool> prefill_open = false;
  Preparation preparation;

  // Records that rows of one layer are stored up to `end`.
  void AddIngested(uint32_t layer, uint64_t end) {
    token_count = std::max(token_count.load(), ingested.Add(*cache, layer, end));
  }
  void SetTruncated(uint64_t tokens) {
    ingested.Clear();
    const base::MutexLock lock(&preparation.mutex);
    ++preparation.shortenings;
    token_count = tokens;
  }
  // Records an answer about the sequence's tokens that came while other calls ran: `shortenings` is
  // the number of them before the question.
  void SetDescribed(uint64_t tokens, uint64_t shortenings) {
    const base::MutexLock lock(&preparation.mutex);
    if (preparation.shortenings != shortenings) return;
    token_count = std::max(token_count.load(), tokens);
    preparation.described_at = DeadlineClock::now();
  }
  void OpenPrefill() { prefill_open = kvstore::NeedsBuild(live_index); }
};

// Sets *remote, or fails when the client is closed.
inline pqc_status FindRemote(const ClientState& client, Remote** remote) {
  *remote = client.remote.get();
  return *remote ? PQC_OK : Fail(PQC_FAILED_PRECONDITION, "client", "it is closed");
}

// Checks, without waiting, that a worker serves the session, as far as this client knows.
// REQUIRES: client.remote.
//
// Errors: PQC_UNAVAILABLE
inline pqc_status CheckServed(const ClientState& client) {
  if (client.local) return client.local->CheckAttached();
  RefusalBuffer error;
  return Report(client.remote->CheckConnected(&error), error);
}

// Like FindRemote, but also waits for a worker when the session has none.
inline pqc_status GetRemote(const ClientState& client, Remote** remote) {
  const pqc_status status = FindRemote(client, remote);
  return status == PQC_OK && client.local ? client.local->Await() : status;
}

// Finds the path by which the sequence's client reads; waits for a worker when there is none.
inline pqc_status GetReads(const SequenceState& state, ReadBackend** reads) {
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*state.cache->client, &remote); status != PQC_OK) {
    return status;
  }
  *reads = state.cache->client->reads.get();
  return PQC_OK;
}

}  // namespace pqcached::client

struct pqc_client {
  std::shared_ptr<pqcached::client::ClientState> state;  // shared with the caches opened on it
};

struct pqc_cache {
  std::shared_ptr<const pqcached::client::CacheState> state;  // shared with its sequences
};

struct pqc_sequence {
  // Whether the sequence is reserved for changes by calls on this handle: for none of them, for the
  // next one, which ends the reservation, or for all of them. Not kNone only in the handle of an
  // operation's own.
  enum class Reserved { kNone, kNextCall, kAllCalls };

  // shared with steps, operations and unacknowledged rows
  std::shared_ptr<pqcached::client::SequenceState> state;
  Reserved reserved = Reserved::kNone;
};

namespace pqcached::client {

// Reserves a sequence for one call that changes it.
inline pqc_status ReserveChange(SequenceState& sequence) {
  if (!sequence.changing.exchange(true)) return PQC_OK;
  return SetRetry(kRetryConflict,
                  Fail(PQC_ABORTED, "sequence", "another thread is changing it; repeat later"));
}

// Excludes other calls that change the sequence for as long as the lock lives. A reservation of the
// handle takes the place of the lock's own (pqc_sequence::Reserved).
class ChangeLock {
 public:
  explicit ChangeLock(SequenceState& sequence)
      : sequence_(sequence), status_(ReserveChange(sequence)), held_(status_ == PQC_OK) {}
  explicit ChangeLock(pqc_sequence& handle)
      : sequence_(*handle.state),
        was_reserved_(handle.reserved != pqc_sequence::Reserved::kNone),
        status_(was_reserved_ ? PQC_OK : ReserveChange(sequence_)),
        held_(status_ == PQC_OK && handle.reserved != pqc_sequence::Reserved::kAllCalls) {
    if (held_) handle.reserved = pqc_sequence::Reserved::kNone;
  }
  ~ChangeLock() {
    if (held_) sequence_.changing = false;
  }
  ChangeLock(const ChangeLock&) = delete;
  ChangeLock& operator=(const ChangeLock&) = delete;

  pqc_status status() const { return status_; }
  // Returns whether the handle's reservation took the place of the lock: no step has the sequence.
  bool was_reserved() const { return was_reserved_; }

 private:
  SequenceState& sequence_;
  const bool was_reserved_ = false;
  const pqc_status status_;
  const bool held_;
};

// Precondition of a call that changes a sequence: no other such call and no step is in progress,
// and the rows of finished steps are stored. Rows that a GPU packs are stored too (kStored), or at
// least none of them has failed (kMayBePending).
class ChangeScope {
 public:
  enum class Packed { kStored, kMayBePending };
  explicit ChangeScope(pqc_sequence* sequence, Packed packed = Packed::kStored);

  pqc_status status() const { return status_; }
  // REQUIRES: status() == PQC_OK.
  Remote& remote() const { return *remote_; }

 private:
  ChangeLock lock_;
  Remote* remote_ = nullptr;
  pqc_status status_ = PQC_OK;
};

// Finds a layer that the cache stores.
inline pqc_status FindLayer(const CacheState& cache, uint32_t layer, const char* name,
                            LayerShape* shape) {
  const auto found = cache.stored_layers.find(layer);
  if (found == cache.stored_layers.end()) {
    return Fail(PQC_INVALID_ARGUMENT, name, "the cache stores no layer %u", layer);
  }
  *shape = found->second;
  return PQC_OK;
}

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_HANDLES_H_
