// Sequence: the token stream of one request, as a row of snapshots.
//
// A *snapshot* is what a reader sees: segments and how many rows of each layer are visible. It
// never changes. A writer prepares memory that no snapshot shows, then publishes the next snapshot
// in one step; so readers never wait for writers, and a failed write leaves no trace.
//
// Who changes what:
//   a writer          (one at a time, WriteLease) the tokens: rows behind those that are shown,
//                     the open tail, what closes and opens behind it, roll back
//   background work   (any number) how closed segments hold their tokens: ReplaceSegments puts
//                     others in their place, PublishIndex adds codes. Never tokens, never the tail
// Each publishes on top of what the other has published meanwhile.
//
// Slots come to be written again only after a roll back, when older snapshots, sequences that share
// the tail, or leases may still show them: ReadersBeyond tells the writer, who then moves the open
// segment to fresh memory.
//
// Thread-safe. Two locks: events_mutex_ orders changes and what watchers hear of them, and may be
// held while mutex_ (the newest snapshot) is taken; readers take mutex_ alone.
#ifndef PQCACHED_KVSTORE_SEQUENCE_H_
#define PQCACHED_KVSTORE_SEQUENCE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/clock.h"
#include "kvstore/holds.h"
#include "kvstore/mutex.h"
#include "kvstore/segment.h"

namespace pqcached::kvstore {

class SequenceRecord;

// Says when nobody looks any more at what a snapshot or a sharer shows of a tail.
struct TailView {
  std::vector<uint32_t> layer_tokens;  // shown, per layer slot
  const SegmentRows* tail = nullptr;   // the open segment; null when there was none
  std::atomic<bool> drained = false;
};

// A look at the rows of an open segment below token counts, for as long as `pin` lives.
struct PinnedTail {
  std::shared_ptr<const TailView> view;
  std::shared_ptr<const void> pin;
};
PinnedTail PinTail(std::vector<uint32_t> layer_tokens, const SegmentRows* tail);

// A sequence's share of a segment. Kept by every list that names the segment.
class SegmentUse {
 public:
  // `tail`: when the segment was still open in the sequence that it is shared with; kept from being
  // written below its layer_tokens for as long as this or a copy of `tail` lives.
  SegmentUse(std::shared_ptr<const SegmentRows> rows, std::shared_ptr<const void> tail);
  ~SegmentUse();
  SegmentUse(const SegmentUse&) = delete;
  SegmentUse& operator=(const SegmentUse&) = delete;

  const std::shared_ptr<const void>& tail() const { return tail_; }

 private:
  std::shared_ptr<const SegmentRows> rows_;
  std::shared_ptr<const void> tail_;
};

// A list never changes, so its address is its version.
struct SegmentList {
  std::vector<SegmentEntry> segments;  // without gap from position 0; only the last one may be open
  std::vector<IndexDescriptor> indexes;  // in any state; see index_ready
  bool prefill_closed = false;           // by the first BuildIndex, or by the first token decoded
  // [indexes, layer slots]: ready in every segment. Set by Sequence.
  std::vector<std::vector<bool>> ready;

  bool tail_open() const { return !segments.empty() && !segments.back().closed; }
  const SegmentRows* tail() const { return tail_open() ? segments.back().rows.get() : nullptr; }
  // Whether every segment has codes and codebook of this layer: then it may be selected from, and
  // rows that a writer adds to it get their codes too.
  bool index_ready(size_t index, uint32_t layer_slot) const { return ready[index][layer_slot]; }
  bool index_ready(size_t index) const;  // in all layers
  // Ordinal of an index; indexes.size() when there is none.
  size_t Find(const IndexDescriptor& index) const;
};

struct Snapshot {
  std::shared_ptr<const SegmentList> list;  // shared by successive snapshots
  // Outlives the snapshot, whose writer asks whether it is drained.
  std::shared_ptr<TailView> view;
  const std::vector<uint32_t>& layer_tokens;  // visible rows, per layer slot

