#include "kvstore/index/layer_build.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/index/cost_model.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/read/indexes/seeds.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

// A mean over kv heads and sub-spaces needs fewer rows than centroids do: measuring 8192 took as
// long as one and a half iterations.
constexpr uint32_t kMeasuredTokens = 2048;

// Returns the arguments of one training task of a layer.
TrainingArgs TaskArgs(const LayerTraining& training, const LayerShape& shape, uint32_t task,
                      std::span<const kernels::RowSpan> rows, CodebookHeader& codebook) {
  const uint32_t tasks = BuiltTypeOf(training.index).TrainingTasks(training.index);
  const uint32_t kv_head = task / tasks;
  return {.shape = shape,
          .kv_head = kv_head,
          .task = task % tasks,
          .rows = rows,
          .sample_tokens = training.sample_tokens,
          .iterations = training.iterations,
          .seed = MixSeed(training.seed, kv_head),
          .first = training.first == nullptr ? nullptr : &training.first->header(),
          .samples = training.samples == nullptr ? SampledQueries()
                                                 : training.samples->OfHead(shape, kv_head),
          .keep_going = training.keep_going,
          .codebook = &codebook};
}

// Codes the slots [0, slot_end); `count`: and closes them.
absl::StatusOr<SegmentIndex::Layer> CodeInto(const Cache& cache, uint32_t layer_slot,
                                             const SegmentRows& rows, uint32_t slot_end,
                                             SegmentIndex::Layer data, bool count,
                                             const std::function<bool()>& keep_going) {
  const StoredLayers::Layer& layer = cache.layers.layers[layer_slot];
  const IndexDescriptor index = data.header().index;
  const kernels::Exec& exec = cache.compute.exec;
  std::atomic<bool> stopped = false;
  cache.compute.building.parallel_for().run(layer.shape.kv_heads, [&](uint32_t kv_head, uint32_t) {
    const ScratchPool::Buffer scratch =
        cache.compute.scratch.Take(BuiltTypeOf(index).EncodeScratchBytes(index, layer.shape));
    EncodeSlots(exec, layer, rows, data, kv_head, {0, slot_end}, scratch.bytes());
    if (!count || stopped) return;
    if (!CloseHead(cache.compute, layer, rows, data, kv_head, slot_end, keep_going)) stopped = true;
  });
  if (stopped) return Cancelled("the coding was given up");
  if (count) PublishClosing(data, slot_end);
  return data;
}

absl::StatusOr<SegmentIndex::Layer> Code(const Cache& cache, uint32_t layer_slot,
                                         const SegmentRows& rows, uint32_t slot_end,
                                         uint32_t counted_begin,
                                         std::shared_ptr<const Codebook> codebook, bool count,
                                         const std::function<bool()>& keep_going) {
  const LayerShape& shape = cache.layers.layers[layer_slot].shape;
  const std::vector<size_t> sizes_bytes = {
      SegmentIndex::LayerBytes(codebook->header().index, shape, rows.slot_capacity())};
  ASSIGN_OR_RETURN(auto extents, cache.pool->Allocate(sizes_bytes));
  SegmentIndex::Layer data = SegmentIndex::MakeLayer(
      shape, rows.slot_capacity(), counted_begin, std::move(extents.front()), std::move(codebook));
  return CodeInto(cache, layer_slot, rows, slot_end, std::move(data), count, keep_going);
}

}  // namespace

std::vector<kernels::RowSpan> TrainingRows(const StoredLayers::Layer& layer, uint32_t kv_head,
                                           std::span<const SegmentTokens> segments,
                                           uint32_t sink_tokens) {
  std::vector<kernels::RowSpan> spans;
  for (const SegmentTokens& segment : segments) {
    const uint32_t begin = std::max(segment.tokens.begin, sink_tokens);
    if (begin >= segment.tokens.end) continue;
    spans.push_back({.rows = segment.rows->rows(layer.first_head + kv_head) +
                             size_t{begin - segment.rows->first_position()} * layer.shape.row_bytes,
                     .token_count = segment.tokens.end - begin,
                     .first_position = begin});
  }
  return spans;
}

