#include "kvstore/index/build.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/read/indexes/seeds.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

// Share of the time to the deadline that is reserved for costs that the model does not know
// (wake-ups, publishing).
constexpr double kReservedShare = 0.10;
constexpr uint32_t kMinSampleTokens = 1024;  // rows per kv head, under a deadline
constexpr double kMaxSlowdown = 8.0;         // a larger measured slowdown is an outlier
// Maximum time that the last step waits for a writer before it checks again whether the build was
// stopped.
constexpr absl::Duration kWriterWait = absl::Milliseconds(10);
constexpr int kCatchUpRounds = 8;  // after that, new rows are coded while writers wait

}  // namespace

uint32_t Build::segment_end(size_t segment) const {
  const SegmentEntry& entry = base_->list->segments[segment];
  return entry.closed ? entry.token_end : base_->token_count();
}

absl::Status Build::Allocate() {
  const std::vector<SegmentEntry>& entries = base_->list->segments;
  std::vector<uint32_t> ends;
  for (size_t i = 0; i < entries.size(); ++i) ends.push_back(segment_end(i));
  generations_ = SplitGenerations(
      ends, type_.TrainsOnRows()
                ? MinGenerationTokens(ends.back(), cache_.segmenting.codebook_tokens)
                : ends.back());

  std::vector<size_t> sizes_bytes;
  for (const StoredLayers::Layer& stored : cache_.layers.layers) {
    if (!stored.shape.has_index()) continue;
    sizes_bytes.insert(sizes_bytes.end(), generations_.size(),
                       Codebook::SizeBytes(spec_.index, stored.shape));
  }
  for (const SegmentEntry& entry : entries) {
    SegmentIndex::AppendSizes(cache_.layers, spec_.index, entry.rows->slot_capacity(), sizes_bytes);
  }
  ASSIGN_OR_RETURN(std::vector<Extent> extents, cache_.pool->Allocate(sizes_bytes));

  const uint32_t first_generation = FirstGeneration();
  auto next = extents.begin();
  for (uint32_t slot = 0; slot < cache_.layers.size(); ++slot) {
    if (!HasIndex(slot)) continue;
    const LayerShape& shape = cache_.layers.layers[slot].shape;
    for (uint32_t generation = 0; generation < generations_.size(); ++generation) {
      auto unit = std::make_unique<Unit>();
      unit->layer_slot = slot;
      unit->codebook_generation = generation;
      unit->codebook = std::make_shared<Codebook>(std::move(*next++), spec_.index, shape,
                                                  first_generation + generation);
      unit->results.resize(size_t{shape.kv_heads} * head_tasks_);
      unit->tasks_left = std::make_unique<std::atomic<uint32_t>[]>(shape.kv_heads);
      unit->heads_left = shape.kv_heads;
      for (uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
        unit->tasks_left[kv_head] = head_tasks_;
        for (uint32_t number = 0; number < head_tasks_; ++number) {
          tasks_.push_back({unit.get(), kv_head, number});
        }
      }
      units_.push_back(std::move(unit));
    }
  }
  for (uint32_t generation = 0; generation < generations_.size(); ++generation) {
    std::vector<std::shared_ptr<const Codebook>> codebooks;
    for (uint32_t slot = 0; slot < cache_.layers.size(); ++slot) {
      codebooks.push_back(CodebookOf(slot, generation));
    }
    for (size_t i = generations_[generation].segment_begin;
         i < generations_[generation].segment_end; ++i) {
      const SegmentRows& rows = *entries[i].rows;
      const auto data_end = next + cache_.layers.indexed_count;
      std::vector<Extent> data(std::make_move_iterator(next), std::make_move_iterator(data_end));
      next = data_end;
      const uint32_t sink_end = std::clamp(spec_.sink_tokens, rows.first_position(), ends[i]);
      segment_indexes_.push_back(std::make_shared<SegmentIndex>(cache_.layers, rows.slot_capacity(),
                                                                sink_end - rows.first_position(),
                                                                std::move(data), codebooks));
      segment_indexes_.back()->BeginLayers();
    }
  }
  return absl::OkStatus();
}

