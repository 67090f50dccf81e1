#include "kvstore/builder.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/pq_encode.h"
#include "kvstore/training.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kMaxIterations = 1000;
// Of a task's share of the time to the deadline: what training may take; the rest is for coding.
constexpr double kTrainingShare = 0.8;

absl::Status CheckSpec(const Cache& cache, const BuildSpec& spec) {
  if (spec.index.kind == IndexKind::kFlat) {
    return absl::InvalidArgumentError("index: flat needs no build");
  }
  for (const StoredLayers::Layer& layer : cache.layers.layers) {
    if (absl::Status status = ValidateIndex(spec.index, layer.shape.key_dim, "index");
        !status.ok()) {
      return status;
    }
  }
  if (spec.iterations < 1 || spec.iterations > kMaxIterations) {
    return absl::InvalidArgumentError(absl::StrCat("iterations is ", spec.iterations,
                                                   "; it must lie in [1, ", kMaxIterations, "]"));
  }
  return absl::OkStatus();
}

absl::Status CheckSequence(const Cache& cache, const Snapshot& base, const BuildSpec& spec) {
  const std::vector<IndexDescriptor>& indexes = base.list->indexes;
  if (std::find(indexes.begin(), indexes.end(), spec.index) != indexes.end()) {
    return absl::AlreadyExistsError(absl::StrCat(
        "the sequence has index pq m=", spec.index.subspace_count, " b=", spec.index.bits));
  }
  if (indexes.size() >= kMaxIndexes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a sequence has at most ", kMaxIndexes, " indexes"));
  }
  for (uint32_t slot = 1; slot < cache.layers.size(); ++slot) {
    if (base.layer_tokens[slot] == base.layer_tokens[0]) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "layer ", cache.layers.layers[slot].layer, " holds ", base.layer_tokens[slot],
        " tokens; layer ", cache.layers.layers[0].layer, " holds ", base.layer_tokens[0]));
  }
  if (base.token_count() == 0) return absl::FailedPreconditionError("the sequence has no tokens");
  return absl::OkStatus();
}

// One build at work.
class Build {
 public:
  Build(const Cache& cache, const Sequence& sequence, std::shared_ptr<const Snapshot> base,
        const BuildSpec& spec, const std::function<bool(const BuildProgress&)>& progress)
      : cache_(cache),
        sequence_(sequence),
        base_(std::move(base)),
        spec_(spec),
        progress_(progress),
        began_(absl::Now()) {}

  // Makes extents for everything. Errors: kResourceExhausted.
  absl::Status Allocate();
  // Trains and codes. Errors: kCancelled, kDeadlineExceeded, kNotFound.
  absl::Status Run();
  std::shared_ptr<const Snapshot> Result() const;

 private:
  // A layer and epoch: what one codebook extent holds.
  struct Unit {
    uint32_t layer_slot = 0;
    uint32_t epoch = 0;
    std::shared_ptr<Codebook> codebook;
    std::vector<TrainingResult> results;                      // [kv_heads, m]
    std::unique_ptr<std::atomic<uint32_t>[]> subspaces_left;  // [kv_heads]
    std::atomic<uint32_t> heads_left = 0;
  };
  struct Task {
    Unit* unit = nullptr;
    uint32_t kv_head = 0;
    uint32_t subspace = 0;
  };
  enum class Stop : uint8_t { kNone, kCancelled, kDeadline, kDropped };

  bool closes_last() const { return !base_->list->prefill_closed; }
  uint32_t segment_end(size_t segment) const;
  const StoredLayers::Layer& layer(const Unit& unit) const {
    return cache_.layers.layers[unit.layer_slot];
  }
  void RequestStop(Stop reason);
  bool Stopped();
  void RunTask(const Task& task);
  TrainingResult TrainTask(const Task& task);
  void EncodeHead(const Unit& unit, uint32_t kv_head);
  void FinishUnit(Unit& unit);

  const Cache& cache_;
  const Sequence& sequence_;
  const std::shared_ptr<const Snapshot> base_;
  const BuildSpec& spec_;
  const std::function<bool(const BuildProgress&)>& progress_;
  const absl::Time began_;

