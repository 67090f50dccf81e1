// Sequence: the token stream of one request, as a series of snapshots.
//
// A *snapshot* is a reader's view: segments, and the number of visible rows of each layer. It never
// changes. A writer prepares memory that no snapshot shows, then publishes the next snapshot in one
// step. Readers therefore never wait for writers, and a failed write leaves no trace.
//
// Changes are made by:
//   a writer          (one at a time, WriteLease) the tokens: rows after the visible ones, the
//                     active segment, closing it and opening the next one, truncation
//   background work   (any number) the representation of closed segments: ReplaceSegments replaces
//                     them, PublishIndex adds codes. Never tokens, never the active segment
// Each publishes on top of the other's newest snapshot.
//
// Slots are overwritten only after a truncation, when older snapshots, sequences that share the
// active segment (the tail), or leases may still show them. HasReadersBeyond reports this to the
// writer, which then moves the active segment to fresh memory.
//
// Thread-safe. Two locks: events_mutex_ orders changes and the notifications of watchers, and may
// be held while mutex_ (which guards the newest snapshot) is acquired; readers acquire mutex_
// alone.
#ifndef PQCACHED_KVSTORE_SEQUENCE_SEQUENCE_H_
#define PQCACHED_KVSTORE_SEQUENCE_SEQUENCE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"
#include "kvstore/sequence/holds.h"
#include "kvstore/sequence/query_samples.h"
#include "kvstore/sequence/segment.h"
#include "kvstore/values.h"

namespace pqcached::kvstore {

class SequenceRecord;

// Records whether the part of an active segment that a snapshot or a sharing sequence shows is
// still in use.
struct ActiveSegmentView {
  std::vector<uint32_t> layer_tokens;  // visible tokens per layer slot
  const SegmentRows* tail = nullptr;   // the open segment; null if there was none
  // True when no reader uses the view any more.
  std::atomic<bool> drained = false;
};

// Protects the rows of an open segment below the given token counts, for as long as `pin` lives.
struct PinnedActiveSegment {
  std::shared_ptr<const ActiveSegmentView> view;
  std::shared_ptr<const void> pin;
};
PinnedActiveSegment PinActiveSegment(std::vector<uint32_t> layer_tokens, const SegmentRows* tail);

// A sequence's share of a segment. Held by every list that contains the segment.
class SegmentUse {
 public:
  // `tail`: set for a segment that was still written by the sequence it is shared with. Of an open
  // one it is a pin: slots below its layer_tokens are not overwritten while this object or a copy
  // of `tail` lives.
  SegmentUse(std::shared_ptr<const SegmentRows> rows, std::shared_ptr<const void> tail);
  ~SegmentUse();
  SegmentUse(const SegmentUse&) = delete;
  SegmentUse& operator=(const SegmentUse&) = delete;

  const std::shared_ptr<const void>& tail() const { return tail_; }

 private:
  std::shared_ptr<const SegmentRows> rows_;
  std::shared_ptr<const void> tail_;
};

// List of a sequence's segments. Immutable, so its address is its version.
struct SegmentList {
  // Contiguous from position 0; only the last segment may be open.
  std::vector<SegmentEntry> segments;
  std::vector<IndexDescriptor> indexes;  // in any state; see index_ready
  // Set by ClosePrefill, by the first BuildIndex, or when the first decoded token is appended.
  bool prefill_closed = false;
  // Per layer slot, or empty; null where the layer has none.
  std::vector<std::shared_ptr<const QuerySamples>> samples;
  // [indexes, layer slots]: whether every segment is ready. Set by Sequence.
  std::vector<std::vector<bool>> ready;