uint32_t Build::FirstGeneration() const {
  if (!replaces_) return 0;
  const size_t ordinal = base_->list->Find(spec_.index);
  uint32_t first = 0;
  for (const SegmentEntry& entry : base_->list->segments) {
    for (uint32_t slot = 0; slot < cache_.layers.size(); ++slot) {
      if (!HasIndex(slot)) continue;
      const CodebookHeader& header = entry.indexes[ordinal]->codebook(slot)->header();
      first = std::max(first, header.codebook_generation + 1);
    }
  }
  return first;
}

std::shared_ptr<const Codebook> Build::CodebookOf(uint32_t layer_slot, uint32_t generation) const {
  if (!HasIndex(layer_slot)) return nullptr;
  const auto of_layer =
      std::lower_bound(units_.begin(), units_.end(), layer_slot,
                       [](const auto& unit, uint32_t wanted) { return unit->layer_slot < wanted; });
  return of_layer[generation]->codebook;
}

void Build::RequestStop(Stop reason) {
  Stop none = Stop::kNone;
  stop_.compare_exchange_strong(none, reason);
}

bool Build::Stopped() {
  if (sequence_->dropped()) RequestStop(Stop::kDropped);
  if (spec_.is_cancelled && spec_.is_cancelled()) RequestStop(Stop::kCancelled);
  return stop_.load() != Stop::kNone;
}

absl::Status Build::StopStatus() const {
  switch (stop_.load()) {
    case Stop::kNone:
      return absl::OkStatus();
    case Stop::kCancelled:
      return Cancelled("the build was cancelled");
    case Stop::kDeadline:
      return DeadlineExceeded("", "the deadline passed before every layer had a codebook");
    case Stop::kDropped:
      return NotFound("sequence_id", "the sequence was dropped during the build");
  }
  return Internal("unknown stop");
}

// Costs are measured only with a deadline, so that a build without one, and with a number of
// iterations, depends on no clock.
void Build::MeasureCosts() {
  if (spec_.deadline == SteadyTime::InfiniteFuture() || !type_.Iterates()) return;
  for (const StoredLayers::Layer& stored : cache_.layers.layers) {
    costs_.push_back(stored.shape.has_index() ? cache_.costs.Measured(stored.shape, spec_.index)
                                              : BuildCost{});
  }
  absl::Duration coding;
  for (const auto& unit : units_) coding += layer(*unit).shape.kv_heads * CodingTime(*unit);
  coding_left_ns_ = absl::ToInt64Nanoseconds(coding);
}

void Build::ChooseIterations() {
  for (const auto& unit : units_) {
    const uint32_t rows = head_tokens(*unit);
    const uint32_t sample = spec_.train_tokens == 0 ? rows : std::min(spec_.train_tokens, rows);
    unit->iterations =
        spec_.iterations > 0
            ? spec_.iterations
            : AdaptiveIterations(cache_, unit->layer_slot, spec_.index,
                                 generations_[unit->codebook_generation].tokens, sample);
  }
}

// Returns the time to code the unit's rows of one kv head on one thread.
absl::Duration Build::CodingTime(const Unit& unit) const {
  if (costs_.empty()) return absl::ZeroDuration();
  return absl::Seconds(costs_[unit.layer_slot].code * head_tokens(unit));
}

absl::Status Build::Run() {
  {
    const MutexLock lock(&progress_mutex_);
    generations_done_.assign(cache_.layers.size(), 0);
  }
  ChooseIterations();
  MeasureCosts();
  PrepareHeads();
  tasks_left_ = static_cast<uint32_t>(tasks_.size());
  cache_.compute.building.parallel_for().run(
      static_cast<uint32_t>(tasks_.size()),
      [this](uint32_t task, uint32_t) { RunTask(tasks_[task]); });
  if (stop_.load() != Stop::kNone) return StopStatus();
  const MutexLock lock(&progress_mutex_);
  return publish_status_;
}

bool Build::GoesOn() {
  if (Stopped()) return false;
  if (clock_() < spec_.deadline) return true;
  RequestStop(Stop::kDeadline);
  return false;
}