  std::vector<Epoch> epochs_;
  std::vector<std::unique_ptr<Unit>>
      units_;  // in the order in which decode needs them: by layer, then by epoch
  std::vector<Task> tasks_;
  std::vector<std::shared_ptr<SegmentIndex>> segment_indexes_;  // per segment
  std::atomic<Stop> stop_ = Stop::kNone;
  std::atomic<uint32_t> tasks_left_ = 0;

  Mutex progress_mutex_;                                                // one report at a time
  std::vector<uint32_t> epochs_done_ ABSL_GUARDED_BY(progress_mutex_);  // per layer slot
  uint32_t layers_done_ ABSL_GUARDED_BY(progress_mutex_) = 0;
};

uint32_t Build::segment_end(size_t segment) const {
  const std::vector<SegmentEntry>& entries = base_->list->segments;
  return segment + 1 < entries.size() ? entries[segment + 1].rows->first_position()
                                      : base_->token_count();
}

absl::Status Build::Allocate() {
  const std::vector<SegmentEntry>& entries = base_->list->segments;
  std::vector<uint32_t> ends;
  for (size_t i = 0; i < entries.size(); ++i) ends.push_back(segment_end(i));
  epochs_ = CutEpochs(ends, cache_.engine->options.epoch_tokens);

  std::vector<size_t> sizes_bytes;
  for (const StoredLayers::Layer& stored : cache_.layers.layers) {
    sizes_bytes.insert(sizes_bytes.end(), epochs_.size(),
                       Codebook::SizeBytes(spec_.index, stored.shape));
  }
  for (const SegmentEntry& entry : entries) {
    SegmentIndex::AppendSizes(cache_.layers, spec_.index, entry.rows->slot_capacity(), sizes_bytes);
  }
  absl::StatusOr<std::vector<Extent>> extents = cache_.pool->Allocate(sizes_bytes);
  if (!extents.ok()) return extents.status();

  auto next = extents->begin();
  for (uint32_t slot = 0; slot < cache_.layers.size(); ++slot) {
    const LayerShape& shape = cache_.layers.layers[slot].shape;
    for (uint32_t epoch = 0; epoch < epochs_.size(); ++epoch) {
      auto unit = std::make_unique<Unit>();
      unit->layer_slot = slot;
      unit->epoch = epoch;
      unit->codebook = std::make_shared<Codebook>(std::move(*next++), spec_.index, shape, epoch);
      unit->results.resize(size_t{shape.kv_heads} * spec_.index.subspace_count);
      unit->subspaces_left = std::make_unique<std::atomic<uint32_t>[]>(shape.kv_heads);
      unit->heads_left = shape.kv_heads;
      for (uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
        unit->subspaces_left[kv_head] = spec_.index.subspace_count;
        for (uint32_t subspace = 0; subspace < spec_.index.subspace_count; ++subspace) {
          tasks_.push_back({unit.get(), kv_head, subspace});
        }
      }
      units_.push_back(std::move(unit));
    }
  }
  for (uint32_t epoch = 0; epoch < epochs_.size(); ++epoch) {
    std::vector<std::shared_ptr<const Codebook>> codebooks;
    for (uint32_t slot = 0; slot < cache_.layers.size(); ++slot) {
      codebooks.push_back(units_[slot * epochs_.size() + epoch]->codebook);
    }
    for (size_t i = epochs_[epoch].segment_begin; i < epochs_[epoch].segment_end; ++i) {
      const SegmentRows& rows = *entries[i].rows;
      std::vector<Extent> data;
      for (uint32_t slot = 0; slot < cache_.layers.size(); ++slot) {
        data.push_back(std::move(*next++));
      }
      const uint32_t sink_end = std::clamp(spec_.sink_tokens, rows.first_position(), ends[i]);
      segment_indexes_.push_back(std::make_shared<SegmentIndex>(cache_.layers, rows.slot_capacity(),
                                                                sink_end - rows.first_position(),
                                                                std::move(data), codebooks));
    }
  }
  return absl::OkStatus();
}

void Build::RequestStop(Stop reason) {
  Stop none = Stop::kNone;
  stop_.compare_exchange_strong(none, reason);
}

bool Build::Stopped() {
  if (sequence_.dropped()) RequestStop(Stop::kDropped);
  if (spec_.cancelled && spec_.cancelled()) RequestStop(Stop::kCancelled);
  return stop_.load() != Stop::kNone;
}

