// Checksums computes checksums of immutable bytes: rows of closed segments, and codes of their
// ready layers.
//
// A thread of the store computes them some time after the bytes become final. By then the burst of
// writes that the bytes belong to is likely over; during it, the thread would compete for memory
// bandwidth. The thread stores the checksums in the cache's records (checksum_record.h); the store
// of the next process verifies the bytes (verify.h).
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_CHECKSUM_CHECKSUMS_H_
#define PQCACHED_KVSTORE_CHECKSUM_CHECKSUMS_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "kernels/base/worker.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// Computes and records checksums of segments on its own thread.
class Checksums {
 public:
  Checksums() = default;
  // Stops the thread and waits for work in progress.
  ~Checksums() { Stop(); }
  Checksums(const Checksums&) = delete;
  Checksums& operator=(const Checksums&) = delete;
  void Stop();

  // Records checksums of this sequence until it is dropped.
  void Add(std::shared_ptr<const Cache> cache, const std::shared_ptr<Sequence>& sequence);
  // Waits until all work is done, or until the deadline. Returns false at the deadline.
  bool WaitIdle(SteadyTime deadline);

 private:
  class Watcher;
  static constexpr absl::Duration kDelay = absl::Milliseconds(50);
  struct Inbox {  // shared with watchers, which may outlive the Checksums object
    base::Worker worker{"pqc-checksums"};
    std::atomic<bool> stop = false;
    Mutex mutex;
    CondVar changed;
    int pending ABSL_GUARDED_BY(mutex) = 0;  // tasks that have not ended
  };

  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_CHECKSUM_CHECKSUMS_H_