  bool has_active_segment() const { return !segments.empty() && !segments.back().closed; }
  const SegmentRows* tail() const {
    return has_active_segment() ? segments.back().rows.get() : nullptr;
  }
  // Returns the query samples of a layer; null if there are none.
  std::shared_ptr<const QuerySamples> SamplesOf(uint32_t layer_slot) const {
    return layer_slot < samples.size() ? samples[layer_slot] : nullptr;
  }
  // Returns whether every segment has codes and a codebook of this layer. Tokens can then be
  // selected from the layer, and new rows are encoded when they are written.
  bool index_ready(size_t index, uint32_t layer_slot) const { return ready[index][layer_slot]; }
  bool index_ready(size_t index) const;  // in all layers
  // Returns the ordinal of an index; indexes.size() if the list does not have it.
  size_t Find(const IndexDescriptor& index) const;
};

struct Snapshot {
  std::shared_ptr<const SegmentList> list;  // shared by successive snapshots
  // Outlives the snapshot, so that the writer can check whether it is drained.
  std::shared_ptr<ActiveSegmentView> view;
  const std::vector<uint32_t>& layer_tokens;  // visible rows, per layer slot
  // Equal in two snapshots of a sequence if no rows were removed between them: their rows may be
  // used together. Another one in every process. Set by Sequence before it shows the snapshot.
  uint64_t rows_epoch;

  Snapshot(std::shared_ptr<const SegmentList> segments, std::vector<uint32_t> tokens);
  ~Snapshot() { view->drained.store(true, std::memory_order_release); }
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Returns the number of tokens that are complete over all layers.
  uint32_t token_count() const;
  // Returns the first position of the open segment; token_count() if no segment is open.
  uint32_t active_begin() const;
};

// Creates a snapshot from a list whose derived fields are not filled in yet.
std::shared_ptr<const Snapshot> CompleteSnapshot(SegmentList list,
                                                 std::vector<uint32_t> layer_tokens);

// Receives the changes of a sequence: one call at a time, in the order of the changes, each after
// the change has taken effect (OnTruncate: before). Calls are made with events_mutex_ held: a
// watcher may call Read, Peek, Watch and Unwatch of the sequence, but nothing that changes it.
// Locks that a watcher acquires may also be held around Watch and Unwatch, but around nothing that
// changes the sequence.
class SequenceWatcher {
 public:
  virtual ~SequenceWatcher() = default;
  // A new list version is published if next.list is another object than before.
  virtual void OnPublish(const Snapshot& next) = 0;
  // Tokens from token_count on are about to be truncated by the holder of `own_lease` (0 = no
  // lease). Returns whether another reader may still use them in the active segment, whose slots
  // are then not overwritten. OnPublish follows.
  virtual bool OnTruncate(uint32_t token_count, uint64_t own_lease) = 0;
  virtual void OnSuspend(bool suspended) = 0;
  virtual void OnDrop() = 0;
};

// New codes of the segment with this id.
struct IndexedSegment {
  uint64_t segment_id = 0;
  std::shared_ptr<const SegmentIndex> index;
};

// A writer's change to the list of segments.
struct ListEdit {
  uint32_t begin = 0;                 // entries from this position on ...
  std::vector<SegmentEntry> entries;  // ... are replaced by these
  bool closes_prefill = false;        // same as in CloseActiveSegment
  // Query samples per layer slot; empty: they stay as they are.
  std::vector<std::shared_ptr<const QuerySamples>> samples = {};
};

class Sequence {
 public:
  Sequence(uint64_t sequence_id, std::string session, uint32_t layer_count);
  // Initial state of a sequence.
  struct Start {
    // Shared tokens (Share), or recovered ones.
    std::shared_ptr<const Snapshot> first;
    std::unique_ptr<SequenceRecord> record;  // record of `first`; null: not recorded
    bool suspended = false;
    std::vector<std::shared_ptr<const ActiveSegmentView>>
        views;  // other readers' views of its open segment
    // Links it to the sequences of other ranks (share/rank_sequences.h); empty: not linked.
    std::string group_key = {};
    Retention retention = Retention::kByOption;
  };
  Sequence(uint64_t sequence_id, std::string session, Start start);
  ~Sequence();

  uint64_t sequence_id() const { return sequence_id_; }
  const std::string& session() const { return session_; }
  const std::string& group_key() const { return group_key_; }
  Retention retention() const { return retention_; }

  // Returns the newest snapshot. Errors: kNotFound if dropped, kFailedPrecondition if suspended.
  absl::StatusOr<std::shared_ptr<const Snapshot>> Read() const;
  // Same as Read, but also for a suspended sequence: for reports and background work.
  absl::StatusOr<std::shared_ptr<const Snapshot>> Peek() const;