absl::Status Build::Run() {
  {
    const MutexLock lock(&progress_mutex_);
    epochs_done_.assign(cache_.layers.size(), 0);
  }
  tasks_left_ = static_cast<uint32_t>(tasks_.size());
  cache_.engine->building.parallel_for().run(
      static_cast<uint32_t>(tasks_.size()),
      [this](uint32_t task, uint32_t) { RunTask(tasks_[task]); });
  switch (stop_.load()) {
    case Stop::kNone:
      return absl::OkStatus();
    case Stop::kCancelled:
      return absl::CancelledError("the build was cancelled");
    case Stop::kDeadline:
      return absl::DeadlineExceededError("the deadline came before every layer had a codebook");
    case Stop::kDropped:
      return absl::NotFoundError("the sequence was dropped during the build");
  }
  return absl::InternalError("unknown stop");
}

void Build::RunTask(const Task& task) {
  if (Stopped()) return;
  if (absl::Now() >= spec_.deadline) return RequestStop(Stop::kDeadline);
  Unit& unit = *task.unit;
  unit.results[size_t{task.kv_head} * spec_.index.subspace_count + task.subspace] = TrainTask(task);
  tasks_left_.fetch_sub(1);
  if (Stopped() || unit.subspaces_left[task.kv_head].fetch_sub(1) != 1) return;
  EncodeHead(unit, task.kv_head);
  if (unit.heads_left.fetch_sub(1) == 1) FinishUnit(unit);
}

TrainingResult Build::TrainTask(const Task& task) {
  const Unit& unit = *task.unit;
  const StoredLayers::Layer& stored = layer(unit);
  const Epoch& epoch = epochs_[unit.epoch];
  // Exactly the rows that were ingested, without the sink.
  std::vector<kernels::RowSpan> rows;
  for (size_t i = epoch.segment_begin; i < epoch.segment_end; ++i) {
    const SegmentRows& segment = *base_->list->segments[i].rows;
    const uint32_t begin = std::max(segment.first_position(), spec_.sink_tokens);
    if (begin >= segment_end(i)) continue;
    rows.push_back({.rows = segment.rows(stored.first_head + task.kv_head) +
                            size_t{begin - segment.first_position()} * stored.shape.row_bytes,
                    .token_count = segment_end(i) - begin,
                    .first_position = begin});
  }
  absl::Time train_until = absl::InfiniteFuture();
  if (spec_.deadline != absl::InfiniteFuture()) {
    const absl::Time now = absl::Now();
    const double workers = cache_.engine->building.worker_count();
    const double share = std::min(1.0, workers / std::max(1u, tasks_left_.load()));
    train_until = now + (spec_.deadline - now) * (share * kTrainingShare);
  }
  const uint64_t head_seed =
      MixSeed(MixSeed(MixSeed(spec_.seed, stored.layer), unit.epoch), task.kv_head);
  const std::span<float> centroids = unit.codebook->centroids(task.kv_head);
  const size_t part_floats = centroids.size() / spec_.index.subspace_count;
  return Train(cache_.engine->options.exec,
               {.shape = stored.shape,
                .index = spec_.index,
                .subspace = task.subspace,
                .rows = rows,
                .sample_tokens = spec_.train_tokens,
                .iterations = spec_.iterations,
                .sample_seed = head_seed,
                .seed = MixSeed(head_seed, task.subspace),
                .go_on = [&] { return !Stopped() && absl::Now() < train_until; },
                .centroids = centroids.subspan(task.subspace * part_floats, part_floats)},
               cache_.engine->scratch);
}

void Build::EncodeHead(const Unit& unit, uint32_t kv_head) {
  const StoredLayers::Layer& stored = layer(unit);
  const ScratchPool::Buffer scratch = cache_.engine->scratch.Take(
      kernels::PqEncodeScratchBytes(GeometryOf(spec_.index, stored.shape.key_dim)));
  const Epoch& epoch = epochs_[unit.epoch];
  for (size_t i = epoch.segment_begin; i < epoch.segment_end; ++i) {
    const SegmentRows& rows = *base_->list->segments[i].rows;
    EncodeSlots(cache_.engine->options.exec, stored, rows, *segment_indexes_[i], unit.layer_slot,
                kv_head, {0, segment_end(i) - rows.first_position()}, scratch.bytes());
  }
}

