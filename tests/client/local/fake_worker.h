// FakeWorker is the sidecar's side of a client's mapped memory, written by a test: a control page
// with the words of leases, a pool, and the answers to Attach. A test changes words between two
// calls of the client, and even within an Attach. No store, no socket, no gRPC.
#ifndef PQCACHED_TESTS_CLIENT_LOCAL_FAKE_WORKER_H_
#define PQCACHED_TESTS_CLIENT_LOCAL_FAKE_WORKER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "client/local/link.h"
#include "client/local/session.h"

namespace pqcached::testing {

inline constexpr uint64_t kFakeCache = 3;
inline constexpr uint64_t kFakeSequence = 11;
inline constexpr uint32_t kFakeSlots = 128;    // of the only segment
inline constexpr uint32_t kFakeWordCount = 8;  // leases for which the control memory has words

// Returns an encoded attachment of kFakeSequence: one open segment with as many layers as there are
// counts, of one kv head and 128 bytes per row.
client::ImageBytes EncodeFakeImage(uint64_t version, std::vector<uint32_t> layer_tokens,
                                   uint64_t sequence_id = kFakeSequence);

class FakeWorker {
 public:
  explicit FakeWorker(uint64_t boot_word);
  FakeWorker(const FakeWorker&) = delete;
  FakeWorker& operator=(const FakeWorker&) = delete;

  uint64_t boot_word() const { return boot_word_; }
  // Returns the words of a lease, as the sidecar writes them. The page has room for more of them
  // than it announces.
  kvstore::LeaseWords& words(uint32_t index) const;
  // Grants a lease: the next Attach gets this id, these words and this image.
  void Grant(uint64_t lease_id, uint32_t word_index, uint32_t token_count,
             client::ImageBytes image);
  // Ends the session as a worker that goes on does: its boot word becomes 0.
  void End();
  // Ends the worker as the supervisor does: its memory is kept as long as the client's connection.
  void Die();
  // Notes that the next worker serves.
  void SetSucceeded();

  // Connects a client. The worker must outlive it.
  client::LocalLink::Parts Connect();
  // Returns the number of owners of the control memory beside the worker.
  long control_users() const { return control_.use_count() - 1; }

  client::AttachAnswer answer;              // of the next calls of Attach
  std::function<void()> during_attach;      // runs once, when the answer of Attach is on its way
  std::function<void()> before_refusal;     // runs once, in a call of Attach that is then refused
  int unavailable_attaches = 0;             // so many calls of Attach get UNAVAILABLE first
  std::vector<client::LeaseView> attached;  // leases that calls of Attach named
  std::vector<client::LeaseView> detached;  // leases that calls of Detach named
  std::atomic<int> connections = 0;         // that are open
  std::atomic<bool> connection_ended = false;  // as the client sees it
  std::atomic<bool> holds_connection = true;   // some process of the sidecar

 private:
  class Host;

  const uint64_t boot_word_;
  std::shared_ptr<client::Mapping> control_;  // shared, as all mappings are
  std::shared_ptr<client::Mapping> pool_;
};

// Opens a session with a worker. It resumes with the worker to which `next` points at that time;
// null means that there is none.
std::shared_ptr<client::LocalSession> OpenFakeSession(FakeWorker& first,
                                                      const std::atomic<FakeWorker*>& next);

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_LOCAL_FAKE_WORKER_H_
