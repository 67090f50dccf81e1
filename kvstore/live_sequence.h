// LiveSequence: keeps up the index of one sequence, one piece of work after the other.
//
// Per layer, a segment is taken up when its tokens are final: it is closed, or full in this layer.
// Which codebook codes it:
//   prefill, epoch young    a codebook trained on a sample of the epoch so far, beginning with the
//                           one before. It codes this segment only, until the epoch has epoch_tokens;
//                           the codebook that makes it mature then codes the earlier ones anew
//   prefill, epoch mature   its codebook
//   keys that have drifted  away from the epoch's codebook begin a new epoch, however young it is
//   tail, coded on arrival  the codes stay, as long as its keys do not drift
// Runs of merge_segments tails are merged into one segment.
//
// Single-thread: of the worker of LiveIndexes. Writers, readers, forks and drops of the sequence go on
// meanwhile; what they change is found in the next snapshot.
#ifndef PQCACHED_KVSTORE_LIVE_SEQUENCE_H_
#define PQCACHED_KVSTORE_LIVE_SEQUENCE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/cache.h"
#include "kvstore/layer_build.h"
#include "kvstore/sequence.h"

namespace pqcached::kvstore {

class LiveSequence {
 public:
  // What a piece of work is for: the next decode step, or quality and speed later on.
  enum class Purpose : uint8_t { kDecode, kUpkeep };

  LiveSequence(std::shared_ptr<const Cache> cache, std::shared_ptr<Sequence> sequence,
               const LiveIndex& spec);

  // Does the next piece of work, if there is any. `go_on`: false ends it early, without effect.
  //
  // Errors: kNotFound when dropped; kResourceExhausted when the pool is full: rows and indexes stay as
  // they were, and the next call tries again.
  absl::StatusOr<bool> Step(Purpose purpose, const std::function<bool()>& go_on);

 private:
  struct LayerState {
    std::shared_ptr<const Codebook> codebook;  // newest; null: none yet
    uint32_t epoch_begin = 0;
    uint32_t trained_end = 0;           // the epoch's tokens before it were there to be trained on
    bool mature = false;                // trained on epoch_tokens, or on all there are
    uint32_t done_end = 0;              // tokens before it are taken up
    std::vector<uint64_t> provisional;  // segments of the epoch under earlier codebooks
  };
  // Tokens of a layer and segment that are final.
  struct Place {
    const SegmentEntry* entry = nullptr;  // null: none
    uint32_t layer_slot = 0;
    uint32_t token_end = 0;

    uint32_t begin() const { return entry->rows->first_position(); }
  };
  // A segment to be coded anew in one layer.
  struct Recoding {
    uint32_t layer_slot = 0;
    uint64_t segment_id = 0;
    std::shared_ptr<const Codebook> codebook;
  };

  void Begin(const Snapshot& snapshot);
  // The lowest (segment, layer) that waits and has codes already, or has none.
  Place FindNext(const Snapshot& snapshot, bool coded);
  absl::StatusOr<bool> StepForDecode(const Snapshot& snapshot);
  absl::StatusOr<bool> StepForUpkeep(const Snapshot& snapshot);
  absl::Status TakeUp(const Snapshot& snapshot, const Place& place);
  // Trains on the epoch so far and codes the place.
  absl::Status TrainAndCode(const Snapshot& snapshot, const Place& place);
  void MatureEpoch(uint32_t layer_slot);
  absl::Status CodeAndPublish(const Place& place, std::shared_ptr<const Codebook> codebook);
  absl::StatusOr<bool> CodeOpenTail(const Snapshot& snapshot);
  absl::StatusOr<bool> Recode(const Snapshot& snapshot);
  absl::StatusOr<bool> Merge(const Snapshot& snapshot);
  // The first run of tails that may be merged; empty when there is none.
  std::span<const SegmentEntry> FindRun(const Snapshot& snapshot) const;

  bool IsTail(const SegmentEntry& entry) const;
  bool IsCoded(const SegmentEntry& entry, uint32_t layer_slot) const;
  // Index of the entry; null when it has none.
  const SegmentIndex* IndexOf(const SegmentEntry& entry) const;
  LayerTraining Training(uint32_t layer_slot, std::span<const SegmentTokens> segments) const;
  bool Drifted(const Place& place) const;
  uint32_t Iterations(uint32_t layer_slot, PositionRange tokens) const;

  const std::shared_ptr<const Cache> cache_;
  const std::shared_ptr<Sequence> sequence_;
  const LiveIndex spec_;
  const uint32_t sample_tokens_;
  std::function<bool()> go_on_;
  bool begun_ = false;
  uint32_t next_epoch_ = 0;
  size_t ordinal_ = 0;  // of the index in the snapshot at hand
  std::vector<LayerState> layers_;
  std::deque<Recoding> recodings_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_LIVE_SEQUENCE_H_