uint32_t AdaptiveIterations(const Cache& cache, uint32_t layer_slot, const IndexDescriptor& index,
                            PositionRange tokens, uint32_t sample_tokens) {
  const PrefillCost prefill = cache.prefill_times->Cost();
  const double seconds =
      PrefillSeconds(prefill, tokens.end) - PrefillSeconds(prefill, tokens.begin);
  if (seconds <= 0 || !BuiltTypeOf(index).Iterates()) return kMaxAdaptiveIterations;
  const LayerShape& shape = cache.layers.layers[layer_slot].shape;
  return IterationsWithin(cache.costs.Measured(shape, index),
                          {.head_count = shape.kv_heads,
                           .head_tasks = BuiltTypeOf(index).TrainingTasks(index),
                           .row_count = tokens.end - tokens.begin,
                           .sample_count = sample_tokens,
                           .worker_count = cache.compute.building.worker_count()},
                          seconds, kMaxAdaptiveIterations);
}

void PrepareHead(const Cache& cache, const TrainingArgs& args) {
  const BuiltIndexType& type = BuiltTypeOf(args.codebook->index);
  const size_t scratch_bytes = type.PrepareScratchBytes(args);
  if (scratch_bytes == 0) return;
  const auto scratch = cache.compute.scratch.Take(scratch_bytes);
  type.PrepareTraining(args, scratch.bytes());
}

TrainingResult Train(const Cache& cache, const TrainingArgs& args) {
  const BuiltIndexType& type = BuiltTypeOf(args.codebook->index);
  const kernels::Exec& exec = cache.compute.exec;
  const auto scratch = cache.compute.scratch.Take(type.TrainScratchBytes(exec, args));
  return type.Train(exec, args, scratch.bytes());
}

void TrainLayer(const Cache& cache, const LayerTraining& training, Codebook& codebook) {
  const StoredLayers::Layer& layer = cache.layers.layers[training.layer_slot];
  const BuiltIndexType& type = BuiltTypeOf(training.index);
  const uint32_t tasks = type.TrainingTasks(training.index);
  std::vector<TrainingResult> results(size_t{layer.shape.kv_heads} * tasks);
  if (type.NeedsSamples(training.index, layer.shape.key_dim)) {
    cache.compute.building.parallel_for().run(layer.shape.kv_heads, [&](uint32_t kv_head,
                                                                        uint32_t) {
      const auto rows = TrainingRows(layer, kv_head, training.segments, training.sink_tokens);
      PrepareHead(cache, TaskArgs(training, layer.shape, kv_head * tasks, rows, codebook.header()));
    });
  }
  cache.compute.building.parallel_for().run(
      static_cast<uint32_t>(results.size()), [&](uint32_t task, uint32_t) {
        const auto rows =
            TrainingRows(layer, task / tasks, training.segments, training.sink_tokens);
        results[task] =
            Train(cache, TaskArgs(training, layer.shape, task, rows, codebook.header()));
      });
  CodebookHeader& header = codebook.header();
  double inertia = 0;
  for (const TrainingResult& result : results) {
    inertia += result.inertia;
    header.iteration_count = std::max(header.iteration_count, result.iterations);
    header.trained_token_count = result.trained_tokens;
  }
  PQC_CRASH_POINT();
  header.inertia = inertia / layer.shape.kv_heads;
}

double MeasureLayer(const Cache& cache, const LayerTraining& training, const Codebook& codebook) {
  const StoredLayers::Layer& layer = cache.layers.layers[training.layer_slot];
  const BuiltIndexType& type = BuiltTypeOf(training.index);
  const uint32_t tasks = type.TrainingTasks(training.index);
  LayerTraining sampled = training;
  if (sampled.sample_tokens == 0 || sampled.sample_tokens > kMeasuredTokens) {
    sampled.sample_tokens = kMeasuredTokens;
  }
  std::vector<double> inertias(size_t{layer.shape.kv_heads} * tasks);
  cache.compute.building.parallel_for().run(
      static_cast<uint32_t>(inertias.size()), [&](uint32_t task, uint32_t) {
        const auto rows =
            TrainingRows(layer, task / tasks, training.segments, training.sink_tokens);
        const TrainingArgs args = TaskArgs(sampled, layer.shape, task, rows, codebook.header());
        const auto scratch =
            cache.compute.scratch.Take(type.TrainScratchBytes(cache.compute.exec, args));
        inertias[task] = type.MeasureInertia(cache.compute.exec, args, scratch.bytes());
      });
  return std::accumulate(inertias.begin(), inertias.end(), 0.0) / layer.shape.kv_heads;
}

