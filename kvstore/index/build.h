// Build: one build of an index in progress. All segments of its snapshot count as closed.
//
// Not thread-safe; its own tasks run on the building arena.
#ifndef PQCACHED_KVSTORE_INDEX_BUILD_H_
#define PQCACHED_KVSTORE_INDEX_BUILD_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvstore/clock.h"
#include "kvstore/index/cost_model.h"
#include "kvstore/index/generations.h"
#include "kvstore/index/layer_build.h"
#include "kvstore/mutex.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

using BuildClock = std::function<SteadyTime()>;

class Build {
 public:
  // `replaces`: the sequence has the index, ready; its codes stay until CatchUp replaces all.
  Build(const Cache& cache, std::shared_ptr<Sequence> sequence,
        std::shared_ptr<const Snapshot> base, const BuildSpec& spec, bool replaces,
        const std::function<bool(const BuildProgress&)>& progress, const BuildClock& clock)
      : cache_(cache),
        sequence_(std::move(sequence)),
        base_(std::move(base)),
        spec_(spec),
        replaces_(replaces),
        progress_(progress),
        clock_(clock),
        began_(clock()),
        type_(BuiltTypeOf(spec.index)),
        head_tasks_(type_.TrainingTasks(spec.index)) {}

  // Allocates the extents of the whole build. Errors: kResourceExhausted.
  absl::Status Allocate();
  // Trains, codes and publishes layer by layer. Errors: kCancelled, kDeadlineExceeded, kNotFound.
  absl::Status Run();
  // Codes the rows that arrived during the build, and replaces the earlier index. Errors:
  // kCancelled, kNotFound, kResourceExhausted.
  absl::Status CatchUp();

 private:
  // One layer and codebook generation, the content of one codebook extent.
  struct Unit {
    uint32_t layer_slot = 0;
    uint32_t codebook_generation = 0;
    uint32_t iterations = 0;
    std::shared_ptr<Codebook> codebook;
    std::vector<TrainingResult> results;                  // [kv_heads, training tasks]
    std::unique_ptr<std::atomic<uint32_t>[]> tasks_left;  // [kv_heads]
    std::atomic<uint32_t> heads_left = 0;
  };
  struct Task {
    Unit* unit = nullptr;
    uint32_t kv_head = 0;
    uint32_t number = 0;  // among the training tasks of the kv head
  };
  enum class Stop : uint8_t { kNone, kCancelled, kDeadline, kDropped };

  // Returns the ordinal of the first new codebook generation: the address of a codebook and its
  // generation identify it for readers that keep copies of codebooks, such as a GPU.
  uint32_t FirstGeneration() const;
  uint32_t segment_end(size_t segment) const;
  const StoredLayers::Layer& layer(const Unit& unit) const {
    return cache_.layers.layers[unit.layer_slot];
  }
  std::vector<SegmentTokens> TokensOf(const Unit& unit) const;
  uint32_t head_tokens(const Unit& unit) const {
    return generations_[unit.codebook_generation].tokens.end -
           generations_[unit.codebook_generation].tokens.begin;
  }
  bool HasIndex(uint32_t layer_slot) const {
    return cache_.layers.layers[layer_slot].shape.has_index();
  }
  // Returns the codebook of a layer and generation; null for a layer without an index.
  std::shared_ptr<const Codebook> CodebookOf(uint32_t layer_slot, uint32_t generation) const;
  void ChooseIterations();
  void MeasureCosts();
  absl::Duration CodingTime(const Unit& unit) const;
  void UpdateSlowdown(absl::Duration took, absl::Duration by_costs);
  void RequestStop(Stop reason);
  bool Stopped();
  // Returns whether the build is not stopped; a deadline that has passed stops it.
  bool GoesOn();
  absl::Status StopStatus() const;
  void RunTask(const Task& task);
  TrainingArgs ArgsOf(const Task& task, std::span<const kernels::RowSpan> rows);
  // Makes what the tasks of each kv head have in common.
  void PrepareHeads();
  TrainingResult TrainTask(const Task& task);
  // Returns false when the build stopped, before all segments were closed.
  bool EncodeHead(const Unit& unit, uint32_t kv_head);
  void FinishUnit(Unit& unit);
  absl::Status PublishLayer(uint32_t layer_slot);
  // Returns the codes that this build has made for a segment; null when there are none.
  std::shared_ptr<const SegmentIndex> IndexOf(const SegmentEntry& entry, size_t ordinal) const;
  // Publishes the codes of all segments of a replaced index at once.
  absl::Status Replace(const Snapshot& snapshot);
  // Codes the segments of a snapshot that have no index yet. Only the writer may pass with_tail =
  // true, which includes the active segment. Returns true when there were any.
  absl::StatusOr<bool> CodeNewSegments(const Snapshot& snapshot, bool with_tail);

  const Cache& cache_;
  const std::shared_ptr<Sequence> sequence_;
  const std::shared_ptr<const Snapshot> base_;
  const BuildSpec& spec_;
  const bool replaces_;
  const std::function<bool(const BuildProgress&)>& progress_;
  const BuildClock& clock_;
  const SteadyTime began_;
  const BuiltIndexType& type_;
  const uint32_t head_tasks_;  // training tasks per kv head

  std::vector<CodebookGeneration> generations_;
  // Of the layers that have an index, ordered by layer, then by generation, because decode needs
  // them in this order.
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<Task> tasks_;
  std::vector<std::shared_ptr<SegmentIndex>> segment_indexes_;  // per segment
  // Codes that are not published yet, by segment id: of a build that replaces an index.
  std::map<uint64_t, std::shared_ptr<const SegmentIndex>> unpublished_;
  std::vector<BuildCost> costs_;  // per layer slot; under a deadline
  std::atomic<Stop> stop_ = Stop::kNone;
  std::atomic<uint32_t> tasks_left_ = 0;
  std::atomic<int64_t> coding_left_ns_ = 0;  // on one thread, by the measured costs
  // Ratio of the observed duration of work to the duration that the measured costs predict, from
  // the newest observation. It exceeds 1 when other processes use the machine.
  std::atomic<double> slowdown_ = 1.0;

  Mutex progress_mutex_;                                                     // one report at a time
  std::vector<uint32_t> generations_done_ ABSL_GUARDED_BY(progress_mutex_);  // per layer slot
  uint32_t layers_done_ ABSL_GUARDED_BY(progress_mutex_) = 0;
  absl::Status publish_status_ ABSL_GUARDED_BY(progress_mutex_);
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_INDEX_BUILD_H_