  Snapshot(std::shared_ptr<const SegmentList> segments, std::vector<uint32_t> tokens);
  ~Snapshot() { view->drained.store(true, std::memory_order_release); }
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Tokens complete over all layers.
  uint32_t token_count() const;
  // Where the open tail begins; token_count() when there is none.
  uint32_t tail_begin() const;
};

// A snapshot of a list in which nothing is missing but what follows from the rest.
std::shared_ptr<const Snapshot> CompleteSnapshot(SegmentList list,
                                                 std::vector<uint32_t> layer_tokens);

// Hears what becomes of a sequence: one call at a time, in the order of the changes, each after it has
// taken effect (OnTruncate: before). Calls come with events_mutex_ held: a watcher may call Read,
// Peek, Watch and Unwatch of the sequence, nothing that changes it. Locks that a watcher takes may be
// held around Watch and Unwatch, too, and around nothing that changes the sequence.
class SequenceWatcher {
 public:
  virtual ~SequenceWatcher() = default;
  // The version is new when next.list is another object than before.
  virtual void OnPublish(const Snapshot& next) = 0;
  // Tokens from token_count on are about to be forgotten, at the wish of the holder of `own_lease`
  // (0 = of none). Returns whether anybody else may go on to look at them in the open tail, whose
  // slots are then not written again. OnPublish follows.
  virtual bool OnTruncate(uint32_t token_count, uint64_t own_lease) = 0;
  virtual void OnSuspend(bool suspended) = 0;
  virtual void OnDrop() = 0;
};

// Codes of a segment, found by id.
struct IndexedSegment {
  uint64_t segment_id = 0;
  std::shared_ptr<const SegmentIndex> index;
};

// What a writer changes in the list.
struct TailEdit {
  uint32_t begin = 0;                 // entries that begin at or behind it ..
  std::vector<SegmentEntry> entries;  // .. give way to these
  bool ends_prefill = false;          // as CloseTail does
};

class Sequence {
 public:
  Sequence(uint64_t sequence_id, std::string session, uint32_t layer_count);
  // What a sequence begins with.
  struct Start {
    std::shared_ptr<const Snapshot> first;  // tokens that it shares (Share), or that were recovered
    std::unique_ptr<SequenceRecord> record;  // of `first`; null: it is not written down
    bool suspended = false;
    std::vector<std::shared_ptr<const TailView>> views;  // of others, of its open segment
    // Ties it to those of other ranks (rank_sequences.h); empty: to none.
    std::string group_key = {};
  };
  Sequence(uint64_t sequence_id, std::string session, Start start);
  ~Sequence();

  uint64_t sequence_id() const { return sequence_id_; }
  const std::string& session() const { return session_; }
  const std::string& group_key() const { return group_key_; }

  // The newest snapshot. Errors: kNotFound when dropped, kFailedPrecondition when suspended.
  absl::StatusOr<std::shared_ptr<const Snapshot>> Read() const;
  // The same, also of a suspended sequence: for reports and background work.
  absl::StatusOr<std::shared_ptr<const Snapshot>> Peek() const;

  // Makes the caller the writer until EndWrite. Errors: kAborted when there is one, kNotFound when
  // dropped, kFailedPrecondition when suspended.
  absl::Status BeginWrite();
  // The same for short background work on the tail: waits for a writer until `deadline`, and writers
  // that come meanwhile wait for its end instead of being told kAborted. Errors: as BeginWrite.
  absl::Status BeginShortWrite(SteadyTime deadline);
  void EndWrite();

  // Of the writer: shows rows that it wrote; with `edit`, changes the list. Errors: kNotFound when
  // dropped meanwhile, kFailedPrecondition when suspended.
  absl::Status PublishRows(std::vector<uint32_t> layer_tokens);
  absl::Status PublishRows(std::vector<uint32_t> layer_tokens, TailEdit edit);
  // Of the writer: a snapshot with a list of its own making. Errors: as PublishRows; kAborted when
  // background work has changed the list since BeginWrite or since this writer's last publishing.
  absl::Status Publish(std::shared_ptr<const Snapshot> next);
  // Of the writer: closes the open segment where its tokens end, and with it the prefill. Errors: as
  // PublishRows. REQUIRES: all layers have the same number of tokens.
  absl::Status CloseTail();
  // Of the writer: forgets the tokens from `token_count` on. REQUIRES: token_count <= that of the
  // newest snapshot.
  absl::Status Truncate(uint32_t token_count, uint64_t own_lease);
  // Of the writer: whether anybody else may look at rows beyond these in the open segment.
  bool ReadersBeyond(const std::vector<uint32_t>& layer_tokens) const;