absl::StatusOr<SegmentIndex::Layer> CodeLayer(const Cache& cache, uint32_t layer_slot,
                                              const SegmentRows& rows, uint32_t slot_end,
                                              uint32_t sink_tokens,
                                              std::shared_ptr<const Codebook> codebook,
                                              const std::function<bool()>& keep_going) {
  const uint32_t end = rows.first_position() + slot_end;
  const uint32_t counted_begin =
      std::clamp(sink_tokens, rows.first_position(), end) - rows.first_position();
  return Code(cache, layer_slot, rows, slot_end, counted_begin, std::move(codebook), true,
              keep_going);
}

absl::StatusOr<SegmentIndex::Layer> CodeOpenLayer(const Cache& cache, uint32_t layer_slot,
                                                  const SegmentRows& rows, uint32_t slot_end,
                                                  std::shared_ptr<const Codebook> codebook) {
  return Code(cache, layer_slot, rows, slot_end, /*counted_begin=*/0, std::move(codebook), false,
              {});
}

absl::StatusOr<SegmentIndex::Layer> CodeLayerAgain(const Cache& cache, uint32_t layer_slot,
                                                   const SegmentRows& rows, uint32_t slot_end,
                                                   SegmentIndex::Layer data,
                                                   const std::function<bool()>& keep_going) {
  IndexDataHeader& header = data.header();
  const LayerShape& shape = cache.layers.layers[layer_slot].shape;
  const size_t zeroed_bytes =
      BuiltTypeOf(header.index).ZeroedDataBytes(header.index, shape, rows.slot_capacity());
  header.counted_end.store(0);
  if (zeroed_bytes > sizeof(header)) {
    std::memset(static_cast<void*>(&header + 1), 0, zeroed_bytes - sizeof(header));
  }
  return CodeInto(cache, layer_slot, rows, slot_end, std::move(data), /*count=*/true, keep_going);
}

absl::StatusOr<std::shared_ptr<Codebook>> NewCodebook(const Cache& cache, uint32_t layer_slot,
                                                      const IndexDescriptor& index,
                                                      uint32_t codebook_generation) {
  const LayerShape& shape = cache.layers.layers[layer_slot].shape;
  const std::vector<size_t> sizes_bytes = {Codebook::SizeBytes(index, shape)};
  ASSIGN_OR_RETURN(auto extents, cache.pool->Allocate(sizes_bytes));
  return std::make_shared<Codebook>(std::move(extents.front()), index, shape, codebook_generation);
}

absl::Status CheckNeedsBuild(const IndexDescriptor& index, std::string_view field) {
  const IndexType* const type = FindIndexType(index);
  if (type == nullptr || type->built() != nullptr) return absl::OkStatus();
  const std::string text = std::string(type->info().name) + " " + std::string(WhyNotBuilt(*type));
  return type->info().switched_off.empty() ? InvalidArgument(std::string(field), text)
                                           : FailedPrecondition(std::string(field), text);
}

absl::Status CheckSamples(const Cache& cache, const Snapshot& snapshot,
                          const IndexDescriptor& index, bool has_first, std::string_view field) {
  const BuiltIndexType& type = BuiltTypeOf(index);
  const SegmentList& list = *snapshot.list;
  const size_t ordinal = list.Find(index);
  for (uint32_t slot = 0; slot < cache.layers.size(); ++slot) {
    const LayerShape& shape = cache.layers.layers[slot].shape;
    if (!shape.has_index() || list.SamplesOf(slot) != nullptr) continue;
    if (!type.NeedsSamples(index, shape.key_dim)) continue;
    const bool has_codes = has_first && ordinal < list.indexes.size() && !list.segments.empty() &&
                           list.segments.front().indexes[ordinal] != nullptr &&
                           list.segments.front().indexes[ordinal]->ready(slot);
    if (has_codes) continue;
    return FailedPrecondition(
        std::string(field),
        absl::StrCat(NameOf(index), " needs query samples, and layer ",
                     cache.layers.layers[slot].layer,
                     " has none: add them to the prompt before the index is built"));
  }
  return absl::OkStatus();
}

absl::Status CheckIndexOf(const Cache& cache, const IndexDescriptor& index,
                          std::string_view field) {
  if (cache.layers.indexed_count == 0) {
    return FailedPrecondition(std::string(field),
                              "the cache has no layers of kind selected, so no indexes");
  }
  for (const StoredLayers::Layer& layer : cache.layers.layers) {
    if (layer.shape.has_index()) {
      RETURN_IF_ERROR(ValidateIndex(index, layer.shape.key_dim, field));
    }
  }
  return absl::OkStatus();
}

}  // namespace pqcached::kvstore
