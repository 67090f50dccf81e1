// Sequence: the token stream of one request, as a row of snapshots.
//
// A *snapshot* is what a reader sees: segments and how many rows of each layer are visible. It
// never changes. A writer prepares memory that no snapshot shows, then publishes the next snapshot
// in one step; so readers never wait for writers, and a failed write leaves no trace.
//
// Slots come to be written again only after TruncateSequence, when older snapshots may still show
// them: ReadersBeyond tells the writer, who then moves the open segment to fresh memory.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_SEQUENCE_H_
#define PQCACHED_KVSTORE_SEQUENCE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/mutex.h"
#include "kvstore/segment.h"

namespace pqcached::kvstore {

struct SegmentList {
  std::vector<SegmentEntry> segments;  // without gap from position 0; only the last one may be open
  std::vector<IndexDescriptor> indexes;  // that every segment has
  bool prefill_closed = false;           // by the first BuildIndex

  bool tail_open() const { return !segments.empty() && !segments.back().closed; }
};

struct Snapshot {
  std::shared_ptr<const SegmentList> list;  // shared by successive snapshots
  std::vector<uint32_t> layer_tokens;       // visible rows, per layer slot
  // Set when the last reader is gone; outlives the snapshot, whose writer asks.
  std::shared_ptr<std::atomic<bool>> drained = std::make_shared<std::atomic<bool>>(false);

  Snapshot(std::shared_ptr<const SegmentList> segments, std::vector<uint32_t> tokens)
      : list(std::move(segments)), layer_tokens(std::move(tokens)) {}
  ~Snapshot() { drained->store(true, std::memory_order_release); }
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Tokens complete over all layers.
  uint32_t token_count() const;
  // Where the open tail begins; token_count() when there is none.
  uint32_t tail_begin() const;
};

class Sequence {
 public:
  Sequence(uint64_t sequence_id, std::string session, uint32_t layer_count);

  uint64_t sequence_id() const { return sequence_id_; }
  const std::string& session() const { return session_; }

  // The newest snapshot. Errors: kNotFound when dropped.
  absl::StatusOr<std::shared_ptr<const Snapshot>> Read() const;

  // Makes the caller the writer until EndWrite. Errors: kAborted when there is one, kNotFound when
  // dropped.
  absl::Status BeginWrite();
  void EndWrite();

  // Of the writer. Errors: kNotFound when dropped meanwhile.
  absl::Status Publish(std::shared_ptr<const Snapshot> next);
  // Of the writer: whether a reader still holds an older snapshot that shows rows beyond these.
  bool ReadersBeyond(const std::vector<uint32_t>& layer_tokens) const;

  // Lets go of all memory; what readers and a writer hold dies with them.
  void Drop();
  bool dropped() const { return dropped_.load(std::memory_order_acquire); }

 private:
  struct Superseded {
    std::vector<uint32_t> layer_tokens;
    std::shared_ptr<std::atomic<bool>> drained;
  };

  absl::Status DroppedError() const;

  const uint64_t sequence_id_;
  const std::string session_;
  std::atomic<bool> dropped_ = false;

  mutable Mutex mutex_;
  std::shared_ptr<const Snapshot> current_ ABSL_GUARDED_BY(mutex_);
  mutable std::vector<Superseded> superseded_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
};

// The right to write, while it lives.
class WriteLease {
 public:
  static absl::StatusOr<WriteLease> Take(std::shared_ptr<Sequence> sequence);
  WriteLease(WriteLease&&) = default;
  WriteLease& operator=(WriteLease&&) = delete;
  ~WriteLease() {
    if (sequence_ != nullptr) sequence_->EndWrite();
  }
  Sequence& sequence() const { return *sequence_; }

 private:
  explicit WriteLease(std::shared_ptr<Sequence> sequence) : sequence_(std::move(sequence)) {}
  std::shared_ptr<Sequence> sequence_;  // a writer may outlast a drop
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_H_
