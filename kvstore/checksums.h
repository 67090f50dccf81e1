// Checksums of immutable bytes: rows of closed segments, and codes of their ready layers.
//
// A thread of the store computes them some time after the bytes become final. By then the burst of
// writes that the bytes belong to is likely over; during it, the thread would compete for memory
// bandwidth. The thread stores the checksums in the cache's records (record_table.h). The store of
// the next process compares bytes that have a checksum once, before they are first read or leased;
// bytes that differ yield kDataLoss from then on, and are counted.
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

// ---- Content of the record slots.

struct RowChecksumsRecord {  // followed by uint32_t per head: CRC32C of its first `slot_count` rows
  uint64_t segment_id = 0;
  uint32_t slot_count = 0;
  uint32_t reserved = 0;
};
struct LayerChecksumsRecord {  // CRC32C of the whole content
  uint64_t segment_id = 0;
  uint32_t data = 0;
  uint32_t codebook = 0;
};

// Computes and records checksums of segments on its own thread.
class Checksums {
 public:
  Checksums();
  // Stops the thread and waits for work in progress.
  ~Checksums() { Stop(); }
  Checksums(const Checksums&) = delete;
  Checksums& operator=(const Checksums&) = delete;
  void Stop();

  // Records checksums of this sequence until it is dropped.
  void Add(std::shared_ptr<const Cache> cache, const std::shared_ptr<Sequence>& sequence);
  // Waits until all work is done. For tests.
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
  struct Inbox {  // shared with watchers, which may outlive the Checksums object
    Mutex mutex;
    CondVar changed;
    bool stop ABSL_GUARDED_BY(mutex) = false;
    bool busy ABSL_GUARDED_BY(mutex) = false;
    std::deque<Job> jobs ABSL_GUARDED_BY(mutex);  // ordered by due time

    SteadyTime next_due() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
      return jobs.empty() ? SteadyTime::InfiniteFuture() : jobs.front().due;
    }
  };

  void Work();
  bool stopped() const;

  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
  std::thread worker_;
};

// Sets the checksums that `rows`, stored in record `number`, are compared with. For recovery.
// Returns false when the checksum record itself is damaged.
bool LoadRowChecksums(const Cache& cache, uint32_t number, const SegmentRows& rows);
// Does the same for one layer of an index.
bool LoadLayerChecksums(const Cache& cache, uint32_t number, uint64_t segment_id,
                        uint32_t layer_slot, const SegmentIndex::Layer& layer);

// Verifies bytes that were not verified yet. Errors: kDataLoss.
absl::Status VerifyRows(const Cache& cache, const SegmentRows& rows, uint32_t layer_slot);
absl::Status VerifyIndex(const Cache& cache, const SegmentRows& rows, const SegmentIndex& index,
                         uint32_t layer_slot);
// Verifies all segments and indexes of a list.
absl::Status VerifyList(const Cache& cache, const SegmentList& list);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_CHECKSUMS_H_