void Build::FinishUnit(Unit& unit) {
  const Epoch& epoch = epochs_[unit.epoch];
  for (size_t i = epoch.segment_begin; i < epoch.segment_end; ++i) {
    const SegmentEntry& entry = base_->list->segments[i];
    if (!entry.closed && !closes_last()) continue;  // the open tail is counted when it closes
    CountCells(cache_.engine->options.exec, layer(unit), *segment_indexes_[i], unit.layer_slot,
               segment_end(i) - entry.rows->first_position());
  }
  CodebookHeader& header = unit.codebook->header();
  double inertia = 0;
  for (const TrainingResult& result : unit.results) {
    inertia += result.inertia;
    header.iteration_count = std::max(header.iteration_count, result.iterations);
    header.trained_token_count = result.trained_tokens;
  }
  header.inertia = inertia / layer(unit).shape.kv_heads;

  size_t index_bytes = 0;
  for (size_t i = 0; i < base_->list->segments.size(); ++i) {
    const SegmentRows& rows = *base_->list->segments[i].rows;
    index_bytes += IndexContentBytes(layer(unit).shape, spec_.index, rows.slot_capacity(),
                                     segment_end(i) - rows.first_position());
  }
  const MutexLock lock(&progress_mutex_);
  const uint32_t done = ++epochs_done_[unit.layer_slot];
  if (done == epochs_.size()) ++layers_done_;
  if (!progress_ || Stopped()) return;
  BuildProgress report{.layer = layer(unit).layer,
                       .layers_done = layers_done_,
                       .layer_count = cache_.layers.size(),
                       .epoch = unit.epoch,
                       .epoch_count = static_cast<uint32_t>(epochs_.size()),
                       .iterations = header.iteration_count,
                       .inertia = header.inertia,
                       .seconds = absl::ToDoubleSeconds(absl::Now() - began_),
                       .index_bytes = index_bytes,
                       .codebook_bytes = unit.codebook->content_bytes() * epochs_.size()};
  if (!progress_(report)) RequestStop(Stop::kCancelled);
}

std::shared_ptr<const Snapshot> Build::Result() const {
  auto list = std::make_shared<SegmentList>(*base_->list);
  for (size_t i = 0; i < list->segments.size(); ++i) {
    list->segments[i].indexes.push_back(segment_indexes_[i]);
  }
  list->indexes.push_back(spec_.index);
  if (closes_last()) list->segments.back().closed = true;
  list->prefill_closed = true;
  return std::make_shared<Snapshot>(std::move(list), base_->layer_tokens);
}

}  // namespace

std::vector<Epoch> CutEpochs(const std::vector<uint32_t>& segment_ends, uint32_t epoch_tokens) {
  std::vector<Epoch> epochs;
  Epoch epoch;
  for (size_t i = 0; i < segment_ends.size(); ++i) {
    epoch.segment_end = i + 1;
    epoch.tokens.end = segment_ends[i];
    if (epoch.tokens.end - epoch.tokens.begin < epoch_tokens) continue;
    epochs.push_back(epoch);
    epoch.segment_begin = i + 1;
    epoch.tokens.begin = epoch.tokens.end;
  }
  if (epoch.segment_begin == segment_ends.size()) return epochs;
  if (epochs.empty()) return {epoch};
  epochs.back().segment_end = epoch.segment_end;
  epochs.back().tokens.end = epoch.tokens.end;
  return epochs;
}

absl::Status BuildSequenceIndex(const Cache& cache, WriteLease lease, const BuildSpec& spec,
                                const std::function<bool(const BuildProgress&)>& progress) {
  if (absl::Status status = CheckSpec(cache, spec); !status.ok()) return status;
  auto base = lease.sequence().Read();
  if (!base.ok()) return base.status();
  if (absl::Status status = CheckSequence(cache, **base, spec); !status.ok()) return status;
  Build build(cache, lease.sequence(), *std::move(base), spec, progress);
  if (absl::Status status = build.Allocate(); !status.ok()) return status;
  if (absl::Status status = build.Run(); !status.ok()) return status;
  return lease.sequence().Publish(build.Result());
}

}  // namespace pqcached::kvstore