  // Short background work on the active segment ends within milliseconds. A writer that waits for
  // it longer than this, because its thread does not run, receives kAborted.
  static constexpr absl::Duration kShortWriteLimit = absl::Seconds(2);

  // Makes the caller the writer until EndWrite. Errors: kAborted if there is another writer,
  // kNotFound if dropped, kFailedPrecondition if suspended.
  absl::Status BeginWrite();
  // Same as BeginWrite, for short background work on the active segment: waits for another writer
  // until `deadline`; writers that begin concurrently wait for its end, at most kShortWriteLimit,
  // instead of failing with kAborted at once. Errors: as BeginWrite.
  absl::Status BeginShortWrite(SteadyTime deadline);
  void EndWrite();

  // Writer: publishes the rows that it wrote; with `edit`, also changes the list. Errors: kNotFound
  // if dropped concurrently, kFailedPrecondition if suspended.
  absl::Status PublishRows(std::vector<uint32_t> layer_tokens);
  absl::Status PublishRows(std::vector<uint32_t> layer_tokens, ListEdit edit);
  // Writer: closes the open segment after its last token, and the prefill. Errors: as
  // PublishRows. REQUIRES: all layers have the same number of tokens.
  absl::Status CloseActiveSegment();
  // Writer: truncates the sequence to `token_count` tokens. REQUIRES: token_count <= that of the
  // newest snapshot.
  absl::Status Truncate(uint32_t token_count, uint64_t own_lease);
  // Writer: returns whether another reader may use rows beyond these in the open segment.
  bool HasReadersBeyond(const std::vector<uint32_t>& layer_tokens) const;

  // Replaces a run of neighbouring closed segments, complete over all layers, by segments with the
  // same tokens. Writers and readers continue concurrently. Indexes of the entries may be in any
  // order, and some may be missing.
  //
  // Errors: kAborted             a segment of the run is no longer in the list or was truncated, or
  //                              the replacement has another token range
  //         kInvalidArgument     the replacement is not closed or not contiguous
  //         kNotFound            dropped
  absl::Status ReplaceSegments(std::span<const uint64_t> segment_ids,
                               std::vector<SegmentEntry> replacement);
  // Adds codes to segments (or replaces those of the same index), and adds the index to the
  // sequence if it is new. Layers that are not ready yet may become ready later: publish the same
  // segments again after SegmentIndex::MarkReady, to notify readers and watchers. When it returns,
  // the watchers have received the index, also if it is another call that has added it.
  //
  // Codes of an open segment may be published only by its writer, after encoding every visible row.
  //
  // Errors: kAborted            a segment is no longer in the list
  //         kResourceExhausted  more than kMaxIndexes
  //         kNotFound           dropped
  absl::Status PublishIndex(const IndexDescriptor& index, std::span<const IndexedSegment> segments);
  // Removes an index, for example that of a cancelled build. No error if there is none.
  absl::Status RemoveIndex(const IndexDescriptor& index);

  // Returns the first `token_count` tokens for another sequence; copies nothing. Includes the
  // indexes that are ready in all of these segments and layers, and with `partial_indexes` also the
  // others.
  //
  // Errors: kOutOfRange  more tokens than are complete over all layers
  //         kNotFound    dropped
  absl::StatusOr<std::shared_ptr<const Snapshot>> Share(uint32_t token_count, bool partial_indexes);

  // Adds a watcher and returns the current snapshot; the watcher receives all later changes.
  absl::StatusOr<std::shared_ptr<const Snapshot>> Watch(std::shared_ptr<SequenceWatcher> watcher);
  // Removes a watcher. A call that is already in progress may still reach it.
  void Unwatch(const SequenceWatcher* watcher);

  // Suspends or resumes the sequence; returns the token_count. A writer in progress fails when it
  // publishes. Background work continues.
  absl::StatusOr<uint32_t> Suspend(bool suspended);
  bool suspended() const { return suspended_.load(std::memory_order_acquire); }