  // Puts `replacement` in place of a run of neighbouring closed segments with the same tokens, all
  // complete over all layers, while writers and readers go on. Indexes of the entries may come in
  // any order and may lack some.
  //
  // Errors: kAborted             not all of the run is in the list any more, or it was rolled back into
  //         kInvalidArgument     the replacement is not closed or has other tokens
  //         kNotFound            dropped
  absl::Status ReplaceSegments(std::span<const uint64_t> segment_ids,
                               std::vector<SegmentEntry> replacement);
  // Adds codes to segments (or puts them in place of others of the same index), and the index to the
  // sequence when it is new. Layers of them that are not ready yet may become so later: publish the
  // same again after SegmentIndex::MarkReady, so that readers and watchers get to know.
  //
  // An open segment: of its writer only, who has coded every row that is shown.
  //
  // Errors: kAborted            not all of the segments are in the list any more
  //         kResourceExhausted  more than kMaxIndexes
  //         kNotFound           dropped
  absl::Status PublishIndex(const IndexDescriptor& index, std::span<const IndexedSegment> segments);
  // Takes an index away again, as of a cancelled build. No error when there is none.
  absl::Status RemoveIndex(const IndexDescriptor& index);

  // The first `token_count` tokens for another sequence; copies nothing. Of indexes those that are
  // ready in all of these segments and layers, and with `partial_indexes` also the others.
  //
  // Errors: kOutOfRange more tokens than are complete over all layers; kNotFound, as Peek
  absl::StatusOr<std::shared_ptr<const Snapshot>> Share(uint32_t token_count, bool partial_indexes);

  // Adds a watcher and returns the snapshot whose followers it hears of.
  absl::StatusOr<std::shared_ptr<const Snapshot>> Watch(std::shared_ptr<SequenceWatcher> watcher);
  // A call that is on its way may still come.
  void Unwatch(const SequenceWatcher* watcher);

  // A writer at work finds out when it publishes. Background work goes on.
  absl::StatusOr<uint32_t> Suspend(bool suspended);
  bool suspended() const { return suspended_.load(std::memory_order_acquire); }

  // Keeps it from being evicted until then (Holds::PinUntil), in this process and in those that recover
  // it. Errors: kNotFound when dropped; those of the record.
  absl::Status PinUntil(int64_t boot_nanos);

  // Lets go of all memory; what readers and a writer hold dies with them.
  void Drop();
  bool dropped() const { return dropped_.load(std::memory_order_acquire); }

  // A writer at work holds the sequence; others who need it to stay do so themselves.
  Holds& holds() const { return holds_; }

 private:
  using Watchers = std::vector<std::shared_ptr<SequenceWatcher>>;
  enum class Author : uint8_t { kWriter, kBackground };

  absl::Status DroppedError() const;
  absl::Status SuspendedError() const;
  absl::Status StartWriting(bool is_short, SteadyTime deadline);
  absl::Status CheckRunning() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<const Watchers> watchers() const;
  // Changes a copy of the newest list (`change` may fail), completes it, and installs it.
  absl::Status ChangeList(Author author, const Snapshot& base, std::vector<uint32_t> layer_tokens,
                          const std::function<absl::Status(SegmentList&)>& change)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(events_mutex_);
  // Makes `next` the newest snapshot and tells the watchers. Errors: kNotFound, kFailedPrecondition (writers).
  absl::Status Install(Author author, std::shared_ptr<const Snapshot> next)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(events_mutex_);
  void Prune() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint64_t sequence_id_;
  const std::string session_;
  const std::string group_key_;
  std::atomic<bool> dropped_ = false;
  std::atomic<bool> suspended_ = false;
  mutable Holds holds_;

  Mutex events_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  std::unique_ptr<SequenceRecord> record_ ABSL_GUARDED_BY(events_mutex_);

  mutable Mutex mutex_;
  std::shared_ptr<const Snapshot> current_ ABSL_GUARDED_BY(mutex_);  // null when dropped
  // Of older snapshots and sharers that may still look at the open segment.
  mutable std::vector<std::shared_ptr<const TailView>> views_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const Watchers> watchers_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const SegmentList> writer_list_ ABSL_GUARDED_BY(mutex_);  // that the writer knows
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool short_ ABSL_GUARDED_BY(mutex_) = false;  // of the writer at work
  CondVar writer_gone_;
};

// The right to write, while it lives.
class WriteLease {
 public:
  static absl::StatusOr<WriteLease> Take(std::shared_ptr<Sequence> sequence);
  // By BeginShortWrite.
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
  std::shared_ptr<Sequence> sequence_;  // a writer may outlast a drop
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_H_