void Build::RunTask(const Task& task) {
  if (!GoesOn()) return;
  Unit& unit = *task.unit;
  unit.results[size_t{task.kv_head} * head_tasks_ + task.number] = TrainTask(task);
  tasks_left_.fetch_sub(1);
  if (Stopped() || unit.tasks_left[task.kv_head].fetch_sub(1) != 1) return;
  if (!EncodeHead(unit, task.kv_head)) return;
  coding_left_ns_.fetch_sub(absl::ToInt64Nanoseconds(CodingTime(unit)));
  if (unit.heads_left.fetch_sub(1) == 1) FinishUnit(unit);
}

// Returns exactly the rows that were ingested.
std::vector<SegmentTokens> Build::TokensOf(const Unit& unit) const {
  std::vector<SegmentTokens> tokens;
  const CodebookGeneration& generation = generations_[unit.codebook_generation];
  for (size_t i = generation.segment_begin; i < generation.segment_end; ++i) {
    const auto& rows = base_->list->segments[i].rows;
    tokens.push_back({rows, {rows->first_position(), segment_end(i)}});
  }
  return tokens;
}

void Build::PrepareHeads() {
  cache_.compute.building.parallel_for().run(
      static_cast<uint32_t>(tasks_.size()), [this](uint32_t number, uint32_t) {
        const Task& task = tasks_[number];
        const StoredLayers::Layer& stored = layer(*task.unit);
        if (task.number != 0 || !type_.NeedsSamples(spec_.index, stored.shape.key_dim) ||
            Stopped()) {
          return;
        }
        PrepareHead(cache_, ArgsOf(task, TrainingRows(stored, task.kv_head, TokensOf(*task.unit),
                                                      spec_.sink_tokens)));
      });
}

TrainingArgs Build::ArgsOf(const Task& task, std::span<const kernels::RowSpan> rows) {
  const Unit& unit = *task.unit;
  const StoredLayers::Layer& stored = layer(unit);
  const uint64_t head_seed =
      MixSeed(MixSeed(MixSeed(spec_.seed, stored.layer), unit.codebook_generation), task.kv_head);
  const auto samples = base_->list->SamplesOf(unit.layer_slot);
  // Without samples, the index that is replaced has what they determined.
  const CodebookHeader* first = nullptr;
  if (samples == nullptr && replaces_ && type_.NeedsSamples(spec_.index, stored.shape.key_dim)) {
    const SegmentEntry& entry = base_->list->segments.front();
    first = &entry.indexes[base_->list->Find(spec_.index)]->codebook(unit.layer_slot)->header();
  }
  return {.shape = stored.shape,
          .kv_head = task.kv_head,
          .task = task.number,
          .rows = rows,
          .sample_tokens = spec_.train_tokens,
          .iterations = unit.iterations,
          .seed = head_seed,
          .first = first,
          .samples =
              samples == nullptr ? SampledQueries() : samples->OfHead(stored.shape, task.kv_head),
          .keep_going = [this] { return !Stopped(); },
          .codebook = &unit.codebook->header()};
}

TrainingResult Build::TrainTask(const Task& task) {
  const Unit& unit = *task.unit;
  const std::vector<kernels::RowSpan> rows =
      TrainingRows(layer(unit), task.kv_head, TokensOf(unit), spec_.sink_tokens);
  TrainingArgs args = ArgsOf(task, rows);
  if (costs_.empty()) return Train(cache_, args);
  // The task gets its share of the time that coding leaves.
  const BuildCost& cost = costs_[unit.layer_slot];
  const double slowdown = slowdown_.load();
  const SteadyTime now = clock_();
  const double workers = cache_.compute.building.worker_count();
  const double share = std::min(1.0, workers / std::max(1u, tasks_left_.load()));
  const absl::Duration left = spec_.deadline - now - kReservedShare * (spec_.deadline - began_) -
                              absl::Nanoseconds(coding_left_ns_.load()) * slowdown / workers;
  const absl::Duration slice = std::max(absl::ZeroDuration(), left * share);
  // The sample is reduced before the iterations: this costs the codebook little quality.
  const double fit = absl::ToDoubleSeconds(slice) / ((cost.load + cost.step) * slowdown);
  uint32_t sample =
      spec_.train_tokens == 0 ? head_tokens(unit) : std::min(spec_.train_tokens, head_tokens(unit));
  if (fit < sample) {
    sample = std::min(sample, std::max(kMinSampleTokens, static_cast<uint32_t>(fit)));
    args.sample_tokens = sample;
  }
  const absl::Duration step = absl::Seconds(cost.step * sample);
  args.keep_going = [this, step = step * slowdown, until = now + slice] {
    return !Stopped() && clock_() + step <= until;
  };
  const TrainingResult result = Train(cache_, args);
  if (result.iterations > 0 && result.iterations < args.iterations) {
    UpdateSlowdown(clock_() - now, absl::Seconds(cost.load * sample) + step * result.iterations);
  }
  return result;
}