  // Pins the sequence against eviction until then (Holds::PinUntil), in this process and in those
  // that recover it. Errors: kNotFound if dropped; those of the record.
  absl::Status PinUntil(int64_t boot_nanos);

  // Releases all memory; memory that readers and a writer hold is freed when they finish.
  void Drop();
  bool dropped() const { return dropped_.load(std::memory_order_acquire); }

  // A build that replaces an index sets it while it is in progress.
  std::atomic<bool>& rebuilding() const { return rebuilding_; }

  // Record the tokens that a build of an index covers, from its begin to its end; tokens that are
  // removed during the build do not count.
  void BeginBuild(const IndexDescriptor& index, uint32_t token_count);
  void EndBuild(const IndexDescriptor& index, bool is_done);
  // Returns the number of tokens, of those that are still there, that the last recorded build of an
  // index covered; 0 if none is recorded, as in a process that has recovered the sequence.
  uint32_t BuiltTokens(const IndexDescriptor& index) const;

  // A writer in progress holds the sequence; other users that need it to stay hold it themselves.
  Holds& holds() const { return holds_; }

 private:
  using Watchers = std::vector<std::shared_ptr<SequenceWatcher>>;

  absl::Status DroppedError() const;
  absl::Status SuspendedError() const;
  absl::Status AcquireWriter(bool is_short, SteadyTime deadline);
  absl::Status CheckRunning() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<const Watchers> watchers() const;
  // Changes a copy of the newest list (`change` may fail), completes it, and installs it.
  absl::Status ChangeList(const Snapshot& base, std::vector<uint32_t> layer_tokens,
                          const std::function<absl::Status(SegmentList&)>& change)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(events_mutex_);
  // Makes `next`, a change of the snapshot that Read (for writers) or Peek returned under the same
  // lock, the newest one, and notifies the watchers. Errors: those of the record.
  absl::Status Install(std::shared_ptr<Snapshot> next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(events_mutex_);
  void Prune() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint64_t sequence_id_;
  const std::string session_;
  const std::string group_key_;
  const Retention retention_;
  std::atomic<bool> dropped_ = false;
  std::atomic<bool> suspended_ = false;
  mutable Holds holds_;
  mutable std::atomic<bool> rebuilding_ = false;

  Mutex events_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  std::unique_ptr<SequenceRecord> record_ ABSL_GUARDED_BY(events_mutex_);

  mutable Mutex mutex_;
  std::shared_ptr<const Snapshot> current_ ABSL_GUARDED_BY(mutex_);  // null when dropped
  // Views of older snapshots and sharing sequences that may still read the open segment.
  mutable std::vector<std::shared_ptr<const ActiveSegmentView>> views_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const Watchers> watchers_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool short_ ABSL_GUARDED_BY(mutex_) = false;  // the current writer began with BeginShortWrite
  CondVar writer_done_;
  struct BuiltIndex {
    IndexDescriptor index;
    uint32_t tokens = 0;    // of the last build
    uint32_t building = 0;  // of the build in progress
  };
  BuiltIndex& BuiltOf(const IndexDescriptor& index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<BuiltIndex> built_ ABSL_GUARDED_BY(mutex_);
};

// The exclusive right to write to a sequence, while it lives.
class WriteLease {
 public:
  static absl::StatusOr<WriteLease> Acquire(std::shared_ptr<Sequence> sequence);
  // Calls BeginShortWrite.
  static absl::StatusOr<WriteLease> TakeShort(std::shared_ptr<Sequence> sequence,
                                              SteadyTime deadline);
  WriteLease(WriteLease&&) = default;
  WriteLease& operator=(WriteLease&&) = delete;
  ~WriteLease() {
    if (sequence_ != nullptr) sequence_->EndWrite();
  }
  Sequence& sequence() const { return *sequence_; }
  const std::shared_ptr<Sequence>& shared_sequence() const { return sequence_; }

 private:
  explicit WriteLease(std::shared_ptr<Sequence> sequence) : sequence_(std::move(sequence)) {}
  std::shared_ptr<Sequence> sequence_;  // a writer may outlive a drop
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_SEQUENCE_H_
