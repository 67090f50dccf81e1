// LiveSequence: maintains the incremental index of one sequence, one piece of work after the other.
//
// A segment of one layer is indexed when its tokens are final: the segment is closed, or full in
// this layer. A codebook generation is *mature* when its codebook was trained on
// codebook_tokens, or on all its tokens. The codebook of a segment is:
//   prefill, young generation   a new codebook, trained on a sample of the generation so far,
//                               starting from the previous centroids. It codes this segment only.
//                               When the generation reaches codebook_tokens, the codebook that
//                               makes it mature also recodes the earlier segments
//   prefill, mature generation  the generation's codebook
//   drifted keys                keys that have drifted away from the generation's codebook begin a
//                               new generation, however young the current one is
//   decode, coded on arrival    the codes stay, as long as the keys do not drift
// A prompt below one segment is indexed when its prefill is closed. Its first codebooks are trained
// *ahead*, from the rows that have arrived, layer by layer while the next layers are computed. Such
// a codebook is used only when no row has followed: rows, seed and iterations are then those of the
// training that it replaces, so that an index never depends on how its rows arrived. A layer is
// trained ahead again when its rows have doubled: a prompt in many chunks is trained at most twice
// as much, and then its last chunks wait for the end of the prefill.
// *Decode segments* (tail_tokens slots at most, filled by Append) are merged: each run of
// merge_segments of them becomes one segment. When the prefill has ended, segments lose their
// unused slots (shrink.h). Closed segments get their clusters, too, when the sequence has an index
// of that type as well as the live one.
//
// A layer whose index needs query samples (query_samples.h) waits for them.
//
// Single-threaded: runs on the worker thread of IncrementalIndexer. Writers, readers, forks and
// drops of the sequence continue concurrently; the next snapshot contains their changes.
#ifndef PQCACHED_KVSTORE_INDEX_LIVE_SEQUENCE_H_
#define PQCACHED_KVSTORE_INDEX_LIVE_SEQUENCE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/index/layer_build.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

class LiveSequence {
 public:
  // Purpose of a piece of work: the next decode step, or later quality and speed.
  enum class Purpose : uint8_t { kDecode, kUpkeep };

  LiveSequence(std::shared_ptr<const Cache> cache, std::shared_ptr<Sequence> sequence,
               const LiveIndex& spec);

  // Does the next piece of work. Returns false when there is none. `keep_going`: when it returns
  // false, the work ends early without effect.
  //
  // Errors: kNotFound when dropped; kFailedPrecondition when suspended; kResourceExhausted when the
  // pool is full. Rows and indexes then stay as they were, and the next call tries again.
  absl::StatusOr<bool> Step(Purpose purpose, const std::function<bool()>& keep_going);

  // Returns an object for the same sequence that begins with the index that it has now.
  std::shared_ptr<LiveSequence> Renewed() const {
    auto renewed = std::make_shared<LiveSequence>(cache_, sequence_, spec_);
    renewed->next_generation_ = next_generation_;
    return renewed;
  }

 private:
  // Codebook that is not published, of the first tokens of a segment.
  struct Ahead {
    std::shared_ptr<const Codebook> codebook;  // null: none
    uint64_t segment_id = 0;
    uint32_t token_end = 0;
  };
  struct LayerState {
    std::shared_ptr<const Codebook> codebook;  // the newest one; null: none yet
    uint32_t generation_begin = 0;
    uint32_t trained_end = 0;  // end position (exclusive) of the training data
    bool mature = false;       // see the file comment
    uint32_t done_end = 0;     // end position (exclusive) of the indexed tokens
    std::vector<uint64_t>
        recode_segment_ids;  // segments of the generation that have earlier codebooks
    Ahead ahead;
  };
  // Final tokens of one layer and segment.
  struct Place {
    const SegmentEntry* entry = nullptr;  // null: none
    uint32_t layer_slot = 0;
    uint32_t token_end = 0;

