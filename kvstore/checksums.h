// Checksums of what no longer changes: rows of closed segments, codes of their ready layers.
//
// A thread of the store computes them some time after the bytes have become final, when the burst of rows
// that they came in is likely over (it would have to share the memory bus with them), and writes them down
// (record_table.h). In the store of the next process nothing that has one is read or leased before it was
// compared, once: what differs is kDataLoss from then on, and counted.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_CHECKSUMS_H_
#define PQCACHED_KVSTORE_CHECKSUMS_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "kvstore/cache.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"
#include "kvstore/sequence.h"

namespace pqcached::kvstore {

// ---- What stands in the slots.

struct RowSumsRecord {  // then uint32_t per head: CRC32C of its first `slot_count` rows
  uint64_t segment_id = 0;
  uint32_t slot_count = 0;
  uint32_t reserved = 0;
};
struct LayerSumsRecord {  // CRC32C of the whole content
  uint64_t segment_id = 0;
  uint32_t data = 0;
  uint32_t codebook = 0;
};

// Writes checksums of segments down.
class Checksums {
 public:
  Checksums();
  // Ends the work under way.
  ~Checksums() { Stop(); }
  Checksums(const Checksums&) = delete;
  Checksums& operator=(const Checksums&) = delete;
  void Stop();

  // From now on, of this sequence until it is dropped.
  void Add(std::shared_ptr<const Cache> cache, const std::shared_ptr<Sequence>& sequence);
  // Until there is nothing left to do: for tests.
  void WaitIdle();

 private:
  class Watcher;
  struct Job {
    std::shared_ptr<const Cache> cache;
    std::weak_ptr<Sequence> sequence;
    std::shared_ptr<Watcher> watcher;
    SteadyTime due;
  };
  static constexpr absl::Duration kDelay = absl::Milliseconds(50);
  struct Inbox {  // may be needed by watchers that outlive this
    Mutex mutex;
    CondVar changed;
    bool stop ABSL_GUARDED_BY(mutex) = false;
    bool busy ABSL_GUARDED_BY(mutex) = false;
    std::deque<Job> jobs ABSL_GUARDED_BY(mutex);  // by their times

    SteadyTime next_due() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
      return jobs.empty() ? SteadyTime::InfiniteFuture() : jobs.front().due;
    }
  };

  void Work();
  bool stopped() const;

  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
  std::thread worker_;
};

// Recovery: what `rows`, whose record has this number, is to be compared with. False when the checksums
// themselves have rotted.
bool ExpectRowSums(const Cache& cache, uint32_t number, const SegmentRows& rows);
// Likewise of a layer of an index.
bool ExpectLayerSums(const Cache& cache, uint32_t number, uint64_t segment_id, uint32_t layer_slot,
                     const SegmentIndex::Layer& layer);

// Compares what has not been compared yet. Errors: kDataLoss.
absl::Status VerifyRows(const Cache& cache, const SegmentRows& rows, uint32_t layer_slot);
absl::Status VerifyIndex(const Cache& cache, const SegmentRows& rows, const SegmentIndex& index,
                         uint32_t layer_slot);
// All of a list.
absl::Status VerifyList(const Cache& cache, const SegmentList& list);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_CHECKSUMS_H_