void Build::UpdateSlowdown(absl::Duration took, absl::Duration by_costs) {
  slowdown_ = std::clamp(absl::FDivDuration(took, by_costs), 1.0, kMaxSlowdown);
}

bool Build::EncodeHead(const Unit& unit, uint32_t kv_head) {
  const StoredLayers::Layer& stored = layer(unit);
  const kernels::Exec& exec = cache_.compute.exec;
  const ScratchPool::Buffer scratch =
      cache_.compute.scratch.Take(type_.EncodeScratchBytes(spec_.index, stored.shape));
  const CodebookGeneration& generation = generations_[unit.codebook_generation];
  for (size_t i = generation.segment_begin; i < generation.segment_end; ++i) {
    const SegmentRows& rows = *base_->list->segments[i].rows;
    const SegmentIndex::Layer& index = segment_indexes_[i]->layer(unit.layer_slot);
    const uint32_t slot_end = segment_end(i) - rows.first_position();
    EncodeSlots(exec, stored, rows, index, kv_head, {0, slot_end}, scratch.bytes());
    const bool closed = CloseHead(cache_.compute, stored, rows, index, kv_head, slot_end,
                                  [this] { return GoesOn(); });
    if (!closed) return false;
  }
  return true;
}

void Build::FinishUnit(Unit& unit) {
  const CodebookGeneration& generation = generations_[unit.codebook_generation];
  size_t index_bytes = 0;
  for (size_t i = 0; i < base_->list->segments.size(); ++i) {
    const SegmentRows& rows = *base_->list->segments[i].rows;
    const uint32_t slot_end = segment_end(i) - rows.first_position();
    index_bytes +=
        IndexContentBytes(layer(unit).shape, spec_.index, rows.slot_capacity(), slot_end);
    if (i < generation.segment_begin || i >= generation.segment_end) continue;
    PublishClosing(segment_indexes_[i]->layer(unit.layer_slot), slot_end);
  }
  CodebookHeader& header = unit.codebook->header();
  double inertia = 0;
  for (const TrainingResult& result : unit.results) {
    inertia += result.inertia;
    header.iteration_count = std::max(header.iteration_count, result.iterations);
    header.trained_token_count = result.trained_tokens;
  }
  PQC_CRASH_POINT();
  header.inertia = inertia / layer(unit).shape.kv_heads;

  const MutexLock lock(&progress_mutex_);
  if (++generations_done_[unit.layer_slot] == generations_.size()) {
    ++layers_done_;
    if (!Stopped()) publish_status_.Update(PublishLayer(unit.layer_slot));
  }
  if (!progress_ || Stopped()) return;
  BuildProgress report{.layer = layer(unit).layer,
                       .layers_done = layers_done_,
                       .layer_count = cache_.layers.indexed_count,
                       .codebook_generation = unit.codebook_generation,
                       .codebook_generation_count = static_cast<uint32_t>(generations_.size()),
                       .iterations = header.iteration_count,
                       .inertia = header.inertia,
                       .seconds = absl::ToDoubleSeconds(clock_() - began_),
                       .index_bytes = index_bytes,
                       .codebook_bytes = unit.codebook->content_bytes() * generations_.size()};
  if (!progress_(report)) RequestStop(Stop::kCancelled);
}

absl::Status Build::PublishLayer(uint32_t layer_slot) {
  std::vector<IndexedSegment> indexed;
  for (size_t i = 0; i < segment_indexes_.size(); ++i) {
    segment_indexes_[i]->MarkReady(layer_slot);
    indexed.push_back({base_->list->segments[i].rows->segment_id(), segment_indexes_[i]});
  }
  if (!replaces_) return sequence_->PublishIndex(spec_.index, indexed);
  for (IndexedSegment& each : indexed) unpublished_[each.segment_id] = std::move(each.index);
  return absl::OkStatus();
}