    uint32_t begin() const { return entry->rows->first_position(); }
  };
  // One segment to be recoded in one layer.
  struct Recoding {
    uint32_t layer_slot = 0;
    uint64_t segment_id = 0;
    std::shared_ptr<const Codebook> codebook;
  };

  void Begin(const Snapshot& snapshot);
  void AdoptMaps(const SegmentIndex& index, uint32_t first_position);
  // Returns the lowest (segment, layer) that is due: with `coded`, one that has codes; otherwise
  // one that has none.
  Place FindNext(const Snapshot& snapshot, bool coded);
  absl::StatusOr<bool> StepForDecode(const Snapshot& snapshot);
  absl::StatusOr<bool> StepForUpkeep(const Snapshot& snapshot);
  absl::Status IndexPlace(const Snapshot& snapshot, const Place& place);
  // Trains the first codebook of a layer ahead. Returns false when there is none to train.
  absl::StatusOr<bool> TrainAhead(const Snapshot& snapshot);
  // Returns where TrainAhead may train: the only segment, while prefill rows may follow in it.
  Place AheadPlace(const Snapshot& snapshot, uint32_t layer_slot) const;
  // Trains a codebook on the generation so far, with the place's tokens.
  absl::StatusOr<std::shared_ptr<const Codebook>> Train(const Snapshot& snapshot,
                                                        const Place& place);
  // Takes the codebook that was trained ahead on exactly the place's tokens, or trains one.
  absl::StatusOr<std::shared_ptr<const Codebook>> TakeOrTrain(const Snapshot& snapshot,
                                                              const Place& place);
  // Trains a codebook on the generation so far and codes the place with it.
  absl::Status TrainAndCode(const Snapshot& snapshot, const Place& place);
  void FinishGeneration(uint32_t layer_slot);
  absl::Status CodeAndPublish(const Place& place, std::shared_ptr<const Codebook> codebook);
  absl::StatusOr<bool> CodeOpenTail(const Snapshot& snapshot);
  absl::StatusOr<bool> Recode(const Snapshot& snapshot);
  absl::StatusOr<bool> Merge(const Snapshot& snapshot);
  // Makes the clusters of a closed segment that has none yet: those of other indexes than the live
  // one, and of decode segments before their merge.
  absl::StatusOr<bool> MakeClusters(const Snapshot& snapshot);
  // Returns the first run of decode segments that can be merged; empty when there is none.
  std::span<const SegmentEntry> FindRun(const Snapshot& snapshot) const;

  bool HasIndex(uint32_t layer_slot) const {
    return cache_->layers.layers[layer_slot].shape.has_index();
  }
  // Returns whether a layer has what its first codebook needs, or a codebook.
  bool CanTrain(const Snapshot& snapshot, uint32_t layer_slot) const;
  bool IsTail(const SegmentEntry& entry) const;
  bool IsCoded(const SegmentEntry& entry, uint32_t layer_slot) const;
  // Returns the index of the entry; null when it has none.
  const SegmentIndex* IndexOf(const SegmentEntry& entry) const;
  LayerTraining Training(uint32_t layer_slot, std::span<const SegmentTokens> segments) const;
  bool Drifted(const Place& place) const;
  uint32_t Iterations(uint32_t layer_slot, PositionRange tokens) const;

  const std::shared_ptr<const Cache> cache_;
  const std::shared_ptr<Sequence> sequence_;
  const LiveIndex spec_;
  const uint32_t sample_tokens_;
  std::vector<bool> needs_samples_;  // per layer slot: of queries, for its first codebook
  bool trains_on_rows_ = true;       // BuiltIndexType::TrainsOnRows
  std::function<bool()> go_on_;
  bool begun_ = false;
  uint32_t next_generation_ = 0;
  size_t ordinal_ = 0;  // ordinal of the index in the current snapshot
  std::vector<LayerState> layers_;
  std::deque<Recoding> recodings_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_INDEX_LIVE_SEQUENCE_H_
