#include "kvstore/index/layer_build.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/train/pq_encode.h"
#include "kvstore/index/training.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

// A mean over kv heads and sub-spaces needs fewer rows than centroids do: measuring 8192 took as
// long as one and a half iterations.
constexpr uint32_t kMeasuredTokens = 2048;

// Returns the arguments of one training task, a (kv head, sub-space).
TrainingArgs TaskArgs(const LayerTraining& training, const LayerShape& shape, uint32_t task,
                      std::span<const kernels::RowSpan> rows, const Codebook& codebook) {
  const uint32_t subspaces = training.index.subspace_count;
  const uint32_t kv_head = task / subspaces;
  const uint32_t subspace = task % subspaces;
  const uint64_t head_seed = MixSeed(training.seed, kv_head);
  const auto part_of = [&](const Codebook& of) {
    const std::span<float> centroids = of.centroids(kv_head);
    const size_t floats = centroids.size() / subspaces;
    return centroids.subspan(subspace * floats, floats);
  };
  TrainingArgs args{.shape = shape,
                    .geometry = GeometryOf(codebook.header()),
                    .subspace = subspace,
                    .rows = rows,
                    .sample_tokens = training.sample_tokens,
                    .iterations = training.iterations,
                    .sample_seed = head_seed,
                    .seed = MixSeed(head_seed, subspace),
                    .keep_going = training.keep_going,
                    .centroids = part_of(codebook)};
  // Centroids of sub-spaces that were cut in another way are no better than random rows.
  if (training.first != nullptr &&
      training.first->header().paired_dims == codebook.header().paired_dims) {
    args.first = part_of(*training.first);
  }
  return args;
}

absl::StatusOr<SegmentIndex::Layer> Code(const Cache& cache, uint32_t layer_slot,
                                         const SegmentRows& rows, uint32_t slot_end,
                                         uint32_t counted_begin,
                                         std::shared_ptr<const Codebook> codebook, bool count) {
  const StoredLayers::Layer& layer = cache.layers.layers[layer_slot];
  const IndexDescriptor index = codebook->header().index;
  const std::vector<size_t> sizes_bytes = {
      SegmentIndex::LayerBytes(index, layer.shape, rows.slot_capacity())};
  ASSIGN_OR_RETURN(auto extents, cache.pool->Allocate(sizes_bytes));
  const SegmentIndex::Layer data =
      SegmentIndex::MakeLayer(layer.shape, rows.slot_capacity(), counted_begin,
                              std::move(extents.front()), std::move(codebook));
  const kernels::Exec& exec = cache.compute.exec;
  cache.compute.building.parallel_for().run(layer.shape.kv_heads, [&](uint32_t kv_head, uint32_t) {
    const ScratchPool::Buffer scratch = cache.compute.scratch.Take(
        kernels::PqEncodeScratchBytes(GeometryOf(index, layer.shape.key_dim)));
    EncodeSlots(exec, layer, rows, data, kv_head, {0, slot_end}, scratch.bytes());
    if (count) CountHead(exec, layer, data, kv_head, slot_end);
  });
  if (count) PublishCounts(data, slot_end);
  return data;
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

void TrainLayer(const Cache& cache, const LayerTraining& training, Codebook& codebook) {
  const StoredLayers::Layer& layer = cache.layers.layers[training.layer_slot];
  const uint32_t subspaces = training.index.subspace_count;
  std::vector<TrainingResult> results(size_t{layer.shape.kv_heads} * subspaces);
  cache.compute.building.parallel_for().run(
      static_cast<uint32_t>(results.size()), [&](uint32_t task, uint32_t) {
        const auto rows =
            TrainingRows(layer, task / subspaces, training.segments, training.sink_tokens);
        results[task] =
            Train(cache.compute.exec, TaskArgs(training, layer.shape, task, rows, codebook),
                  cache.compute.scratch);
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
  const uint32_t subspaces = training.index.subspace_count;
  LayerTraining sampled = training;
  if (sampled.sample_tokens == 0 || sampled.sample_tokens > kMeasuredTokens) {
    sampled.sample_tokens = kMeasuredTokens;
  }
  std::vector<double> inertias(size_t{layer.shape.kv_heads} * subspaces);
  cache.compute.building.parallel_for().run(
      static_cast<uint32_t>(inertias.size()), [&](uint32_t task, uint32_t) {
        const auto rows =
            TrainingRows(layer, task / subspaces, training.segments, training.sink_tokens);
        inertias[task] =
            MeasureInertia(cache.compute.exec, TaskArgs(sampled, layer.shape, task, rows, codebook),
                           cache.compute.scratch);
      });
  return std::accumulate(inertias.begin(), inertias.end(), 0.0) / layer.shape.kv_heads;
}

absl::StatusOr<SegmentIndex::Layer> CodeLayer(const Cache& cache, uint32_t layer_slot,
                                              const SegmentRows& rows, uint32_t slot_end,
                                              uint32_t sink_tokens,
                                              std::shared_ptr<const Codebook> codebook) {
  const uint32_t end = rows.first_position() + slot_end;
  const uint32_t counted_begin =
      std::clamp(sink_tokens, rows.first_position(), end) - rows.first_position();
  return Code(cache, layer_slot, rows, slot_end, counted_begin, std::move(codebook), true);
}

absl::StatusOr<SegmentIndex::Layer> CodeOpenLayer(const Cache& cache, uint32_t layer_slot,
                                                  const SegmentRows& rows, uint32_t slot_end,
                                                  std::shared_ptr<const Codebook> codebook) {
  return Code(cache, layer_slot, rows, slot_end, /*counted_begin=*/0, std::move(codebook), false);
}

absl::StatusOr<std::shared_ptr<Codebook>> NewCodebook(const Cache& cache, uint32_t layer_slot,
                                                      const IndexDescriptor& index,
                                                      uint32_t codebook_generation) {
  const LayerShape& shape = cache.layers.layers[layer_slot].shape;
  const std::vector<size_t> sizes_bytes = {Codebook::SizeBytes(index, shape)};
  ASSIGN_OR_RETURN(auto extents, cache.pool->Allocate(sizes_bytes));
  return std::make_shared<Codebook>(std::move(extents.front()), index, shape, codebook_generation);
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