std::shared_ptr<const SegmentIndex> Build::IndexOf(const SegmentEntry& entry,
                                                   size_t ordinal) const {
  if (!replaces_) return entry.indexes[ordinal];
  const auto made = unpublished_.find(entry.rows->segment_id());
  return made == unpublished_.end() ? nullptr : made->second;
}

absl::Status Build::Replace(const Snapshot& snapshot) {
  std::vector<IndexedSegment> indexed;
  for (const SegmentEntry& entry : snapshot.list->segments) {
    const uint64_t segment_id = entry.rows->segment_id();
    indexed.push_back({segment_id, unpublished_.at(segment_id)});
  }
  return sequence_->PublishIndex(spec_.index, indexed);
}

absl::StatusOr<bool> Build::CodeNewSegments(const Snapshot& snapshot, bool with_tail) {
  const SegmentList& list = *snapshot.list;
  const size_t ordinal = list.Find(spec_.index);
  if (ordinal == list.indexes.size())
    return Aborted("index", "the index was taken away", kRetryConflict);
  std::vector<IndexedSegment> indexed;
  for (const SegmentEntry& entry : list.segments) {
    if (IndexOf(entry, ordinal) != nullptr) continue;
    // An active writer does not know the codes of this build. A segment that lacks rows in a layer
    // is coded under the lease, and writers complete it from then on.
    const bool complete = entry.closed && entry.token_end <= snapshot.token_count();
    if (!complete && !with_tail) continue;
    const uint32_t first = entry.rows->first_position();
    auto index = std::make_shared<const SegmentIndex>(cache_.layers, spec_.index);
    const auto newest = static_cast<uint32_t>(generations_.size() - 1);
    for (uint32_t slot = 0; slot < cache_.layers.size(); ++slot) {
      const auto codebook = CodebookOf(slot, newest);
      if (codebook == nullptr) continue;
      const uint32_t tokens = snapshot.layer_tokens[slot];
      const uint32_t end =
          std::max(entry.closed ? std::min(entry.token_end, tokens) : tokens, first);
      // Under the lease, a long closing is left out.
      const bool closes = entry.closed && !(with_tail && type_.ClosesLater());
      ASSIGN_OR_RETURN(auto layer,
                       closes ? CodeLayer(cache_, slot, *entry.rows, end - first, spec_.sink_tokens,
                                          codebook, [this] { return !Stopped(); })
                              : CodeOpenLayer(cache_, slot, *entry.rows, end - first, codebook));
      index = index->With(slot, std::move(layer));
    }
    indexed.push_back({entry.rows->segment_id(), std::move(index)});
  }
  if (indexed.empty()) return false;
  if (!replaces_) {
    RETURN_IF_ERROR(sequence_->PublishIndex(spec_.index, indexed));
    return true;
  }
  for (IndexedSegment& each : indexed) unpublished_[each.segment_id] = std::move(each.index);
  return true;
}

absl::Status Build::CatchUp() {
  for (int round = 0; round < kCatchUpRounds; ++round) {  // each leaves less for below
    if (Stopped()) return StopStatus();
    ASSIGN_OR_RETURN(const auto snapshot, sequence_->Peek());
    const auto coded = CodeNewSegments(*snapshot, /*with_tail=*/false);
    if (absl::IsCancelled(coded.status())) continue;
    if (!coded.ok() && !absl::IsAborted(coded.status())) return coded.status();
    if (coded.ok() && !*coded) break;
  }
  for (;;) {
    if (Stopped()) return StopStatus();
    const auto lease = WriteLease::TakeShort(sequence_, SteadyTime::Now() + kWriterWait);
    if (!lease.ok()) {
      if (absl::IsAborted(lease.status())) continue;  // another writer is active
      return lease.status();
    }
    ASSIGN_OR_RETURN(const auto snapshot, sequence_->Peek());
    RETURN_IF_ERROR(CodeNewSegments(*snapshot, /*with_tail=*/true).status());
    return replaces_ ? Replace(*snapshot) : absl::OkStatus();
  }
}

}  // namespace pqcached::kvstore
